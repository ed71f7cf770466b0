"""The launcher: starts the trainer, watches over it, and signs what it finishes. It holds the key; nothing it
starts can reach it.

One launch is one segment of a run. Checkpoints are hashed, signed and linked on a thread while training goes
on. A signal is passed to the ranks once, and they save and stop; a second one kills. Whatever happens,
`result.json` says how far it came.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import queue
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from supplychain import chain, isolation, statement
from supplychain.artifact import parse_json, write_durably
from supplychain.chain import Link
from supplychain.errors import BUG, CODES, UNSIGNED, SecureTrainError
from supplychain.isolation import Scratch
from supplychain.plan import FILE, Input, Plan
from supplychain.statement import Resource, Subject
from supplychain.trust.bundle import Bundle
from supplychain.trust.signers import Signer

RESULT = "result.json"
RESULT_SCHEMA = "urn:secure-train:result:v1"
PROVENANCE = f"{chain.STATEMENTS}/provenance.sigstore.json"
LOGS = "logs"
POLL = 0.2  # seconds between looks at the child and the checkpoints
KILL_AFTER = 10.0  # seconds that processes get to end after the last rank should have

Say = Callable[[str], None]


@dataclass
class Result:
    """How a launch ended. `exit_code` is that of the command; `phase` the last phase reached: verify, train,
    attest or done.
    """

    run: str
    segment: int
    phase: str
    status: str
    exit_code: int
    step: int | None = None
    loss: str | None = None
    checkpoint: str | None = None
    signal: str | None = None
    error: dict[str, Any] | None = None
    decision: str | None = None
    provenance: str | None = None
    chain_head: str | None = None
    started: str = ""
    finished: str = ""
    milliseconds: dict[str, int] = field(default_factory=dict)

    def write(self, run: Path) -> None:
        document = {"schema": RESULT_SCHEMA, **self.__dict__}
        write_durably(run / RESULT, json.dumps(document, indent=1).encode() + b"\n")


def launch(
    run: Path, plan: Plan, decision: Bundle, previous: Link | None, signer: Signer, *, version: str, say: Say
) -> Result:
    """Run one segment to its end and sign what it leaves. Never raises for what the trainer does; always
    writes result.json.
    """
    started = time.time()
    result = Result(
        plan.run_id, plan.segment, "train", "failed", BUG, decision=decision.digest, started=_utc(started)
    )
    scratch = Scratch.create(run / ".private" / f"segment-{plan.segment}")
    notary = _Notary(run, plan, decision, previous, signer, say)
    try:
        result.write(run)
        with _Training(run, plan, scratch, say) as training:
            while training.running():
                notary.look()
                time.sleep(POLL)
        result.milliseconds["train"] = _since(started)
        _read_outcome(run, training, result)
        result.phase = "attest"
        _attest(run, plan, notary, result, started, version)
    finally:
        notary.close()
        scratch.remove()
        result.finished = _utc(time.time())
        result.milliseconds["total"] = _since(started)
        result.write(run)
    return result


def _attest(run: Path, plan: Plan, notary: _Notary, result: Result, started: float, version: str) -> None:
    """Wait for the last signature; after a completed run, write its provenance. A failure here never hides
    what was trained.
    """
    begun = time.time()
    last = notary.finish()
    result.milliseconds["signing"] = round(notary.seconds * 1000)
    result.milliseconds["signing_after_training"] = _since(begun)
    result.chain_head = last.head if last else None
    try:
        if notary.error:
            raise notary.error
        if result.status == "completed" and last:
            result.provenance = _write_provenance(run, plan, notary, last, _utc(started), version).digest
    except (SecureTrainError, OSError) as error:
        if result.exit_code == 0:
            result.exit_code, result.status = UNSIGNED, "unsigned"
            result.error = SecureTrainError(
                "ST-R04",
                f"the run trained to its end, and signing failed: {error}",
                where=str(run),
                next_step=f"mend the cause, then: secure-train run --resume {run}",
            ).as_dict()
        return
    if result.exit_code == 0:
        result.phase = "done"


class _Training:
    """The process tree of one segment: torchrun and its ranks, in a session of their own, and the signals
    that pass to them.
    """

    def __init__(self, run: Path, plan: Plan, scratch: Scratch, say: Say) -> None:
        self.run, self.plan, self.say = run, plan, say
        self.signal: signal.Signals | None = None
        self.logs = run / LOGS / f"segment-{plan.segment}"
        self._scratch = scratch
        self._signals: list[int] = []
        self._pass_to: set[int] = set()
        self._tail = _Tail(self.logs, say)

    def __enter__(self) -> _Training:
        for leftover in ("outcome.json", "failures"):
            path = self.run / leftover
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        shutil.rmtree(self.logs, ignore_errors=True)
        self.logs.mkdir(parents=True)
        self._handlers = {
            number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)
        }
        with open(self.logs / "torchrun.log", "wb") as log:
            # A session of its own: Ctrl-C in the terminal reaches this process alone, which passes it on
            # once.
            self.process = subprocess.Popen(
                self._command(),
                env=isolation.environment(self._scratch),
                cwd=self.run,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                close_fds=True,
            )
        return self

    def _command(self) -> list[str]:
        prefix = Path(self.plan.environment["prefix"])
        trainer = isolation.command(
            prefix, self._scratch, "trainer", [str(self.run / FILE), "--plan-sha256", self.plan.digest]
        )
        return isolation.command(
            prefix,
            self._scratch,
            "torch.distributed.run",
            [
                "--no-python",
                "--standalone",
                "--nproc-per-node",
                self.plan.launch["processes"],
                "--max-restarts",
                "0",
                "--log-dir",
                str(self.logs),
                "--redirects",
                "3",
                *trainer,
            ],
        )

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def running(self) -> bool:
        """One look: pass on signals, show new output. False once everything has ended."""
        self._tail.show()
        if self._signals and self.signal is None:
            self.signal = signal.Signals(self._signals[0])
            self.say(f"{self.signal.name}: the ranks finish their step, save and stop; once more kills them")
            self._pass_to = set(_ranks(self.process.pid, self.run / FILE))
            if not self._pass_to:  # nothing has begun to train
                self._kill()
            for pid in self._pass_to:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        elif len(self._signals) > 1:
            self.say("killed at the second signal; the last finished checkpoint stands")
            self._kill()
        return self.process.poll() is None

    def _kill(self) -> None:
        self._signals = self._signals[:1]
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in _descendants(self.process.pid):  # torchrun puts each rank in a session of its own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def __exit__(self, *error: object) -> None:
        descendants = _descendants(self.process.pid)
        if self.process.poll() is None:
            self._kill()
        self.process.wait()
        _end_all(descendants)
        self._tail.show()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)


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


class _Notary:
    """Signs finished checkpoints in order, on one thread, so that no step waits for it."""

    def __init__(
        self, run: Path, plan: Plan, decision: Bundle, previous: Link | None, signer: Signer, say: Say
    ) -> None:
        self._run, self._plan, self._decision, self._signer, self._say = run, plan, decision, signer, say
        self.last = previous
        self.error: Exception | None = None
        self.seconds = 0.0
        self._seen = {step for step, _ in chain.checkpoint_folders(run)}
        self._queue: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="notary", daemon=True)
        self._thread.start()

    def look(self) -> None:
        """Queue checkpoints that appeared under their final name since the last look."""
        for step, _ in chain.checkpoint_folders(self._run):
            if step not in self._seen:
                self._seen.add(step)
                self._queue.put(step)

    def finish(self) -> Link | None:
        self.look()
        self.close()
        return self.last

    def close(self) -> None:
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _work(self) -> None:
        while (step := self._queue.get()) is not None:
            if self.error:
                continue  # the chain has no gaps: after a failure nothing later is signed
            begun = time.time()
            try:
                self.last = chain.append(
                    self._run, self._plan.run_id, step, self._decision.digest, self.last, self._signer
                )
            except Exception as error:  # reported by the launcher, whatever it is
                self.error = error
                self._say(f"warning: {chain.step_name(step)} could not be signed: {error}")
                continue
            self.seconds += time.time() - begun
            self._say(
                f"signed {self.last.name}: sha256:{self.last.manifest[:16]}... by {self._signer.public.name}"
            )


def _read_outcome(run: Path, training: _Training, result: Result) -> None:
    """Fill in what the ranks left: an outcome, or failures. torchrun turns every code into 1, so the truth is
    in their files.
    """
    outcome = run / "outcome.json"
    if training.signal:
        result.signal, result.exit_code, result.status = (
            training.signal.name,
            128 + training.signal,
            "stopped",
        )
    if outcome.is_file():
        found = json.loads(outcome.read_bytes())
        result.step, result.loss, result.checkpoint = (
            int(found["step"]),
            found.get("loss"),
            found.get("checkpoint"),
        )
        if found["status"] == "completed":
            result.status, result.exit_code = "completed", 0
        elif not training.signal:  # the ranks were signalled by somebody else, such as a batch system
            name = str(found.get("signal") or "SIGTERM")
            result.status, result.signal, result.exit_code = "stopped", name, 128 + signal.Signals[name]
        return
    if training.signal:
        return
    failures = sorted((run / "failures").glob("rank-*.json"))
    if failures:
        result.error = parse_json(failures[0].read_bytes(), what=f"the failure report {failures[0]}")
        result.exit_code = int(result.error["exit_code"])
    else:
        code = training.process.returncode
        result.exit_code = 128 - code if code < 0 else code or BUG
        result.error = {
            "code": "ST-R07",
            "title": CODES["ST-R07"].title,
            "what": "the trainer ended without saying why",
            "where": str(training.logs),
            "expected": None,
            "found": _last_words(training.logs) or f"exit status {code}",
            "next_step": "read the logs of the ranks in that folder",
            "exit_code": result.exit_code,
        }


def _last_words(logs: Path) -> str:
    """The end of whatever a rank wrote last to its stderr, else of torchrun's own log."""
    files = [
        path
        for path in [*logs.glob("*/attempt_0/*/stderr.log"), logs / "torchrun.log"]
        if path.is_file() and path.stat().st_size
    ]
    return "" if not files else files[0].read_text(errors="replace").strip()[-1500:]


