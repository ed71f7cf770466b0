"""A run's folder, from request to result: gate, signed decision, launch; and going on after an interruption.

- `plan.json`: the newest segment's plan; `policy.toml` and its signature: the policy as it was
- `result.json`: how the newest launch ended; `metrics.jsonl`: what the trainer measured
- `checkpoints/step-N/`: signed checkpoints; `logs/segment-K/`: the output of every rank
- `statements/`: decisions, plans of all segments, checkpoint links, provenance
"""

from __future__ import annotations

import datetime as dt
import hashlib
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import filelock

from supplychain import chain, gate, launch, policy, statement
from supplychain.artifact import tree, write_durably
from supplychain.artifact.digest import Progress
from supplychain.chain import Link
from supplychain.errors import SecureTrainError
from supplychain.gate import Decision, Request
from supplychain.launch import Result
from supplychain.plan import FILE, Plan
from supplychain.policy import Policy
from supplychain.ranks import Say
from supplychain.trust import bundle
from supplychain.trust.bundle import Bundle
from supplychain.trust.keys import VerifyingKey
from supplychain.trust.signers import Signer
from supplychain.trust.verify import verify_statement

POLICY_COPY = "policy.toml"
ROLE = "checkpoint"  # who signs decisions, checkpoints and provenance


def new_id(run: Path) -> str:
    """A run's name in statements: its folder's, and enough randomness to be the only one."""
    return f"{run.name}-{secrets.token_hex(4)}"


def start(
    request: Request,
    signer: Signer,
    policy_keys: list[VerifyingKey],
    *,
    version: str,
    say: Say,
    show: Callable[[Decision], None],
    progress: Progress | None = None,
    former: Plan | None = None,
) -> tuple[Decision, Result]:
    """Gate the request, write the decision, and, if it passed, train and sign. `show` is given the decision
    before anything starts.

    With `former`, the run goes on from the last link of its verified chain. Raises SecureTrainError for a
    folder that cannot be used; refusals are in the decision.
    """
    with _owned(request.run, fresh=former is None):
        resuming = _Resume(request.run, former) if former else None
        now = dt.datetime.now(dt.UTC)
        decision = gate.decide(request, policy_keys=policy_keys, resume=resuming, now=now, progress=progress)
        signed = signer.sign_payload(decision.payload(request, version))
        if decision.plan is None or decision.policy is None:
            write_durably(
                request.run / chain.STATEMENTS / f"refused-{now:%Y%m%dT%H%M%S%f}.sigstore.json", signed.data
            )
            show(decision)
            return decision, _refused(request, decision, signed)
        _write_decision(request.run, decision.plan, decision.policy, signed)
        show(decision)
        last = resuming.link if resuming else None
        for moved in launch.put_aside(request.run, last):
            say(f"moved an unsigned checkpoint aside: {moved}")
        return decision, launch.launch(
            request.run, decision.plan, signed, last, signer, version=version, say=say
        )


def read_former(run: Path) -> Plan:
    """The plan of the run that shall go on; believed only once the gate has found it in a signed decision."""
    plan = Plan.read(run)
    if launch.phase(run) == "done":
        raise SecureTrainError(
            "ST-R02", "the run is complete", where=str(run), next_step=f"secure-train verify {run}"
        )
    return plan


def request_again(run: Path, former: Plan) -> Request:
    """The former request, for the next segment."""
    try:
        asked, inputs = former.document["request"], former.document["launch"]
        return Request(
            run=run,
            run_id=former.run_id,
            policy=Path(asked["policy"]),
            environment=Path(asked["environment"]),
            lock=Path(asked["lock"]) if asked["lock"] else None,
            dataset=Path(asked["dataset"]),
            tokenizer=Path(asked["tokenizer"]) if asked["tokenizer"] else None,
            config=tuple(asked["config"]),
            processes=int(inputs["processes"]),
            device=inputs["device"],
            reads=asked["reads"],
            segment=former.segment + 1,
        )
    except (KeyError, TypeError, ValueError) as error:
        raise SecureTrainError(
            "ST-U02", f"the run's plan is malformed ({type(error).__name__}: {error})", where=str(run / FILE)
        ) from None


@dataclass(frozen=True)
class Segment:
    """One launch of a run: its plan, and the digest of the signed decision that allowed it."""

    plan: Plan
    decision: str


