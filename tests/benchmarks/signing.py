"""Signing and verifying folders: secure-train beside model-signing, on the same files, with the same key,
through both command lines.

The floor is the reading and hashing that cannot be avoided: sha256 of every byte by as many threads as there
are cores (for signing, twice: the whole file and its blocks).
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.benchmarks import _floor
from tests.benchmarks._report import OURS, Report, command, gate, options, peers

PEER = "model-signing"
_FLOOR = Path(_floor.__file__)
FLOOR = "sha256 on all cores"


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument(
        "--megabytes", type=int, default=1024, metavar="N", help="size of the large artifacts (default 1024)"
    )
    parser.add_argument(
        "--files",
        type=int,
        default=5000,
        metavar="N",
        help="number of files of the small-file artifact (default 5000)",
    )
    chosen = parser.parse_args()
    report = Report("signing and verifying")
    with tempfile.TemporaryDirectory(prefix="bench-signing-") as folder:
        _measure(report, Path(folder), chosen.megabytes, chosen.files, chosen.repeat)
    report.finish(chosen.json)


def _measure(report: Report, folder: Path, megabytes: int, files: int, repeat: int) -> None:
    config = folder / "config"
    os.environ["SECURE_TRAIN_CONFIG"] = str(config)
    command([gate() / "secure-train", "keys", "new", "bench"])
    cases = {
        f"one file of {megabytes} MB": _large(folder / "one", 1, megabytes),
        f"8 files of {megabytes // 8} MB": _large(folder / "eight", 8, megabytes // 8),
        f"{files} files of 4 kB": _small(folder / "many", files),
        "one file of 4 kB": _small(folder / "tiny", 1),
    }
    for name, artifact in cases.items():
        _race(report, name, artifact, config / "keys" / "bench.key", config / "keys" / "bench.pub", repeat)


def _race(report: Report, name: str, artifact: Path, key: Path, public: Path, repeat: int) -> None:
    """Sign one artifact with each system, then verify it with each."""
    ours = gate() / "secure-train"
    theirs = peers() / "model_signing"
    copy = artifact.with_name(
        f"{artifact.name}-oms"
    )  # the peer's bundle must not become part of our artifact
    shutil.copytree(artifact, copy, copy_function=os.link)
    bundle = artifact.with_name(f"{artifact.name}.sig")
    sign: dict[str, list[str | Path]] = {
        OURS: [ours, "sign", artifact, "--kind", "model", "--key", "bench"],
        PEER: [theirs, "sign", "key", copy, "--private_key", key, "--signature", bundle],
        FLOOR: [sys.executable, "-I", _FLOOR, artifact, "2"],
    }
    verify: dict[str, list[str | Path]] = {
        OURS: [ours, "verify", artifact, "--key", public],
        PEER: [theirs, "verify", "key", copy, "--public_key", public, "--signature", bundle],
        FLOOR: [sys.executable, "-I", _FLOOR, artifact, "1"],
    }
    for verb, commands in (("sign", sign), ("verify", verify)):
        report.race(
            f"{verb} {name}", {system: partial(command, words) for system, words in commands.items()}, repeat
        )


def _large(folder: Path, count: int, megabytes: int) -> Path:
    folder.mkdir()
    block = os.urandom(1 << 20)
    for index in range(count):
        with open(folder / f"model-{index:05d}.safetensors", "wb") as file:
            for number in range(megabytes):
                file.write(number.to_bytes(8, "little") + block[8:])
    return folder


def _small(folder: Path, count: int) -> Path:
    for index in range(count):
        path = folder / f"part-{index % 50:02d}" / f"{index:06d}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(4096))
    return folder


if __name__ == "__main__":
    main()
