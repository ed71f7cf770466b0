"""The gate: from a run request, which names things, to a decision and a plan, which holds only digests.

All rules are evaluated, never just up to the first that fails, and each gives a verdict: pass, fail, or not
checked, which is never a silent pass. The order is: policy, environment, artifacts, what is resumed, code,
configuration. Nothing is started here but one process: `python -m trainer config`, in the environment that
has just been verified.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from supplychain import confine, formats, isolation, policy, statement
from supplychain.artifact import VerifiedArtifact, differences, parse_json, tree
from supplychain.artifact.digest import Progress
from supplychain.chain import Link
from supplychain.environment.verify import EnvironmentFacts, verify_environment
from supplychain.errors import UNDECIDED, SecureTrainError, gravest
from supplychain.isolation import Scratch
from supplychain.plan import SCHEMA, Input, Plan
from supplychain.policy import Policy
from supplychain.statement import Resource, Subject
from supplychain.trust.keys import VerifyingKey
from supplychain.trust.verify import SignedArtifact, verify_artifact

T = TypeVar("T")
MAX_LOCK = 64 << 20  # bytes
CONFIG_TIMEOUT = 120  # seconds


@dataclass(frozen=True)
class Request:
    """What a person asked for. Paths are absolute. `config` holds arguments of `python -m trainer config`."""

    run: Path
    run_id: str
    policy: Path
    environment: Path
    dataset: Path
    tokenizer: Path | None
    config: tuple[str, ...]
    processes: int
    device: Literal["cpu", "cuda"]
    policy_pin: str | None = None
    lock: Path | None = None
    reads: Literal["always", "once", "off"] = "always"
    segment: int = 1

    def as_dict(self) -> dict[str, Any]:
        """For the plan, and for the decision's subject."""
        return {
            "policy": str(self.policy),
            "environment": str(self.environment),
            "lock": str(self.lock) if self.lock else None,
            "dataset": str(self.dataset),
            "tokenizer": str(self.tokenizer) if self.tokenizer else None,
            "config": list(self.config),
            "reads": self.reads,
        }


@dataclass(frozen=True)
class Verdict:
    """What one rule found about one subject. `evidence` is the digest of what the verdict rests on."""

    rule: str
    subject: str
    result: Literal["pass", "fail", "not checked"]
    note: str = ""
    evidence: str = ""
    error: SecureTrainError | None = None

    def as_dict(self) -> dict[str, str]:
        found = {
            "rule": self.rule,
            "subject": self.subject,
            "result": self.result,
            "note": self.note,
            "evidence": self.evidence,
        }
        if self.error:
            found["code"] = self.error.code
        return {key: value for key, value in found.items() if value}


@dataclass(frozen=True)
class Decision:
    """All verdicts, and the plan if every one of them is a pass."""

    verdicts: tuple[Verdict, ...]
    plan: Plan | None
    policy: Policy | None
    artifacts: tuple[SignedArtifact, ...]
    time: str

    @property
    def passed(self) -> bool:
        return self.plan is not None

    @property
    def errors(self) -> list[SecureTrainError]:
        return [verdict.error for verdict in self.verdicts if verdict.error]

    @property
    def exit_code(self) -> int:
        """0, or the gravest refusal: integrity before policy before usage before cannot-decide."""
        codes = {error.exit_code for error in self.errors}
        return 0 if self.passed else gravest(codes, UNDECIDED)

    def payload(self, request: Request, version: str) -> bytes:
        """The decision as a statement (VSA), for a refusal too."""
        subjects = [Subject("plan", self.plan.digest)] if self.plan else []
        subjects += [Subject(artifact.root.name, artifact.manifest.digest) for artifact in self.artifacts]
        if not subjects:  # nothing could be identified: the statement is then about the request itself
            subjects = [Subject("request", statement.digest_of(request.as_dict()))]
        policy = Resource(self.policy.id, self.policy.digest) if self.policy else Resource("none", "0" * 64)
        inputs = [
            Resource(f"{artifact.root.name}: {signer.name}", bundle.digest)
            for artifact in self.artifacts
            for signer, bundle in zip(artifact.signers, artifact.bundles, strict=True)
        ]
        return statement.decision(
            subjects=subjects,
            run=request.run_id,
            policy=policy,
            inputs=inputs,
            passed=self.passed,
            time=self.time,
            levels=["SECURE_TRAIN_INPUTS_SIGNED", "SECURE_TRAIN_ENVIRONMENT_VERIFIED"],
            verdicts=[verdict.as_dict() for verdict in self.verdicts],
            version=version,
        )


