"""The only module that says *valid*.

What it returns, `VerifiedStatement` and `SignedArtifact`, can be made by nobody else, so a function that
needs trust takes that type. No network, no compatibility fallbacks. The obligations, in order; tests are
named after the numbers:

    V1  the bundle is small, strict JSON without duplicate or unknown keys, of one exact media type, with
        exactly one signature
    V2  the payload type is in-toto's
    V3  whom the bundle names is trusted: a key by its digest, a certificate's holder by a chain to his
        authority, an identity by Sigstore's own obligations; and the signature over the pre-authentication
        encoding is right
    V4  that signatory fills the required role; as many different ones as the role's threshold did
    V5  the statement is of in-toto v1, of the expected predicate type
    V6  its subject is the thing at hand (for artifacts: its list of files is exactly the manifest's)
    V7  the manifest is canonical and of the expected kind; it is parsed only when V1 to V6 hold for its bytes
    V8  the signature was made within the signatory's time: at the moment that a trusted timestamp or log
        proves, or else the present one
    V9  nothing about it is revoked: the manifest, the subject, the bundle or the signatory

V8 and V9 are asked together with V4, before the payload is parsed; V9 for the subject as soon as it is known.
"""

from __future__ import annotations

import datetime as dt
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
from supplychain.trust.roots import Holder, Identity, Revocation, Role, Signatory, Trust, subject_of

_PROOF = object()  # only this module can show it
MAX_SIGNATURES = 64


@dataclass(frozen=True)
class VerifiedStatement:
    """An in-toto statement whose signature, signer's role, type and subject were checked."""

    statement: dict[str, Any]
    signer: Signatory
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
    """An artifact whose manifest is signed by enough trusted signatories. Its files are not yet compared:
    that happens as they are read.
    """

    root: Path
    manifest: Manifest
    signers: tuple[Signatory, ...]
    role: str
    bundles: tuple[Bundle, ...]
    proof: InitVar[object]

    def __post_init__(self, proof: object) -> None:
        if proof is not _PROOF:
            raise TypeError("only supplychain.trust.verify makes signed artifacts")


def verify_statement(
    data: bytes, trust: Trust, role: str, predicate_type: str, *, subject: str | None, where: str
) -> VerifiedStatement:
    """Check one bundle with a statement (V1 to V6, V8, V9). `subject` is the sha256 that it must be about;
    None: the caller compares it.
    """
    parsed = bundle.parse(data, where=where)  # V1, V2
    made = _made(parsed, trust, role, where)  # V3, V4, V8, V9
    statement = _statement(parsed, predicate_type, where)  # V5
    _refuse_revoked_digests(trust, [parsed.digest, *_subjects(statement, where)], where)  # V9
    if subject is not None and subject not in _subjects(statement, where):  # V6
        raise SecureTrainError(
            "ST-S04",
            "the signed statement is about something else",
            where=where,
            expected=f"sha256:{subject}",
            found=", ".join(f"sha256:{item}" for item in _subjects(statement, where))[:300],
            next_step="restore the statement that belongs here",
        )
    return VerifiedStatement(statement, made.signer, parsed, _PROOF)


