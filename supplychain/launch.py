"""The launcher: starts the trainer, watches over it, and signs what it finishes. It holds the key; nothing it
starts can reach it.

One launch is one segment of a run. Checkpoints are hashed, signed and linked on a thread while training goes
on. A signal is passed to the ranks once, and they save and stop; a second one kills. Whatever happens,
`result.json` says how far it came.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import queue
import shutil
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from supplychain import chain, confine, statement
from supplychain.artifact import parse_json, tree, write_durably
from supplychain.chain import Link
from supplychain.errors import BUG, UNSIGNED, SecureTrainError
from supplychain.isolation import Scratch
from supplychain.plan import Plan
from supplychain.ranks import METRICS, REPORT, Ranks, Say, last_words
from supplychain.statement import Resource, Subject
from supplychain.trust.bundle import Bundle
from supplychain.trust.signers import Signer

RESULT = "result.json"
RESULT_SCHEMA = "urn:secure-train:result:v1"
PROVENANCE = f"{chain.STATEMENTS}/provenance.sigstore.json"
MAX_REPORT = 1 << 20  # bytes
POLL = 0.2  # seconds between looks at the ranks and the checkpoints


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
    bom: dict[str, str] = field(default_factory=dict)  # file in the run's folder: sha256
    bom_problem: str | None = None
    started: str = ""
    finished: str = ""
    milliseconds: dict[str, int] = field(default_factory=dict)

    def write(self, run: Path) -> None:
        document = {"schema": RESULT_SCHEMA, **self.__dict__}
        write_durably(run / RESULT, json.dumps(document, indent=1).encode() + b"\n")


def phase(run: Path) -> str | None:
    """How far the newest launch came, by its result.json: unsigned, so nothing rests on it."""
    try:
        found = parse_json(tree.read_named(run / RESULT, limit=MAX_REPORT, what=RESULT), what=RESULT)
        return str(found["phase"])
    except (OSError, SecureTrainError, KeyError, TypeError):
        return None


def launch(
    run: Path, plan: Plan, decision: Bundle, previous: Link | None, signer: Signer, *, version: str, say: Say
) -> Result:
    """Run one segment to its end and sign what it leaves. Never raises for what the trainer does; always
    writes result.json.
    """
    confine.hide_memory()
    started = time.time()
    result = Result(
        plan.run_id, plan.segment, "train", "failed", BUG, decision=decision.digest, started=_utc(started)
    )
    scratch = Scratch.create(run / ".private" / f"segment-{plan.segment}")
    notary = _Notary(run, plan, decision, previous, signer, say)
    try:
        result.write(run)
        with Ranks(run, plan, scratch, say) as ranks:
            while ranks.running():
                notary.look()
                time.sleep(POLL)
        result.milliseconds["train"] = _since(started)
        _read_outcome(run, ranks, result)
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
        if last:
            _describe(run, plan, last, notary, result, _utc(started))
        if result.status == "completed" and last:
            result.provenance = _write_provenance(
                run, plan, notary, last, _utc(started), version, result.bom
            ).digest
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


def _describe(run: Path, plan: Plan, last: Link, notary: _Notary, result: Result, started: str) -> None:
    """Leave the bills of materials. Without them the run is what it is, so a failure is recorded and told,
    and neither the result nor the provenance claims what is not there.
    """
    from supplychain import runbom  # only here, at the end: nothing before needs what it imports

    begun = time.time()
    written = runbom.leave(
        run,
        plan,
        last,
        notary._signer,
        started=started,
        finished=_utc(time.time()),
        status=result.status,
    )
    result.bom, result.bom_problem = dict(written.files), written.problem or None
    result.milliseconds["bom"] = _since(begun)
    if written.problem:
        notary._say(f"warning: the bills of materials were not written: {written.problem}")


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


def _read_outcome(run: Path, ranks: Ranks, result: Result) -> None:
    """Fill in what the ranks left: an outcome, or failures. torchrun turns every code into 1, so the truth is
    in their files.

    They are foreign bytes: read strictly, and never a reason for a traceback.
    """
    if ranks.signal:
        result.signal, result.exit_code, result.status = ranks.signal.name, 128 + ranks.signal, "stopped"
    report = run / REPORT
    try:
        if (report / "outcome.json").exists():
            _take_outcome(_read_report(report, "outcome.json"), ranks, result)
        elif not ranks.signal:
            failures = sorted(path.name for path in report.glob("rank-*.json"))
            error = (
                SecureTrainError.reported(_read_report(report, failures[0]))
                if failures
                else _unexplained(ranks)
            )
            result.error, result.exit_code = error.as_dict(), error.exit_code
    except SecureTrainError as error:
        result.error, result.status, result.exit_code = error.as_dict(), "failed", BUG


def _take_outcome(found: Any, ranks: Ranks, result: Result) -> None:
    try:
        result.step, result.loss, result.checkpoint = (
            int(found["step"]),
            found.get("loss"),
            found.get("checkpoint"),
        )
        if found["status"] == "completed":
            result.status, result.exit_code = "completed", 0
        elif not ranks.signal:  # the ranks were signalled by somebody else, such as a batch system
            name = str(found.get("signal") or "SIGTERM")
            result.status, result.signal, result.exit_code = "stopped", name, 128 + signal.Signals[name]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SecureTrainError(
            "ST-R07", f"the trainer left an outcome that makes no sense ({error})"
        ) from None


def _read_report(folder: Path, name: str) -> dict[str, Any]:
    """A document that a rank left: no link is followed, and it is small."""
    try:
        data = tree.read_file(folder, name, limit=MAX_REPORT, code="ST-R07")
    except FileNotFoundError:
        raise SecureTrainError(
            "ST-R07", "a report of the ranks disappeared", where=str(folder / name)
        ) from None
    document = parse_json(data, what=name, code="ST-R07")
    if not isinstance(document, dict):
        raise SecureTrainError("ST-R07", "a report of the ranks is no object", where=str(folder / name))
    return document


def _unexplained(ranks: Ranks) -> SecureTrainError:
    """The trainer was killed, or failed without being able to say why; its exit code is passed on."""
    code = ranks.process.returncode
    error = SecureTrainError(
        "ST-R07",
        "the trainer ended without saying why",
        where=str(ranks.logs),
        found=last_words(ranks.logs) or f"exit status {code}",
        next_step="read the logs of the ranks in that folder; dmesg tells whether memory ran out",
    )
    error.exit_code = 128 - code if code < 0 else code or BUG
    return error


def _write_provenance(
    run: Path, plan: Plan, notary: _Notary, last: Link, started: str, version: str, bom: dict[str, str]
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
    byproducts = [Resource(METRICS, _sha256(run / METRICS))]
    byproducts += [Resource(path.name, bundle.digest) for path, bundle in chain.decision_bundles(run)]
    byproducts += [Resource(name, digest) for name, digest in sorted(bom.items())]
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
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _since(moment: float) -> int:
    return round((time.time() - moment) * 1000)


def _utc(moment: float) -> str:
    return dt.datetime.fromtimestamp(moment, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


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
    _trim_metrics(run, last.step if last else 0)
    return moved


def _trim_metrics(run: Path, step: int) -> None:
    """Take measurements of steps that will be trained again out of metrics.jsonl, and a half line that a
    crash left.
    """
    path = run / METRICS
    if not path.is_file():
        return
    kept = []
    for line in path.read_bytes().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line + b"\n")
        except (ValueError, KeyError, TypeError):
            continue
    write_durably(path, b"".join(kept))
