"""A site as its engineer has it: the built gate, a copy of the training environment, a key, a policy, signed
data. Everything goes through the
command line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# A run of seconds: few steps, no compilation. Tests that need more say so.
SHORT = (
    "train.steps=6",
    "train.global_batch=4",
    "train.micro_batch=2",
    "train.validate_every=0",
    "optimizer.warmup_steps=2",
    "checkpoint.every=2",
    "log.every=1",
    "compile=false",
)
TEXT = "\n\n".join(
    f"Scene {n}. Enter a messenger, who says: the {n}th ship has come home, and brings {n * 7} men."
    for n in range(1, 400)
)


@dataclass
class Site:
    """Paths, and ways to run the command."""

    folder: Path
    gate: Path
    environment: Path
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def policy(self) -> Path:
        return self.folder / "policy.toml"

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def tokenizer(self) -> Path:
        return self.folder / "tokenizer"

    def command(self, *arguments: str | Path) -> list[str]:
        return [str(self.gate / "bin" / "secure-train"), *map(str, arguments)]

    def run(self, *arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """The command, to its end, with pipes for stdout and stderr."""
        return subprocess.run(
            self.command(*arguments),
            env=self.variables | variables,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )

    def ok(self, *arguments: str | Path, **variables: str) -> str:
        """The command's stdout; fails the test with everything it printed if it did not end well."""
        done = self.run(*arguments, **variables)
        assert done.returncode == 0, f"{arguments}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def json(self, *arguments: str | Path, **variables: str) -> tuple[int, dict[str, Any]]:
        """Exit code and the one document on stdout."""
        done = self.run(*arguments, "--json", **variables)
        document: dict[str, Any] = json.loads(done.stdout)
        assert document["exit_code"] == done.returncode
        return done.returncode, document

    def train(
        self, out: Path, *extra: str, settings: tuple[str, ...] = SHORT, processes: int = 2
    ) -> list[str | Path]:
        """Arguments of a short run into `out`."""
        chosen = [item for setting in settings for item in ("--set", setting)]
        return [
            "run",
            "--data",
            self.data,
            "--tokenizer",
            self.tokenizer,
            "--out",
            out,
            "--preset",
            "quickstart",
            *chosen,
            "--processes",
            str(processes),
            "--device",
            "cpu",
            *extra,
        ]

    def start(self, *arguments: str | Path) -> subprocess.Popen[str]:
        """The command in the background, in a session of its own, as a terminal would have it."""
        return subprocess.Popen(
            self.command(*arguments),
            env=self.variables,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


def build_site(folder: Path, home: Path) -> Site:
    """Make a site below `folder` from the environments that bootstrap.py built in `home`."""
    folder.mkdir()
    environment = folder / "environment"
    shutil.copytree((home / "training").resolve(), environment, symlinks=True)
    kept = {name: os.environ[name] for name in ("PATH", "LANG", "OPENBLAS_CORETYPE") if name in os.environ}
    variables = kept | {
        "HOME": str(folder / "home"),
        "SECURE_TRAIN_CONFIG": str(folder / "config"),
        "SECURE_TRAIN_ENV": str(environment),
        "SECURE_TRAIN_POLICY": str(folder / "policy.toml"),
    }
    site = Site(folder, home / "gate", environment, variables)
    (folder / "corpus.txt").write_text(TEXT)
    site.ok("keys", "new", "owner", "--trust")
    site.ok("policy", "new", "policy.toml")
    site.ok(
        "env", "sign", *(word for folder in ("cache/wheels", "wheel") for word in ("--wheels", home / folder))
    )
    site.ok(
        "data",
        "prepare",
        "corpus.txt",
        "--out",
        "data",
        "--train-tokenizer",
        "400",
        "--tokenizer-out",
        "tokenizer",
    )
    return site


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 120) -> None:
    """Until `what()` holds; fails if the process ends or time runs out."""
    deadline = time.monotonic() + seconds
    while not what():
        assert process.poll() is None, f"ended early: {process.communicate()}"
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def children(pid: int) -> dict[int, str]:
    """Living descendants of a process: pid -> command line."""
    parents: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "stat").read_text().rpartition(")")[2].split()
            if words[0] != "Z":
                parents[int(entry.name)] = (
                    int(words[1]),
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"),
                )
        except OSError:
            continue
    found: dict[int, str] = {}
    frontier = {pid}
    while frontier:
        below = {child: line for child, (parent, line) in parents.items() if parent in frontier}
        found |= below
        frontier = set(below)
    return found


def kill_session(process: subprocess.Popen[str]) -> None:
    """kill -9 of the command alone; what it started must end by itself."""
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