def verify_artifact(
    root: Path, trust: Trust, role: str, *, kinds: Collection[str] | None = None
) -> SignedArtifact:
    """Check the signatures of the artifact at `root` (V1 to V9). Every bundle must be well-formed; those of
    unknown signatories do not count.
    """
    data = read_manifest(root)
    digest = hashlib.sha256(data).hexdigest()
    _refuse_revoked_digests(trust, [digest], str(root))  # V9
    accepted: dict[str, _Accepted] = {}
    problems: list[SecureTrainError] = []
    for where, content in _bundles(root):
        parsed = bundle.parse(content, where=where)  # V1, V2
        try:
            made = _made(parsed, trust, role, where)  # V3, V4, V8, V9
        except SecureTrainError as error:
            if error.code != "ST-S02":  # a wrong signature of a trusted key is never passed over
                raise
            problems.append(error)
            continue
        _refuse_revoked_digests(trust, [parsed.digest], where)  # V9
        files = oms.canonical_files(parsed.payload)  # V5: exactly a statement of ours, or else
        if files is None:
            files = oms.signed_files(_statement(parsed, oms.PREDICATE_TYPE, where), where=where)
        oms.check_manifest_digest(files, digest, where=where)  # V6
        accepted[made.signer.identifier] = _Accepted(made, parsed, files, where)
    needed = _role(trust, role, str(root)).threshold
    # One private key counts once, as a key and as the holder of a certificate.
    if min(len(accepted), len({item.made.key for item in accepted.values()})) < needed:  # V4
        if problems and needed == 1:
            raise problems[0]
        raise SecureTrainError(
            "ST-S02",
            f"too few trusted signers for the role {role!r}",
            where=str(root),
            expected=trust.describe(role),
            found=", ".join(item.made.signer.name for item in accepted.values()) or "none of them",
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
    signers = tuple(item.made.signer for item in accepted.values())
    return SignedArtifact(
        root, manifest, signers, role, tuple(item.bundle for item in accepted.values()), _PROOF
    )


@dataclass(frozen=True)
class _Made:
    """By whom and with which key (its digest) a signature was made, and when, if that is proven."""

    signer: Signatory
    key: str
    time: dt.datetime | None


@dataclass(frozen=True)
class _Accepted:
    made: _Made
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


def _made(parsed: Bundle, trust: Trust, role: str, where: str) -> _Made:
    """V3, V4, V8 and V9 for one bundle."""
    rule = _role(trust, role, where)
    by = {"key": _by_key, "certificate": _by_certificate, "keyless": _by_identity}[parsed.method]
    made = by(parsed, trust, rule, where)
    window = trust.windows.get(made.signer.identifier)
    if window is not None and not window.holds(made.time or trust.moment):  # V8
        raise SecureTrainError(
            "ST-S07",
            f"{made.signer.name} could not sign then",
            where=where,
            expected=str(window),
            found=_when(made.time, trust.moment),
            next_step="have it signed by somebody who may sign now; timestamps keep old signatures alive",
        )
    for entry in trust.revocations:  # V9
        if _is_about(entry, made) and (entry.since is None or made.time is None or made.time >= entry.since):
            who = f"{made.signer.name} ({subject_of(made.signer)})"
            raise _revoked(entry, who, _when(made.time, trust.moment), where)
    return made


def _by_key(parsed: Bundle, trust: Trust, rule: Role, where: str) -> _Made:
    key = trust.keys.get(parsed.key_hint)
    if key is None or parsed.key_hint not in rule.members:
        known = f"{key.name} ({parsed.key_hint[:12]})" if key else None
        found = known or f"a key that the policy does not know (sha256:{parsed.key_hint[:12]}...)"
        raise _not_allowed(trust, rule, found, where)
    if not key.accepts(bundle.pae(parsed.payload), parsed.signature):
        raise _wrong_signature(key.name, where)
    return _Made(key, key.identifier, _stamped(parsed, trust, where))


def _by_certificate(parsed: Bundle, trust: Trust, rule: Role, where: str) -> _Made:
    from supplychain.trust import certificates  # late: most signatures are by keys

    chain = certificates.load(parsed.certificates, where=where)
    names = certificates.subjects(chain[0], where=where)
    holder = next(
        (item for item in trust.holders if item.subject in names and item.identifier in rule.members), None
    )
    if holder is None:
        named = ", ".join(names)[:200] or "nobody"
        raise _not_allowed(trust, rule, f"a certificate that names {named}", where)
    time = _stamped(parsed, trust, where)
    key = certificates.verify(chain, holder, time or trust.moment, where=where)  # V8 for each certificate
    if not key.accepts(bundle.pae(parsed.payload), parsed.signature):
        raise _wrong_signature(holder.name, where)
    return _Made(holder, key.identifier, time)


def _by_identity(parsed: Bundle, trust: Trust, rule: Role, where: str) -> _Made:
    from supplychain.trust import keyless  # late: most signatures are by keys

    claimed = keyless.claimed(parsed, where=where)
    members = [item for item in trust.identities if item.identifier in rule.members]
    identity = next((item for item in members if claimed.is_(item)), None)
    if identity is None:
        same = next((i for i in members if (i.issuer, i.subject) == (claimed.issuer, claimed.subject)), None)
        found = f"{claimed.subject} of {claimed.issuer}"
        for name, value in same.claims if same else ():
            if claimed.claims.get(name) != value:
                found += f", {name} {claimed.claims.get(name)!r} in place of {value!r}"
        raise _not_allowed(trust, rule, found, where)
    time = keyless.verify(parsed, identity, where=where)  # V8 for the certificate
    return _Made(identity, hashlib.sha256(parsed.certificates[0]).hexdigest(), time)


def _stamped(parsed: Bundle, trust: Trust, where: str) -> dt.datetime | None:
    if not parsed.timestamps or not trust.stamps:
        return None
    from supplychain.trust import timestamps  # late: few signatures have them

    return timestamps.proven_time(parsed, trust.stamps, where=where)


def _when(proven: dt.datetime | None, moment: dt.datetime) -> str:
    if proven is None:
        return f"no proof of the time, so the present counts: {moment:%Y-%m-%dT%H:%M:%SZ}"
    return f"signed at or before {proven:%Y-%m-%dT%H:%M:%SZ}"


def _is_about(entry: Revocation, made: _Made) -> bool:
    signer = made.signer
    if entry.kind == "key":
        return entry.what in (signer.identifier, made.key)
    named = isinstance(signer, (Identity, Holder)) and entry.what in (signer.identifier, signer.subject)
    return entry.kind == "identity" and named


def _refuse_revoked_digests(trust: Trust, digests: list[str], where: str) -> None:
    for entry in trust.revocations:
        if entry.kind == "digest" and entry.what in digests:
            raise _revoked(entry, f"sha256:{entry.what}", None, where)


def _revoked(entry: Revocation, what: str, when: str | None, where: str) -> SecureTrainError:
    since = f" from {entry.since:%Y-%m-%dT%H:%M:%SZ} on" if entry.since else ""
    return SecureTrainError(
        "ST-S08",
        f"{what} was revoked{since}: {entry.reason[:200]}",
        where=where,
        expected=f"a signature before {entry.since:%Y-%m-%dT%H:%M:%SZ}" if entry.since else None,
        found=when if entry.since else None,
        next_step="do not use it; have it made or signed again by somebody who is trusted",
    )


def _role(trust: Trust, role: str, where: str) -> Role:
    if role not in trust.roles:
        raise SecureTrainError(
            "ST-P04",
            f"the policy gives nobody the role {role!r}",
            where=where,
            next_step=f"add [roles.{role}] to the policy",
        )
    return trust.roles[role]


def _not_allowed(trust: Trust, rule: Role, found: str, where: str) -> SecureTrainError:
    return SecureTrainError(
        "ST-S02",
        f"the signer may not vouch as {rule.name!r}",
        where=where,
        expected=trust.describe(rule.name),
        found=found,
        next_step=f"have it signed by a member of the role, or add the signer to [roles.{rule.name}] of the "
        "policy",
    )


def _wrong_signature(name: str, where: str) -> SecureTrainError:
    return SecureTrainError(
        "ST-S01",
        "the signature is not valid",
        where=where,
        expected=f"a signature by {name} over these bytes",
        found="one that does not match",
        next_step="restore the artifact and its signature from where they were published",
    )


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
