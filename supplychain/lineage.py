"""Re-checking what a folder claims, offline and to the last input: a run with its whole graph, or any signed
artifact.

The result is a tree for people and programs: what was verified, who signed it, what could not be checked
because it is not here. Nothing in the folder is believed before a signature of the policy's roles vouches for
it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from supplychain import chain, launch, run, runbom, statement
from supplychain.artifact import (
    Manifest,
    claimed_kind,
    differences,
    oms,
    parse_json,
    read_manifest,
    tree,
)
from supplychain.artifact.check import foreign_differences
from supplychain.artifact.digest import Progress
from supplychain.chain import Link
from supplychain.environment.verify import verify_environment
from supplychain.errors import REFUSED_INTEGRITY, REFUSED_POLICY, UNDECIDED, USAGE, SecureTrainError
from supplychain.plan import FILE, Input, Plan
from supplychain.policy import Policy
from supplychain.trust import bundle, revocations
from supplychain.trust.roots import Signatory, Trust, subject_of
from supplychain.trust.verify import SignedArtifact, verify_artifact, verify_statement

T = TypeVar("T")
State = Literal["verified", "failed", "not checked"]
_WORST_FIRST = (REFUSED_INTEGRITY, REFUSED_POLICY, USAGE, UNDECIDED)
ANYONE = "signer"  # the role of those that the caller names instead of a policy


@dataclass
class Node:
    """One thing that was looked at."""

    title: str
    state: State = "verified"
    note: str = ""
    errors: list[SecureTrainError] = field(default_factory=list)
    children: list[Node] = field(default_factory=list)

    def add(self, node: Node) -> Node:
        self.children.append(node)
        return node

    def all_errors(self) -> list[SecureTrainError]:
        return self.errors + [error for child in self.children for error in child.all_errors()]

    @property
    def outcome(self) -> State:
        """`failed` if anything below failed: a whole is no better than its parts."""
        return "failed" if self.all_errors() else self.state

    @property
    def exit_code(self) -> int:
        """0, or the gravest error below this node."""
        codes = {error.exit_code for error in self.all_errors()}
        return next((code for code in _WORST_FIRST if code in codes), max(codes, default=0))

    def as_dict(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "state": self.outcome,
            "note": self.note,
            "errors": [error.as_dict() for error in self.errors],
            "children": [child.as_dict() for child in self.children],
        }


@dataclass(frozen=True)
class Checker:
    """What is trusted: a policy, or signatories that the caller names, any of whom may vouch for anything."""

    trust: Trust
    policy: Policy | None
    progress: Progress | None = None
    paranoid: bool = False

    @staticmethod
    def by_policy(policy: Policy, progress: Progress | None = None, *, paranoid: bool = False) -> Checker:
        return Checker(policy.trust, policy, progress, paranoid)

    @staticmethod
    def by_signatories(
        those: Sequence[Signatory], progress: Progress | None = None, *, paranoid: bool = False
    ) -> Checker:
        trust = dataclasses.replace(Trust.of(ANYONE, *those), revocations=revocations.of_this_host())
        return Checker(trust, None, progress, paranoid)

    def role(self, kind: str) -> str:
        return self.policy.rule(kind).signed_by if self.policy else ANYONE

    def signed(self, path: Path, kind: str | None = None) -> SignedArtifact:
        """The signature of an artifact of this kind (None: of the kind that its manifest states)."""
        kind = kind or _kind_of(path)
        return verify_artifact(path, self.trust, self.role(kind), kinds={kind})


def _kind_of(path: Path) -> str:
    """The kind that a manifest states, which decides whose signature is asked for; `verify_artifact` then
    compares it. A manifest that is not canonical is refused with what is wrong with it.
    """
    data = read_manifest(path)
    return claimed_kind(data) or Manifest.parse(data, where=str(path)).kind


def verify_folder(path: Path, checker: Checker) -> Node:
    """A run or a signed artifact, whichever the folder is. ST-A09 in the tree if it is neither."""
    if (path / FILE).is_file():
        return verify_run(path, checker)
    return _artifact(Node(str(path)), path, None, checker)


def verify_foreign(path: Path, signature: Path, checker: Checker) -> Node:
    """A folder that another tool signed by OMS: the signer, and every byte of every file. Such a signature
    says nothing about sizes, modes and kinds, and makes no artifact of the folder.
    """
    node = Node(str(path))

    def check() -> str:
        if checker.policy is not None:
            raise SecureTrainError(
                "ST-U03",
                "a policy speaks of artifacts, and another tool's signature makes none",
                where=str(signature),
                next_step="name the signer: --key, or --identity",
            )
        data = tree.read_file(signature.parent, signature.name, limit=bundle.MAX_BUNDLE, code="ST-S03")
        where = str(signature)
        verified = verify_statement(
            data, checker.trust, ANYONE, oms.PREDICATE_TYPE, subject=None, where=where
        )
        files = oms.foreign_files(verified.statement, where=where)
        inside = signature.relative_to(path).as_posix() if signature.is_relative_to(path) else None
        for error in foreign_differences(path, files, inside, progress=checker.progress):
            _fail(node, error)
        return f"{len(files)} files, signed by {verified.signer.name} ({subject_of(verified.signer)})"

    try:
        node.note = check()
    except FileNotFoundError:
        _fail(node, SecureTrainError("ST-U01", "there is no such signature", where=str(signature)))
    except SecureTrainError as error:
        _fail(node, error)
    return node


def verify_run(path: Path, checker: Checker) -> Node:
    """Decisions, inputs, every checkpoint of the chain, provenance and result."""
    root = Node(f"run {path.name}")
    if checker.policy is None:
        return _fail(
            root,
            SecureTrainError(
                "ST-P02",
                "a run is verified under a policy",
                where=str(path),
                next_step="name it with --policy",
            ),
        )
    policy = checker.policy
    plan = _try(root, lambda: Plan.read(path))
    if plan is None:
        return root
    root.title, root.note = f"run {plan.run_id}", _result_note(path)
    root.add(Node(f"policy {policy.id}", note=f"vouched for by {policy.vouched_by}"))
    node = root.add(Node("decision"))
    decisions = _try(node, lambda: run.verified_decisions(path, plan, policy))
    if decisions is None:
        return root
    node.note = (
        f"{len(decisions)} segment{'s' if len(decisions) > 1 else ''}, plan sha256:{plan.digest[:16]}..."
    )
    inputs = root.add(Node("inputs"))
    for item in plan.inputs:
        if item.kind != "checkpoint":  # the checkpoint that was resumed from stands in the chain
            inputs.add(_input(item, checker))
    inputs.add(_environment(plan, checker))
    links = _checkpoints(root, path, plan, decisions, checker)
    _provenance(root, path, plan, links, policy)
    return root


def _checkpoints(root: Node, path: Path, plan: Plan, decisions: list[str], checker: Checker) -> list[Link]:
    node = root.add(Node("checkpoints"))
    links = _try(node, lambda: chain.load(path, plan.run_id, checker.trust, run.ROLE, decisions)) or []
    if links:
        node.note = f"chain of {len(links)}, head sha256:{links[-1].head[:16]}..."
    for link in links:
        folder = path / chain.CHECKPOINTS / link.name
        _artifact(node.add(Node(link.name)), folder, "checkpoint", checker, link.manifest)
    known = {link.step for link in links}
    for step, folder in chain.checkpoint_folders(path):
        if step not in known:
            _fail(
                node.add(Node(folder.name)),
                SecureTrainError(
                    "ST-A09",
                    "the checkpoint is not in the signed chain",
                    where=str(folder),
                    next_step=f"secure-train run --resume {path}",
                ),
            )
    return links


def _provenance(root: Node, path: Path, plan: Plan, links: list[Link], policy: Policy) -> None:
    file = path / launch.PROVENANCE
    node = root.add(Node("provenance"))
    if not file.exists():
        if _result(path).get("phase") == "done":
            _fail(
                node,
                SecureTrainError(
                    "ST-R03",
                    "the provenance of a completed run is missing",
                    where=str(file),
                    next_step="restore the folder of statements",
                ),
            )
        else:
            node.state, node.note = "not checked", "there is none: the run is not complete"
        return

    def check() -> str:
        if not links:
            raise SecureTrainError(
                "ST-R03", "there is a provenance, and no checkpoint in the chain", where=str(file)
            )
        verified = verify_statement(
            file.read_bytes(),
            policy.trust,
            run.ROLE,
            statement.PROVENANCE,
            subject=links[-1].manifest,
            where=str(file),
        )
        _compare_provenance(verified.statement, plan, links[-1], file)
        _boms(root, path, verified.statement)
        return f"SLSA v1, {statement.BUILD_TYPE}, signed by {verified.signer.name}"

    node.note = _try(node, check) or ""


def _compare_provenance(document: dict[str, Any], plan: Plan, last: Link, file: Path) -> None:
    """ST-R06 unless the provenance tells of this plan and of this chain."""
    try:
        definition = document["predicate"]["buildDefinition"]
        head = definition["internalParameters"]["chain"]["head"]["sha256"]
        materials = {item["name"]: item["digest"]["sha256"] for item in definition["resolvedDependencies"]}
        build_type = definition["buildType"]
    except (KeyError, TypeError):
        raise SecureTrainError("ST-S03", "the provenance is malformed", where=str(file)) from None
    expected = {
        "plan": plan.digest,
        "policy": plan.document["policy"]["sha256"],
        "environment": plan.environment["manifest"],
        "decision": last.decision,
    }
    expected |= {f"{item.kind}:{item.name}": item.manifest for item in plan.inputs}
    wrong = [name for name, digest in expected.items() if materials.get(name) != digest]
    if head != last.head or wrong or build_type != statement.BUILD_TYPE:
        what = f"the material {wrong[0]!r}" if wrong else "the head of the chain or the build type"
        raise SecureTrainError(
            "ST-R06",
            f"the provenance does not describe this run: {what} differs",
            where=str(file),
            next_step="restore the run's folder",
        )


def _boms(root: Node, path: Path, provenance: dict[str, Any]) -> None:
    """The bills of materials that the provenance refers to, by digest."""
    node = root.add(Node("bills of materials"))
    listed = [
        (str(item.get("name")), str(item.get("digest", {}).get("sha256")))
        for item in provenance["predicate"].get("runDetails", {}).get("byproducts", [])
        if str(item.get("name")).startswith(f"{runbom.FOLDER}/")
    ]
    if not listed:
        node.state, node.note = "not checked", "the provenance refers to none"
    for name, digest in listed:
        found = runbom.digest_of(path / name)
        if found != digest:
            _fail(
                node,
                SecureTrainError(
                    "ST-R06",
                    "a bill of materials is not the one that the provenance refers to",
                    where=str(path / name),
                    expected=f"sha256:{digest}",
                    found=f"sha256:{found}" if found else "no such file",
                    next_step="restore the run's folder",
                ),
            )
        else:
            node.note += f"{', ' if node.note else ''}{name.removeprefix(runbom.FOLDER + '/')}"


def _input(item: Input, checker: Checker) -> Node:
    node = Node(f"{item.kind} {item.name}")
    path = Path(item.path)
    if not path.is_dir():
        node.state, node.note = (
            "not checked",
            f"not here any more ({path}); signed manifest sha256:{item.manifest[:16]}...",
        )
        return node
    return _artifact(node, path, item.kind, checker, item.manifest)


def _environment(plan: Plan, checker: Checker) -> Node:
    prefix = Path(plan.environment["prefix"])
    node = Node(f"environment {prefix.name}")
    if not prefix.is_dir():
        node.state, node.note = "not checked", f"not here any more ({prefix})"
        return node
    return _artifact(node, prefix, "environment", checker, plan.environment["manifest"])


def _artifact(
    node: Node, path: Path, kind: str | None, checker: Checker, manifest: str | None = None
) -> Node:
    """Signature, identity and every byte of one artifact, written into `node`."""
    signed = _try(node, lambda: checker.signed(path, kind))
    if signed is None:
        return node
    if manifest is not None and signed.manifest.digest != manifest:
        return _fail(
            node,
            SecureTrainError(
                "ST-A01",
                "the artifact is another one than the run used",
                where=str(path),
                expected=f"sha256:{manifest}",
                found=f"sha256:{signed.manifest.digest}",
                next_step="restore the artifact",
            ),
        )
    if signed.manifest.kind == "environment":
        facts = verify_environment(path, signed.manifest.digest, None, progress=checker.progress)
        found = list(facts.findings)
        size = f"{facts.distributions} packages, {facts.files} files"
    else:
        found = differences(path, signed.manifest, paranoid=checker.paranoid, progress=checker.progress)
        size = f"{len(signed.manifest.files)} files"
    for error in found:
        _fail(node, error)
    signers = ", ".join(f"{item.name} ({subject_of(item)})" for item in signed.signers)
    node.note = f"{size}, sha256:{signed.manifest.digest[:16]}..., signed by {signers}"
    return node


def _try(node: Node, action: Callable[[], T]) -> T | None:
    try:
        return action()
    except SecureTrainError as error:
        _fail(node, error)
        return None


def _fail(node: Node, error: SecureTrainError) -> Node:
    node.state = "failed"
    node.errors.append(error)
    return node


def _result(path: Path) -> dict[str, Any]:
    """result.json as it stands; unsigned, so only ever a reason to refuse more."""
    try:
        document = parse_json((path / launch.RESULT).read_bytes(), what=launch.RESULT)
    except (OSError, SecureTrainError):
        return {}
    return document if isinstance(document, dict) else {}


def _result_note(path: Path) -> str:
    """What result.json says; it is for people, nothing rests on it."""
    found = _result(path)
    return f"{found.get('status')} at step {found.get('step')}, loss {found.get('loss')}" if found else ""
