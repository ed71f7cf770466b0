"""Memory stays flat, whatever the size of a file (measured in a process of its own)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_MEASURE = """
import resource, sys
from pathlib import Path
from supplychain.artifact import build_manifest, differences
root = Path(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
manifest = build_manifest(root, "dataset")
assert differences(root, manifest) == []
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_hashing_a_gigabyte_takes_megabytes(tmp_path: Path) -> None:
    for name, size in (("big.bin", 1 << 30), ("other.bin", 100 << 20)):
        (tmp_path / name).touch()
        os.truncate(tmp_path / name, size)  # sparse
    result = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(result.stdout) < 48 << 10, "kilobytes above the start"