@dataclass
class _Gate:
    """Collects verdicts while the rules are evaluated in order."""

    request: Request
    progress: Progress | None
    verdicts: list[Verdict] = field(default_factory=list)
    artifacts: list[SignedArtifact] = field(default_factory=list)

    def check(
        self, rule: str, subject: str, action: Callable[[], T], note: Callable[[T], tuple[str, str]]
    ) -> T | None:
        """Evaluate one rule. `note` gives (text, evidence digest) of a pass."""
        try:
            value = action()
        except SecureTrainError as error:
            self.verdicts.append(Verdict(rule, subject, "fail", error.what, error=error))
            return None
        self.verdicts.append(Verdict(rule, subject, "pass", *note(value)))
        return value

    def check_all(
        self, rule: str, subject: str, errors: Sequence[SecureTrainError], passed: str, evidence: str = ""
    ) -> bool:
        """A rule that finds several things wrong at once."""
        if errors:
            self.verdicts += [Verdict(rule, subject, "fail", error.what, error=error) for error in errors]
        else:
            self.verdicts.append(Verdict(rule, subject, "pass", passed, evidence))
        return not errors

    def skip(self, rules: list[str], subject: str, reason: str) -> None:
        self.verdicts += [Verdict(rule, subject, "not checked", reason) for rule in rules]

    def signature(
        self, policy: Policy | None, rule: str, dependent: list[str], name: str, kind: str, path: Path
    ) -> SignedArtifact | None:
        """The first rule of every artifact. Rules that depend on it are not checked if it does not hold."""
        if policy is None:
            self.skip([rule, *dependent], name, "there is no trusted policy")
            return None

        def verify() -> SignedArtifact:
            return verify_artifact(path, policy.trust, policy.rule(kind).signed_by, kinds={kind})

        signed = self.check(rule, name, verify, _signed_by)
        if signed is None:
            self.skip(dependent, name, "the signature does not hold")
        return signed

    def artifact(self, policy: Policy | None, name: str, kind: str, path: Path) -> Input | None:
        """Signature, then names and sizes (every byte where the policy says so), then formats."""
        signature, files, content = f"{kind}.signature", f"{kind}.files", f"{kind}.formats"
        signed = self.signature(policy, signature, [files, content], name, kind, path)
        if policy is None or signed is None:
            return None
        self.artifacts.append(signed)
        rule, manifest = policy.rule(kind), signed.manifest
        full = rule.coverage == "full"
        note = f"{len(manifest.files)} files, {size(manifest.total_bytes)}"
        note += ", every byte" if full else "; contents are checked as they are read"
        found = differences(path, manifest, hash_files=full, progress=self.progress)
        if not self.check_all(files, name, found, note, manifest.digest):
            self.skip([content], name, "the files differ")
            return None
        problems = formats.problems(path, manifest, rule.formats)
        if not self.check_all(content, name, problems, ", ".join(rule.formats or ["any"])):
            return None
        return Input(name, kind, str(path), manifest.digest, tuple(key.identifier for key in signed.signers))


