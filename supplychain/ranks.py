"""The processes of one segment: torchrun and its ranks, confined, and the signals that pass to them.

They run in a session of their own, so that Ctrl-C in the terminal reaches the launcher alone, which passes it
on once. Nothing outlives `close`. What ranks print lies in RUN/logs/segment-K; the first rank's stderr is
also shown.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from supplychain import chain, confine, isolation
from supplychain.isolation import Scratch
from supplychain.plan import FILE, Plan

Say = Callable[[str], None]
LOGS = "logs"
_TORCHRUN = "torch.distributed.run"
REPORT = "report"  # where ranks leave outcome.json and rank-K.json
METRICS = "metrics.jsonl"
GRACE = 10.0  # seconds that processes get to end after torchrun has
LOOK_EVERY = 1.0  # seconds between looks at the process tree
# What a program needs of the system: its libraries, compilers, devices. Programs look at /proc and /sys for
# cores and GPUs.
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/opt", "/etc", "/proc", "/sys", "/run")
_DEVICES = ("/dev",)


class Ranks:
    """A started segment. `with Ranks(...) as ranks: while ranks.running(): ...`"""

    def __init__(self, run: Path, plan: Plan, scratch: Scratch, say: Say) -> None:
        self.run, self.plan, self.say = run, plan, say
        self.signal: signal.Signals | None = None  # the first that this process got
        self.logs = run / LOGS / f"segment-{plan.segment}"
        self._scratch = scratch
        self._signals: list[int] = []
        self._known: set[int] = set()
        self._looked = 0.0
        self._tail = _Tail(self.logs, say)

    def __enter__(self) -> Ranks:
        for folder in (self.run / REPORT, self.logs):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        (self.run / chain.CHECKPOINTS).mkdir(exist_ok=True)
        (self.run / METRICS).touch()
        self._handlers = {
            number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)
        }
        with open(self.logs / "torchrun.log", "wb") as log:
            self.process = subprocess.Popen(
                [*self._fence(), "--", *self._torchrun()],
                env=isolation.environment(self._scratch),
                cwd=self._scratch.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                close_fds=True,
            )
        return self

    def _fence(self) -> list[str]:
        """The program that confines itself and then becomes torchrun: it reads verified inputs and the
        system, and writes results.
        """
        environment = Path(self.plan.environment["prefix"])
        editable = self.plan.environment["editable"]
        read = [
            *map(Path, _SYSTEM),
            environment,
            isolation.base_prefix(environment),
            self.run,
            *([Path(editable)] if editable else []),
        ]
        read += [Path(item.path) for item in self.plan.inputs]
        results = [self.run / name for name in (chain.CHECKPOINTS, REPORT, METRICS)]
        write = [*map(Path, _DEVICES), self._scratch.folder, self.logs, *results]
        options = [item for path in read for item in ("--read", str(path))] + [
            item for path in write for item in ("--write", str(path))
        ]
        program = [sys.executable, "-I", "-S", "-B", confine.__file__]
        return [*program, *options, "--level", self.plan.launch["isolation"], "--launcher", str(os.getpid())]

    def _torchrun(self) -> list[str]:
        prefix = Path(self.plan.environment["prefix"])
        trainer = isolation.command(
            prefix, self._scratch, "trainer", [str(self.run / FILE), "--plan-sha256", self.plan.digest]
        )
        options = [
            "--no-python",
            "--standalone",
            "--nproc-per-node",
            self.plan.launch["processes"],
            "--max-restarts",
            "0",
        ]
        options += ["--log-dir", str(self.logs), "--redirects", "3"]
        return isolation.command(prefix, self._scratch, _TORCHRUN, [*options, *trainer])

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def running(self) -> bool:
        """One look: show new output, pass on signals. False once torchrun has ended."""
        self._tail.show()
        if time.monotonic() - self._looked > LOOK_EVERY:
            self._looked = time.monotonic()
            self._known |= descendants(
                self.process.pid
            ).keys()  # remembered: if torchrun is killed, its children lose their parent
        if self._signals and self.signal is None:
            self._stop()
        elif len(self._signals) > 1:
            self._signals = self._signals[:1]
            self.say("killed at the second signal; the last finished checkpoint stands")
            self._kill()
        return self.process.poll() is None

    def _stop(self) -> None:
        """Ask the ranks, and them alone, to save and end: torchrun would give them 30 seconds."""
        self.signal = signal.Signals(self._signals[0])
        plan = f"-m trainer {self.run / FILE}"
        below = descendants(
            self.process.pid
        )  # torchrun itself is the parent of these; its command line holds theirs
        ranks = [pid for pid, line in below.items() if plan in line and _TORCHRUN not in line]
        if not ranks:
            self.say(f"{self.signal.name}: training had not begun; stopped")
            self._kill()
            return
        self.say(f"{self.signal.name}: the ranks finish their step, save and stop; once more kills them")
        for pid in ranks:
            _signal(pid, signal.SIGTERM)

    def _kill(self) -> None:
        for pid in {self.process.pid, *self._known, *descendants(self.process.pid)}:
            _signal(pid, signal.SIGKILL)

    def __exit__(self, *error: object) -> None:
        self._known |= descendants(self.process.pid).keys()
        if self.process.poll() is None:
            self._kill()
        self.process.wait()
        self._end_all()
        self._tail.show()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _end_all(self) -> None:
        """Wait a little for what torchrun left running, then kill it. Only processes that still carry our
        scratch folder are ours.
        """
        deadline = time.monotonic() + GRACE
        while (alive := [pid for pid in self._known if self._is_ours(pid)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in alive:
            _signal(pid, signal.SIGKILL)

    def _is_ours(self, pid: int) -> bool:
        """Alive, and started by this launch: process identifiers are used again."""
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
            return str(self._scratch.folder).encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False


class _Tail:
    """Shows what rank 0 writes to its stderr, line by line, as torchrun stores it in a file for each rank."""

    def __init__(self, logs: Path, say: Say) -> None:
        self._logs, self._say = logs, say
        self._position = 0
        self._path: Path | None = None

    def show(self) -> None:
        self._path = self._path or next(self._logs.glob("*/attempt_0/0/stderr.log"), None)
        if self._path is None:
            return
        with open(self._path, "rb") as file:
            file.seek(self._position)
            data = file.read()
        end = data.rfind(b"\n") + 1
        self._position += end
        for line in data[:end].decode(errors="replace").splitlines():
            self._say(line)


def last_words(logs: Path) -> str:
    """The end of what a rank wrote last to its stderr, else of torchrun's own log."""
    files = [
        path
        for path in [*logs.glob("*/attempt_0/*/stderr.log"), logs / "torchrun.log"]
        if path.is_file() and path.stat().st_size
    ]
    return "" if not files else files[0].read_text(errors="replace").strip()[-1500:]


def descendants(pid: int) -> dict[int, str]:
    """Living processes below `pid`, with their command lines, from /proc; nothing where there is none."""
    processes = list(_processes())
    found: dict[int, str] = {}
    parents = {pid}
    while parents:
        below = {child: line for child, parent, line in processes if parent in parents}
        found |= below
        parents = set(below)
    return found


def _processes() -> Iterator[tuple[int, int, str]]:
    """(pid, parent, command line) of every process that can be seen."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if state != "Z":
                yield int(entry.name), int(parent), line


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