def verified_segments(run: Path, plan: Plan, trusted: Policy) -> list[Segment]:
    """The run's segments, first one first; each plan is in a signed decision, and the last is `plan`. ST-R06,
    ST-R03, ST-S.. if not.
    """
    segments = [_segment(run, number, trusted) for number in range(1, plan.segment + 1)]
    last = segments[-1].plan
    if last.digest != plan.digest:
        raise SecureTrainError(
            "ST-R06",
            "plan.json is not the plan that the gate decided on",
            where=str(run / FILE),
            expected=f"sha256:{last.digest}",
            found=f"sha256:{plan.digest}",
            next_step=f"restore it from {_plan_path(run, plan.segment)}",
        )
    for number, segment in enumerate(segments, 1):
        if (segment.plan.run_id, segment.plan.segment) != (plan.run_id, number):
            raise SecureTrainError(
                "ST-R03",
                "a plan of the run belongs to another run or segment",
                where=str(_plan_path(run, number)),
                expected=f"{plan.run_id}, segment {number}",
                found=f"{segment.plan.run_id}, segment {segment.plan.segment}",
            )
    return segments


def _segment(run: Path, number: int, trusted: Policy) -> Segment:
    path = chain.decision_path(run, number)
    data, plan = _statement(run, path), _statement(run, _plan_path(run, number))
    digest = hashlib.sha256(plan).hexdigest()
    verified = verify_statement(
        data, trusted.trust, ROLE, statement.DECISION, subject=digest, where=str(path)
    )
    result = verified.predicate.get("verificationResult")
    if result != "PASSED":
        what = "the run has a decision that refused it"
        raise SecureTrainError("ST-R06", what, where=str(path), expected="PASSED", found=str(result))
    return Segment(Plan.parse(plan, where=str(_plan_path(run, number))), verified.bundle.digest)


class _Resume:
    """Verifies a run's decisions and chain for the gate, and keeps the last link for the launcher."""

    def __init__(self, run: Path, former: Plan) -> None:
        self._run, self._former = run, former
        self.link: Link | None = None

    def __call__(self, trusted: Policy) -> tuple[Plan, Link | None]:
        segments = verified_segments(self._run, self._former, trusted)
        decisions = [segment.decision for segment in segments]
        links = chain.load(self._run, self._former.run_id, trusted.trust, ROLE, decisions)
        self.link = links[-1] if links else None
        return self._former, self.link


@contextmanager
def _owned(run: Path, *, fresh: bool) -> Iterator[None]:
    """The run's folder, made if need be and held by one process. ST-U04, ST-U05, ST-R05."""
    if fresh and (run / FILE).exists():
        raise SecureTrainError(
            "ST-U05",
            "there is a run in this folder already",
            where=str(run),
            next_step=f"choose another folder, or go on: secure-train run --resume {run}",
        )
    try:
        (run / chain.STATEMENTS).mkdir(parents=True, exist_ok=True)
        lock = filelock.FileLock(run / ".lock", blocking=False)
        with lock:
            yield
    except filelock.Timeout:
        raise SecureTrainError(
            "ST-R05", "another process works on this run", where=str(run), next_step="wait for it, or stop it"
        ) from None
    except OSError as error:
        raise SecureTrainError(
            "ST-U04",
            f"the run's folder cannot be written: {error.strerror}",
            where=error.filename or str(run),
            next_step="choose another --out",
        ) from None


def _write_decision(run: Path, plan: Plan, trusted: Policy, signed: Bundle) -> None:
    write_durably(_plan_path(run, plan.segment), plan.data)
    write_durably(chain.decision_path(run, plan.segment), signed.data)
    write_durably(run / FILE, plan.data)
    write_durably(run / POLICY_COPY, trusted.data)
    signature = policy.signature_path(trusted.path)
    if signature.exists():
        write_durably(policy.signature_path(run / POLICY_COPY), signature.read_bytes())


def _refused(request: Request, decision: Decision, signed: Bundle) -> Result:
    moment = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    result = Result(
        request.run_id,
        request.segment,
        "verify",
        "refused",
        decision.exit_code,
        decision=signed.digest,
        started=decision.time,
        finished=moment,
    )
    result.error = decision.errors[0].as_dict() if decision.errors else None
    if not (request.run / FILE).exists():  # a refused resume must not hide how far the run came
        result.write(request.run)
    return result


def _plan_path(run: Path, segment: int) -> Path:
    return run / chain.STATEMENTS / f"plan-{segment:04d}.json"


def _statement(run: Path, path: Path) -> bytes:
    """A file of the folder of statements; ST-R03 if it is missing or too large to be one."""
    try:
        return tree.read_file(run, str(path.relative_to(run)), limit=bundle.MAX_BUNDLE, code="ST-R03")
    except FileNotFoundError:
        what = "a decision or plan of the run is missing"
        raise SecureTrainError(
            "ST-R03", what, where=str(path), next_step="restore the folder of statements"
        ) from None


def with_overrides(request: Request, **changes: object) -> Request:
    """`request` with those changes that are not None."""
    return replace(request, **{key: value for key, value in changes.items() if value is not None})  # type: ignore[arg-type]  # checked by the dataclass's users