def decide(
    request: Request,
    *,
    policy_keys: list[VerifyingKey],
    resume: Callable[[Policy], tuple[Plan, Link | None]] | None = None,
    now: dt.datetime,
    progress: Progress | None = None,
) -> Decision:
    """Evaluate every rule. `resume` finds and verifies the run's chain under the policy: it gives the former
    plan and the last link.
    """
    gate = _Gate(request, progress)
    trusted = gate.check(
        "policy",
        request.policy.name,
        lambda: policy.load(request.policy, trusted=policy_keys, pinned=request.policy_pin, now=now),
        lambda found: (
            f"{found.id}, vouched for by {found.vouched_by}, valid until {found.document.expires}",
            found.digest,
        ),
    )
    environment, facts = _environment(gate, trusted)
    dataset = gate.artifact(trusted, request.dataset.name, "dataset", request.dataset)
    tokenizer = (
        gate.artifact(trusted, request.tokenizer.name, "tokenizer", request.tokenizer)
        if request.tokenizer
        else None
    )
    former, checkpoint = _resume(gate, trusted, resume)
    config = _config(gate, trusted, facts, dataset, former)
    _reads(gate, trusted)
    _isolation(gate, trusted)
    plan = None
    if all(verdict.result == "pass" for verdict in gate.verdicts):
        # Every rule passed, so everything that the rules give is there.
        assert trusted is not None
        assert environment is not None
        assert facts is not None
        assert dataset is not None
        assert config is not None
        plan = _plan(request, trusted, environment, facts, dataset, tokenizer, checkpoint, config)
    return Decision(
        tuple(gate.verdicts), plan, trusted, tuple(gate.artifacts), now.strftime("%Y-%m-%dT%H:%M:%SZ")
    )


def require_environment(
    prefix: Path, trusted: Policy, *, progress: Progress | None = None
) -> EnvironmentFacts:
    """The check that anything passes before it runs in the environment; raises the first finding."""
    signed = verify_artifact(
        prefix, trusted.trust, trusted.rule("environment").signed_by, kinds={"environment"}
    )
    return verify_environment(prefix, signed.manifest.digest, progress=progress).require()


def _reads(gate: _Gate, trusted: Policy | None) -> None:
    """How the loader may verify blocks."""
    asked = gate.request.reads
    if trusted is None:
        gate.skip(["run.reads"], asked, "there is no trusted policy")
        return
    allowed = trusted.document.run.reads
    problem = SecureTrainError(
        "ST-P07",
        "the policy does not allow this way of reading data",
        expected=" or ".join(allowed),
        found=asked,
        next_step="run with --reads always, or change [run] of the policy",
    )
    gate.check_all(
        "run.reads", asked, [] if asked in allowed else [problem], "how blocks are verified when read"
    )


def _isolation(gate: _Gate, trusted: Policy | None) -> None:
    """Whether the ranks can be confined as the policy wants."""
    if trusted is None:
        gate.skip(["run.isolation"], "landlock", "there is no trusted policy")
        return
    wanted, abi = trusted.document.run.isolation, confine.landlock_abi()
    problem = SecureTrainError(
        "ST-P08",
        "this kernel cannot confine the training processes, and the policy asks for it",
        expected="Linux 5.13 or newer with Landlock",
        found="no Landlock",
        next_step='use another kernel, or set isolation = "auto" in [run] of the policy',
    )
    note = f"Landlock ABI {abi}" if abi and wanted != "off" else "none: the policy allows it"
    gate.check_all("run.isolation", wanted, [problem] if wanted == "required" and not abi else [], note)


def _environment(
    gate: _Gate, trusted: Policy | None
) -> tuple[SignedArtifact | None, EnvironmentFacts | None]:
    """Signature of its manifest, then every byte of it against lock, wheels and manifest, from outside."""
    path, lock = gate.request.environment, gate.request.lock
    name, rules = path.name, ["environment.files", "environment.sealed"]
    signed = gate.signature(trusted, "environment.signature", rules, name, "environment", path)
    if trusted is None or signed is None:
        return None, None
    wanted = read_file(lock) if lock else None
    facts = verify_environment(path, signed.manifest.digest, wanted, progress=gate.progress)
    note = f"{facts.distributions} packages, {facts.files} files, {size(facts.bytes)}, every byte"
    if not gate.check_all("environment.files", name, facts.findings, note, signed.manifest.digest):
        gate.skip(["environment.sealed"], name, "the files differ")
        return None, None
    gate.artifacts.append(signed)
    problem = SecureTrainError(
        "ST-P06",
        "the environment is an editable one",
        where=str(path),
        expected="a sealed environment",
        found="editable",
        next_step="secure-train env build, without --editable",
    )
    weak = trusted.document.environment.require_sealed and not facts.sealed
    note = (
        "every file comes from a locked wheel"
        if facts.sealed
        else "editable: the code is not bound to a wheel"
    )
    gate.check_all("environment.sealed", name, [problem] if weak else [], note)
    return signed, facts


