"""The processes of one segment: torchrun and its ranks, confined, and the signals that pass to them.

They run in a session of their own, so that Ctrl-C in the terminal reaches the launcher alone, which passes it
on once. Nothing that they start outlives the segment: this process adopts what loses its parent. What ranks
print lies in RUN/logs/segment-K; the first rank's stderr is also shown. Those files, like all that ranks can
write, are foreign: links are not followed, sizes are bounded, and what does not print is escaped.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from supplychain import chain, confine, isolation
from supplychain.artifact import tree
from supplychain.artifact.digest import read_exactly
from supplychain.errors import SecureTrainError, printable
from supplychain.isolation import Scratch
from supplychain.plan import FILE, Plan

Say = Callable[[str], None]
LOGS = "logs"
_TORCHRUN = "torch.distributed.run"
REPORT = "report"  # where ranks leave outcome.json and rank-K.json
METRICS = "metrics.jsonl"
GRACE = 10.0  # seconds that processes get to end after torchrun has
SHOWN_AT_ONCE = 1 << 16  # bytes of a rank's output that are read in one look
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ranks:
    """A started segment. `with Ranks(...) as ranks: while ranks.running(): ...`"""

    def __init__(self, run: Path, plan: Plan, scratch: Scratch, say: Say) -> None:
        self.run, self.plan, self.say = run, plan, say
        self.signal: signal.Signals | None = None  # the first that this process got
        self.logs = run / LOGS / f"segment-{plan.segment}"
        self._scratch = scratch
        self._signals: list[int] = []
        self._others: set[int] = set()  # children that this process had before
        self._tail = _Tail(self.logs, say)

    def __enter__(self) -> Ranks:
        for folder in (self.run / REPORT, self.logs):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        (self.run / chain.CHECKPOINTS).mkdir(exist_ok=True)
        (self.run / METRICS).touch()
        confine.adopt_orphans()
        self._others = set(descendants(os.getpid()))
        self._handlers = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        with open(self.logs / "torchrun.log", "wb") as log:
            self.process = subprocess.Popen(
                [*self._fence(), *self._torchrun()],
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
        """Verified inputs and the run can be read, results written; the statements and the key are out of
        reach.
        """
        return isolation.fence(
            Path(self.plan.environment["prefix"]),
            self._scratch,
            level=self.plan.launch["isolation"],
            editable=self.plan.environment["editable"],
            read=[self.run, *(Path(item.path) for item in self.plan.inputs)],
            write=[self.logs, *(self.run / name for name in (chain.CHECKPOINTS, REPORT, METRICS))],
        )

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
        # torchrun is the parent of the ranks, and its command line holds theirs.
        ranks = [pid for pid, line in self._ours().items() if plan in line and _TORCHRUN not in line]
        if not ranks:
            self.say(f"{self.signal.name}: training had not begun; stopped")
            self._kill()
            return
        self.say(f"{self.signal.name}: the ranks finish their step, save and stop; once more kills them")
        for pid in ranks:
            _signal(pid, signal.SIGTERM)

    def _ours(self) -> dict[int, str]:
        """Every living process that this segment started, orphans included."""
        return {pid: line for pid, line in descendants(os.getpid()).items() if pid not in self._others}

    def _kill(self) -> None:
        """Until none is left: a process may start another while it is looked for."""
        while ours := self._ours():
            for pid in ours:
                _signal(pid, signal.SIGKILL)
            time.sleep(0.02)

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self._kill()
        self.process.wait()
        deadline = time.monotonic() + GRACE
        while self._ours() and time.monotonic() < deadline:
            time.sleep(0.05)
        self._kill()
        _reap()
        self._tail.show()
        self._tail.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


class _Tail:
    """Shows what rank 0 writes to its stderr, line by line, as torchrun stores it in a file for each rank."""

    def __init__(self, logs: Path, say: Say) -> None:
        self._logs, self._say = logs, say
        self._position = 0
        self._descriptor = -1

    def show(self) -> None:
        if self._descriptor < 0:
            self._descriptor = _open_log(self._logs, "*/attempt_0/0/stderr.log")
        if self._descriptor < 0:
            return
        while data := read_exactly(self._descriptor, self._position, SHOWN_AT_ONCE):
            end = data.rfind(b"\n") + 1 or (len(data) if len(data) == SHOWN_AT_ONCE else 0)
            self._position += end
            for line in data[:end].decode(errors="replace").splitlines():
                self._say(printable(line))
            if len(data) < SHOWN_AT_ONCE:
                return

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def last_words(logs: Path) -> str:
    """The end of what a rank wrote last to its stderr, else of torchrun's own log."""
    for pattern in ("*/attempt_0/*/stderr.log", "torchrun.log"):
        descriptor = _open_log(logs, pattern)
        if descriptor < 0:
            continue
        try:
            size = os.fstat(descriptor).st_size
            text = read_exactly(descriptor, max(0, size - 1500), 1500).decode(errors="replace").strip()
        finally:
            os.close(descriptor)
        if text:
            return text
    return ""


def _open_log(logs: Path, pattern: str) -> int:
    """The first file of this name, opened without following links; -1 if there is none that may be read."""
    for path in sorted(logs.glob(pattern)):
        with contextlib.suppress(OSError, SecureTrainError):
            return tree.open_file(logs, str(path.relative_to(logs)))
    return -1


def _reap() -> None:
    """Collect adopted processes that have ended; torchrun itself has been waited for."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


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
