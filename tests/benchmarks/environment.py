"""Verifying the training environment: every byte and every owner, beside tools that answer lesser questions.

Peers: `pip check` and `uv pip check` (are the stated requirements met?) and cyclonedx-py (what is
installed?). None of them reads an installed file's bytes. The floor is sha256 over the environment's files by
as many threads as there are cores. The peers that start Python work on a copy of hard links: starting it can
leave bytecode behind.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

from supplychain.artifact import MANIFEST
from supplychain.environment.build import build_environment
from tests.benchmarks import _floor
from tests.benchmarks._report import OURS, Report, command, options, peers

ROOT = Path(__file__).resolve().parents[2]
HOME = Path(os.environ.get("SECURE_TRAIN_TEST_HOME", ROOT / ".secure-train"))


def main() -> None:
    chosen = options(__doc__ or "").parse_args()
    profile = json.loads((HOME / "training" / "environment.json").read_bytes())["profile"]
    lock = ROOT / "requirements" / f"training-{profile}.lock"
    report = Report(f"verifying the training environment ({profile} profile)")
    with tempfile.TemporaryDirectory(dir=HOME, prefix=".bench-") as folder:
        # Without our own package: it states the gate's requirements, which `pip check` would miss here.
        environment = build_environment(lock, Path(folder), cache=HOME / "cache" / "wheels", profile=profile)
        manifest = hashlib.sha256((environment / MANIFEST).read_bytes()).hexdigest()
        copy = Path(folder) / "environment"
        shutil.copytree(environment, copy, copy_function=os.link)
        python = copy / "bin" / "python"
        alone: list[str | Path] = [sys.executable, "-I", "-S", "-B", ROOT / "supplychain" / "environment"]
        systems: dict[str, list[str | Path]] = {
            OURS: [*alone, "--prefix", environment, "--manifest", manifest, "--lock", lock],
            "sha256 on all cores": [sys.executable, "-I", _floor.__file__, environment, "1"],
            "pip check": [HOME / "tools" / "bin" / "python", "-I", "-m", "pip", "--python", python, "check"],
            "uv pip check": [peers() / "uv", "--no-config", "pip", "check", "--python", python],
            "cyclonedx-py": [peers() / "cyclonedx-py", "environment", "--output-reproducible", python],
        }
        report.race(
            "verify", {name: partial(command, words) for name, words in systems.items()}, chosen.repeat
        )
        size = sum(path.stat().st_size for path in environment.rglob("*"))
        report.note("verify", OURS, "bytes", size / 1e6, "MB")
    report.finish(chosen.json)


if __name__ == "__main__":
    main()
