"""Hashing that cannot be avoided: `python -I _floor.py FOLDER PASSES` runs sha256 over every file, in ranges,
on all cores.
"""

from __future__ import annotations

import hashlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

CHUNK = 64 << 20  # bytes of one range


def _hash(job: tuple[Path, int]) -> None:
    with open(job[0], "rb", buffering=0) as file:
        file.seek(job[1])
        hashlib.sha256(file.read(CHUNK)).digest()


def main(folder: Path, passes: int) -> None:
    files = [path for path in folder.rglob("*") if path.is_file() and "secure-train" not in path.parts]
    jobs = [(path, start) for path in files for start in range(0, path.stat().st_size, CHUNK)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(_hash, jobs * passes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