def _write_provenance(
    run: Path, plan: Plan, notary: _Notary, last: Link, started: str, version: str
) -> Bundle:
    """SLSA provenance of the run's last checkpoint: what it was made from, by whom, with which result."""
    document = plan.document
    materials = [
        Resource(
            f"{item.kind}:{item.name}", item.manifest, annotations=(("signers", ",".join(item.signers)),)
        )
        for item in plan.inputs
    ]
    materials += [
        Resource("plan", plan.digest),
        Resource("policy", document["policy"]["sha256"], annotations=(("id", document["policy"]["id"]),)),
        Resource("environment", plan.environment["manifest"]),
        Resource(f"code:{document['code']['kind']}", document["code"]["sha256"]),
        Resource("decision", last.decision),
    ]
    if plan.environment["lock"]:
        materials.append(Resource("lock", plan.environment["lock"]))
    byproducts = [Resource("metrics.jsonl", _sha256(run / "metrics.jsonl"))]
    byproducts += [Resource(path.name, bundle.digest) for path, bundle in chain.decision_bundles(run)]
    payload = statement.provenance(
        subject=Subject(f"{plan.run_id}/{last.name}", last.manifest),
        external={"request": document["request"], "launch": document["launch"]},
        internal={
            "config": document["config"],
            "chain": {"index": str(last.index), "head": {"sha256": last.head}},
            "segment": str(plan.segment),
        },
        materials=materials,
        byproducts=byproducts,
        invocation=f"{plan.run_id}/segment-{plan.segment}",
        started=started,
        finished=_utc(time.time()),
        version=version,
    )
    signed = notary._signer.sign_payload(payload)
    write_durably(run / PROVENANCE, signed.data)
    return signed


