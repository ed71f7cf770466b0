"""The only module that says *valid*.

What it returns, `VerifiedStatement` and `SignedArtifact`, can be made by nobody else, so a function that
needs trust takes that type. No network, no compatibility fallbacks. The obligations, in order; tests are
named after the numbers:

    V1  the bundle is small, strict JSON without duplicate or unknown keys, of one exact media type, with
        exactly one signature
    V2  the payload type is in-toto's
    V3  the key that the bundle names is trusted, and its signature over the pre-authentication encoding is
        right
    V4  that key fills the required role; as many different keys as the role's threshold did
    V5  the statement is of in-toto v1, of the expected predicate type
    V6  its subject is the thing at hand (for artifacts: its list of files is exactly the manifest's)
    V7  the manifest is canonical and of the expected kind; it is parsed only when V1 to V6 hold for its bytes
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any

from supplychain.artifact import MANIFEST, SIGNATURES, Manifest, oms, parse_json, read_manifest, tree
from supplychain.artifact.check import BUNDLE_SUFFIX
from supplychain.artifact.oms import STATEMENT_TYPE
from supplychain.errors import SecureTrainError
from supplychain.trust import bundle
from supplychain.trust.bundle import Bundle
from supplychain.trust.keys import VerifyingKey
from supplychain.trust.roots import Trust

_PROOF = object()  # only this module can show it
MAX_SIGNATURES = 64


@dataclass(frozen=True)
class VerifiedStatement:
    """An in-toto statement whose signature, signer's role, type and subject were checked."""

    statement: dict[str, Any]
    signer: VerifyingKey
    bundle: Bundle
    proof: InitVar[object]

    def __post_init__(self, proof: object) -> None:
        if proof is not _PROOF:
            raise TypeError("only supplychain.trust.verify makes verified statements")

    @property
    def predicate(self) -> dict[str, Any]:
        predicate: dict[str, Any] = self.statement["predicate"]
        return predicate


@dataclass(frozen=True)
class SignedArtifact:
    """An artifact whose manifest is signed by enough trusted keys. Its files are not yet compared: that
    happens as they are read.
    """

    root: Path
    manifest: Manifest
    signers: tuple[VerifyingKey, ...]
    role: str
    bundles: tuple[Bundle, ...]
    proof: InitVar[object]

    def __post_init__(self, proof: object) -> None:
        if proof is not _PROOF:
            raise TypeError("only supplychain.trust.verify makes signed artifacts")


def verify_statement(
    data: bytes, trust: Trust, role: str, predicate_type: str, *, subject: str | None, where: str
) -> VerifiedStatement:
    """Check one bundle with a statement (V1 to V6). `subject` is the sha256 that it must be about; None: the
    caller compares it.
    """
    parsed = bundle.parse(data, where=where)  # V1, V2
    signer = _signer(parsed, trust, role, where)  # V3, V4
    statement = _statement(parsed, predicate_type, where)  # V5
    if subject is not None and subject not in _subjects(statement, where):  # V6
        raise SecureTrainError(
            "ST-S04",
            "the signed statement is about something else",
            where=where,
            expected=f"sha256:{subject}",
            found=", ".join(f"sha256:{item}" for item in _subjects(statement, where))[:300],
            next_step="restore the statement that belongs here",
        )
    return VerifiedStatement(statement, signer, parsed, _PROOF)


def verify_artifact(
    root: Path, trust: Trust, role: str, *, kinds: Collection[str] | None = None
) -> SignedArtifact:
    """Check the signatures of the artifact at `root` (V1 to V7). Every bundle must be well-formed; those of
    unknown keys do not count.
    """
    data = read_manifest(root)
    digest = hashlib.sha256(data).hexdigest()
    accepted: dict[str, _Accepted] = {}
    problems: list[SecureTrainError] = []
    for where, content in _bundles(root):
        parsed = bundle.parse(content, where=where)  # V1, V2
        try:
            signer = _signer(parsed, trust, role, where)  # V3, V4
        except SecureTrainError as error:
            if error.code != "ST-S02":  # a wrong signature of a trusted key is never passed over
                raise
            problems.append(error)
            continue
        files = oms.signed_files(_statement(parsed, oms.PREDICATE_TYPE, where), where=where)  # V5
        oms.check_manifest_digest(files, digest, where=where)  # V6
        accepted[signer.identifier] = _Accepted(signer, parsed, files, where)
    needed = trust.roles[role].threshold
    if len(accepted) < needed:  # V4
        if problems and needed == 1:
            raise problems[0]
        raise SecureTrainError(
            "ST-S02",
            f"too few trusted signers for the role {role!r}",
            where=str(root),
            expected=trust.describe(role),
            found=", ".join(item.signer.name for item in accepted.values()) or "none of them",
            next_step="have it signed by more of them",
        )
    manifest = Manifest.parse(data, where=str(root / MANIFEST))  # V7: nobody else's manifest is parsed
    for item in accepted.values():
        oms.check_files(item.files, manifest, where=item.where)  # V6
    if kinds is not None and manifest.kind not in kinds:
        raise SecureTrainError(
            "ST-P04",
            "the artifact is of another kind",
            where=str(root),
            expected=" or ".join(sorted(kinds)),
            found=manifest.kind,
            next_step="name an artifact of the kind that is needed here",
        )
    signers = tuple(item.signer for item in accepted.values())
    return SignedArtifact(
        root, manifest, signers, role, tuple(item.bundle for item in accepted.values()), _PROOF
    )