def _resume(
    gate: _Gate, trusted: Policy | None, resume: Callable[[Policy], tuple[Plan, Link | None]] | None
) -> tuple[Plan | None, Input | None]:
    """The chain of the run that is gone on with, then its last checkpoint like any other artifact."""
    if resume is None:
        return None, None
    if trusted is None:
        gate.skip(["run.chain"], gate.request.run_id, "there is no trusted policy")
        return None, None
    found = gate.check("run.chain", gate.request.run_id, lambda: resume(trusted), _goes_on)
    if found is None:
        return None, None
    former, link = found
    if link is None:
        return former, None
    folder = gate.request.run / "checkpoints" / link.name
    checkpoint = gate.artifact(trusted, link.name, "checkpoint", folder)
    if checkpoint and checkpoint.manifest != link.manifest:
        gate.check_all(
            "run.chain",
            link.name,
            [
                SecureTrainError(
                    "ST-R03",
                    "the checkpoint is not the one that the chain names",
                    where=str(folder),
                    expected=f"sha256:{link.manifest}",
                    found=f"sha256:{checkpoint.manifest}",
                    next_step="restore the checkpoint",
                )
            ],
            "",
        )
        return former, None
    return former, checkpoint


def _config(
    gate: _Gate,
    trusted: Policy | None,
    facts: EnvironmentFacts | None,
    dataset: Input | None,
    former: Plan | None,
) -> dict[str, Any] | None:
    """The resolved configuration, from the trainer itself. A resumed run must keep the one that it began
    with.
    """
    request = gate.request
    if trusted is None or facts is None or dataset is None:
        gate.skip(["config"], "trainer", "the environment or the dataset is not verified")
        return None

    def resolve() -> tuple[dict[str, Any], str]:
        vocabulary = _vocabulary(dataset)
        arguments = [*request.config, "--device", request.device, "--world-size", str(request.processes)]
        config, reasons = trainer_config(
            request, facts, trusted.document.run.isolation, [*arguments, *vocabulary]
        )
        if former and config != former.document["config"]:
            raise SecureTrainError(
                "ST-R06",
                "the run began with another configuration",
                where=str(request.run),
                expected="the configuration in plan.json",
                found=_difference(former.document["config"], config),
                next_step="start a new run, or resume with the former settings",
            )
        return config, reasons

    def note(found: tuple[dict[str, Any], str]) -> tuple[str, str]:
        config, reasons = found
        model, train = config.get("model", {}), config.get("train", {})
        summary = f"{model.get('flavor', '')} model, {train.get('steps', '?')} steps"
        return "; ".join([summary, *reasons.splitlines()]), statement.digest_of(config)

    resolved = gate.check("config", "trainer", resolve, note)
    return resolved[0] if resolved else None


def _vocabulary(dataset: Input) -> list[str]:
    """The option that makes the model's vocabulary the dataset's."""
    data = VerifiedArtifact.open(Path(dataset.path), dataset.manifest).read_bytes("dataset.json")
    document = parse_json(data, what="dataset.json")
    found = document.get("vocab_size") if isinstance(document, dict) else None
    if not isinstance(found, str) or not found.isdecimal():
        raise SecureTrainError(
            "ST-U02", "the dataset does not state its vocabulary", where=f"{dataset.path}/dataset.json"
        )
    return ["--vocab-size", found]