def _sha256(path: Path) -> str:
    import hashlib

    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _since(moment: float) -> int:
    return round((time.time() - moment) * 1000)


def _utc(moment: float) -> str:
    return dt.datetime.fromtimestamp(moment, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _processes() -> Iterator[tuple[int, int, str]]:
    """(pid, parent, command line) of every process, from /proc; nothing where there is none."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            yield (
                int(entry.name),
                parent,
                (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace"),
            )


def _descendants(pid: int) -> set[int]:
    """All living processes below `pid`."""
    processes = list(_processes())
    found = {pid}
    while more := {child for child, parent, _ in processes if parent in found} - found:
        found |= more
    return found - {pid}


def _ranks(pid: int, plan: Path) -> list[int]:
    """The ranks among the descendants of torchrun: those that were given the plan."""
    below = _descendants(pid)
    return [child for child, _, command in _processes() if child in below and f"-m trainer {plan}" in command]


def _end_all(pids: set[int]) -> None:
    """Nothing that a launch started outlives it: wait a little for the rest, then kill it."""
    deadline = time.time() + KILL_AFTER
    alive = pids
    while alive and time.time() < deadline:
        alive = {pid for pid in alive if _is_alive(pid)}
        time.sleep(0.05)
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def put_aside(run: Path, last: Link | None) -> list[Path]:
    """Move checkpoints that came after the last signed one to RUN/unsigned: training will write those steps
    again. Nothing is deleted.
    """
    moved = []
    for step, path in chain.checkpoint_folders(run):
        if last is None or step > last.step:
            target = run / "unsigned" / f"{path.name}-{int(time.time())}"
            target.parent.mkdir(exist_ok=True)
            path.rename(target)
            moved.append(target)
    for partial in (run / chain.CHECKPOINTS).glob(".*.partial"):
        shutil.rmtree(partial)
    return moved


def inputs_present(plan: Plan) -> list[tuple[Input, bool]]:
    """Which inputs of a plan still lie where they were."""
    return [(item, Path(item.path).is_dir()) for item in plan.inputs]