@dataclass(frozen=True)
class _Accepted:
    signer: VerifyingKey
    bundle: Bundle
    files: dict[str, str]
    where: str


def _bundles(root: Path) -> Iterator[tuple[str, bytes]]:
    """Where each bundle lies, and its bytes. What else the folder holds is a difference to the manifest."""
    folder = root / SIGNATURES
    names = [name for name in tree.names(root, SIGNATURES) if name.endswith(BUNDLE_SUFFIX)]
    if not names:
        raise SecureTrainError(
            "ST-A09", "the artifact has no signature", where=str(root), next_step=f"secure-train sign {root}"
        )
    if len(names) > MAX_SIGNATURES:
        raise SecureTrainError(
            "ST-S03",
            "the artifact has too many signatures",
            where=str(folder),
            expected=f"at most {MAX_SIGNATURES}",
            found=str(len(names)),
            next_step="remove those that nobody needs",
        )
    for name in names:
        yield str(folder / name), _read_bundle(root, f"{SIGNATURES}/{name}")


def _read_bundle(root: Path, path: str) -> bytes:
    try:
        return tree.read_file(root, path, limit=bundle.MAX_BUNDLE, code="ST-S03")
    except FileNotFoundError:
        raise SecureTrainError(
            "ST-S05", "a signature vanished while it was read", where=str(root / path)
        ) from None
    except SecureTrainError as error:
        if error.code != "ST-U06":
            raise
        raise SecureTrainError(
            "ST-S03", "a signature is a link, or no regular file", where=error.where, next_step="remove it"
        ) from None


def _signer(parsed: Bundle, trust: Trust, role: str, where: str) -> VerifyingKey:
    if role not in trust.roles:
        raise SecureTrainError(
            "ST-P04",
            f"the policy gives nobody the role {role!r}",
            where=where,
            next_step=f"add [roles.{role}] to the policy",
        )
    key = trust.keys.get(parsed.key_hint)
    if key is None or parsed.key_hint not in trust.roles[role].keys:
        found = (
            f"{key.name} ({parsed.key_hint[:12]})"
            if key
            else f"a key that the policy does not know (sha256:{parsed.key_hint[:12]}...)"
        )
        raise SecureTrainError(
            "ST-S02",
            f"the signer may not vouch as {role!r}",
            where=where,
            expected=trust.describe(role),
            found=found,
            next_step=f"have it signed by a key of the role, or add the key to [roles.{role}] of the policy",
        )
    if not key.accepts(bundle.pae(parsed.payload), parsed.signature):
        raise SecureTrainError(
            "ST-S01",
            "the signature is not valid",
            where=where,
            expected=f"a signature by {key.name} over these bytes",
            found="one that does not match",
            next_step="restore the artifact and its signature from where they were published",
        )
    return key


def _statement(parsed: Bundle, predicate_type: str, where: str) -> dict[str, Any]:
    statement = parse_json(parsed.payload, what=f"the statement in {where}", code="ST-S03")
    if not isinstance(statement, dict) or statement.get("_type") != STATEMENT_TYPE:
        raise SecureTrainError(
            "ST-S03", "the signed payload is no in-toto statement", where=where, expected=STATEMENT_TYPE
        )
    if statement.get("predicateType") != predicate_type:
        raise SecureTrainError(
            "ST-S04",
            "the statement is of another type",
            where=where,
            expected=predicate_type,
            found=str(statement.get("predicateType"))[:200],
        )
    if not isinstance(statement.get("predicate"), dict):
        raise SecureTrainError("ST-S03", "the statement has no predicate", where=where)
    return statement


def _subjects(statement: dict[str, Any], where: str) -> list[str]:
    try:
        return [subject["digest"]["sha256"] for subject in statement["subject"]]
    except (KeyError, TypeError):
        raise SecureTrainError(
            "ST-S03", "the statement's subjects are malformed", where=where, expected="sha256 digests"
        ) from None