def trainer_config(
    request: Request, facts: EnvironmentFacts, level: str, arguments: Sequence[str]
) -> tuple[dict[str, Any], str]:
    """Run `python -m trainer config` in the verified environment, confined like the ranks: (configuration,
    what was decided and why). ST-U07 passes the trainer's own refusal on.
    """
    prefix = request.environment
    scratch = Scratch.create(request.run / ".private" / "config")
    editable = facts.code.get("editable")
    files = [Path(value) for value in request.config if value.startswith("/")]
    command = isolation.fence(prefix, scratch, level=level, editable=editable, read=files)
    command += isolation.command(prefix, scratch, "trainer", ["config", *arguments])
    try:
        done = subprocess.run(
            command,
            env=isolation.environment(scratch),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=CONFIG_TIMEOUT,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SecureTrainError(
            "ST-E05",
            f"the environment's interpreter cannot be started: {error}",
            where=command[0],
            next_step="secure-train env build",
        ) from None
    finally:
        scratch.remove()
    said = done.stderr.decode(errors="replace").strip()
    if done.returncode != 0:
        where = "python -m trainer config " + " ".join(arguments)
        raise SecureTrainError(
            "ST-U07", "the trainer refuses the configuration", where=where, found=said[-2000:]
        )
    config = parse_json(done.stdout, what="the resolved configuration")
    if not isinstance(config, dict):
        raise SecureTrainError(
            "ST-U02", "the resolved configuration is no object", where="python -m trainer config"
        )
    return config, said


def _plan(
    request: Request,
    trusted: Policy,
    environment: SignedArtifact,
    facts: EnvironmentFacts,
    dataset: Input,
    tokenizer: Input | None,
    checkpoint: Input | None,
    config: dict[str, Any],
) -> Plan:
    return Plan(
        {
            "schema": SCHEMA,
            "run": {"id": request.run_id, "directory": str(request.run), "segment": str(request.segment)},
            "request": request.as_dict(),
            "policy": {"id": trusted.id, "sha256": trusted.digest},
            "environment": {
                "prefix": str(request.environment),
                "manifest": environment.manifest.digest,
                "lock": facts.lock,
                "python": facts.python,
                "profile": facts.profile,
                "sealed": facts.sealed,
                "editable": facts.code.get("editable"),
                "signers": [key.identifier for key in environment.signers],
            },
            "code": _code(facts),
            "inputs": {
                "datasets": [dataset.as_dict()],
                "tokenizer": tokenizer.as_dict() if tokenizer else None,
                "checkpoint": checkpoint.as_dict() | {"resume": True} if checkpoint else None,
            },
            "reads": request.reads,
            "config": config,
            "launch": {
                "device": request.device,
                "processes": str(request.processes),
                "isolation": trusted.document.run.isolation,
            },
        }
    )


def _code(facts: EnvironmentFacts) -> dict[str, str]:
    """The identity of our own code: its wheel's digest, or, for an editable checkout, a digest of the files
    as they are now.
    """
    if facts.sealed:
        return {"kind": "wheel", "sha256": facts.code["sha256"]}
    checkout = Path(facts.code["editable"])
    files = sorted(
        path for package in ("trainer", "supplychain") for path in (checkout / package).rglob("*.py")
    )
    digests = {str(path.relative_to(checkout)): hashlib.sha256(read_file(path)).hexdigest() for path in files}
    return {"kind": "editable", "sha256": statement.digest_of(digests)}


def _signed_by(signed: SignedArtifact) -> tuple[str, str]:
    names = ", ".join(f"{key.name} ({key.identifier[:12]})" for key in signed.signers)
    return f"signed by {names} as {signed.role}", signed.manifest.digest


def _goes_on(found: tuple[Plan, Link | None]) -> tuple[str, str]:
    link = found[1]
    return (
        (f"goes on from {link.name}", link.head)
        if link
        else ("no checkpoint yet: starts from the beginning", "")
    )


def _difference(old: dict[str, Any], new: dict[str, Any]) -> str:
    """The first settings that differ, as key: old -> new."""
    left, right = (dict(_flat(item)) for item in (old, new))
    keys = [key for key in sorted(left.keys() | right.keys()) if left.get(key) != right.get(key)]
    return "; ".join(
        f"{key}: {json.dumps(left.get(key))} -> {json.dumps(right.get(key))}" for key in keys[:5]
    )


def _flat(value: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, item in value.items():
        found += _flat(item, f"{prefix}{key}.") if isinstance(item, dict) else [(prefix + key, item)]
    return found


def size(count: int) -> str:
    """Bytes for people, in decimal units."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def read_file(path: Path) -> bytes:
    """A lock that the user named; ST-U01 if it cannot be read."""
    return tree.read_named(path, limit=MAX_LOCK, what="the lock")
