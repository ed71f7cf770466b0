"""What is said about a folder: is a signed artifact what was signed? The answer is a tree for people and
programs.

Nothing in the folder is believed before a signature of a role vouches for it. Kept apart from `lineage`,
which follows a run to its last input: checking one artifact needs neither the gate nor what it imports.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from supplychain.artifact import Manifest, claimed_kind, differences, oms, read_manifest, tree
from supplychain.artifact.check import foreign_differences
from supplychain.artifact.digest import Progress
from supplychain.errors import SecureTrainError, gravest
from supplychain.trust import bundle, revocations
from supplychain.trust.roots import Signatory, Trust, subject_of
from supplychain.trust.verify import SignedArtifact, verify_artifact, verify_statement

if TYPE_CHECKING:
    from supplychain.policy import Policy

T = TypeVar("T")
State = Literal["verified", "failed", "not checked"]
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
        return gravest(codes, max(codes, default=0))

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
            fail(node, error)
        return f"{len(files)} files, signed by {verified.signer.name} ({subject_of(verified.signer)})"

    try:
        node.note = check()
    except FileNotFoundError:
        fail(node, SecureTrainError("ST-U01", "there is no such signature", where=str(signature)))
    except SecureTrainError as error:
        fail(node, error)
    return node


def verify_into(
    node: Node, path: Path, kind: str | None, checker: Checker, manifest: str | None = None
) -> Node:
    """Signature, identity and every byte of one artifact, written into `node`."""
    signed = attempt(node, lambda: checker.signed(path, kind))
    if signed is None:
        return node
    if manifest is not None and signed.manifest.digest != manifest:
        return fail(
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
        from supplychain.environment.verify import verify_environment  # late: for this kind alone

        facts = verify_environment(path, signed.manifest.digest, None, progress=checker.progress)
        found = list(facts.findings)
        size = f"{facts.distributions} packages, {facts.files} files"
    else:
        found = differences(path, signed.manifest, paranoid=checker.paranoid, progress=checker.progress)
        size = f"{len(signed.manifest.files)} files"
    for error in found:
        fail(node, error)
    signers = ", ".join(f"{item.name} ({subject_of(item)})" for item in signed.signers)
    node.note = (
        f"{signed.manifest.kind}, {size}, sha256:{signed.manifest.digest[:16]}..., signed by {signers}"
    )
    return node


def attempt(node: Node, action: Callable[[], T]) -> T | None:
    try:
        return action()
    except SecureTrainError as error:
        fail(node, error)
        return None


def fail(node: Node, error: SecureTrainError) -> Node:
    node.state = "failed"
    node.errors.append(error)
    return node
