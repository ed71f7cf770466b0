"""Signed trust metadata: who may sign a policy, what was revoked, and that neither is an old version.

TUF's root and targets, by python-tuf's metadata API, in a folder beside the policy, `POLICY.trust/`:

    1.root.json, 2.root.json, ...   the keys of the roles "root" and "policy" (TUF's targets) with thresholds
    targets.json                    the sha256 of the policy and of revoked.json, signed by the policy role
    revoked.json                    what is no longer believed

Nothing here is fetched: the folder travels with the policy. The obligations; tests are named after the
numbers:

    M1  the first root has the sha256 that was given on the command line, or that this host remembers
    M2  each later root has the next version, and enough signatures of the root before it and of its own
    M3  the last root is not expired
    M4  targets.json has enough signatures of the last root's policy role
    M5  neither version is lower than what this host has seen, nor other bytes under the same version
    M6  targets.json is not expired
    M7  the policy and revoked.json have exactly the length and sha256 that it states
    M8  what was seen is remembered, durably, only when all of this held
"""

from __future__ import annotations

import datetime as dt
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from securesystemslib.signer import (  # type: ignore[attr-defined]  # its face, without __all__
    Key,
    Signature,
    SSlibKey,
)
from securesystemslib.signer import Signer as TufSigner  # type: ignore[attr-defined]  # as above
from tuf.api.exceptions import LengthOrHashMismatchError, RepositoryError
from tuf.api.metadata import (  # type: ignore[attr-defined]  # as above
    Metadata,
    Root,
    TargetFile,
    Targets,
)
from tuf.api.serialization import DeserializationError, SerializationError

from supplychain.artifact import canonical_json, parse_json, write_durably
from supplychain.errors import SecureTrainError
from supplychain.trust import revocations
from supplychain.trust.keys import VerifyingKey
from supplychain.trust.roots import Revocation
from supplychain.trust.signers import PrivateKey

SUFFIX = ".trust"
TARGETS = "targets.json"
POLICY = "policy.toml"  # the name of the policy among the targets, whatever its file is called
REVOKED = "revoked.json"
DRAFT = "draft.root.json"  # the next root while it lacks signatures: never believed
MAX_METADATA = 1 << 20  # bytes
MAX_ROOTS = 1024  # rotations that are followed
ROLES = {"root": "root", "policy": "targets"}
_NAME = "x-secure-train-name"
S = TypeVar("S", Root, Targets)


@dataclass(frozen=True)
class Seen:
    """What this host has verified of a policy's metadata: the first root's sha256 and the newest versions."""

    first: str
    root: int = 0
    root_sha256: str = ""
    targets: int = 0
    targets_sha256: str = ""


@dataclass(frozen=True)
class Vouched:
    """The outcome of a verification: what is revoked, for how long this holds, and what to remember."""

    revocations: tuple[Revocation, ...]
    expires: dt.datetime
    seen: Seen


def folder_of(policy: Path) -> Path:
    return policy.with_name(policy.name + SUFFIX)


def verify(policy: Path, data: bytes, seen: Seen, *, now: dt.datetime) -> Vouched:
    """Check the metadata beside `policy`, whose bytes are `data` (M1 to M7). ST-S09 for what is wrong or old,
    ST-S10 for what is expired.
    """
    folder = folder_of(policy)
    root, root_bytes = _roots(folder, seen)  # M1, M2
    _refuse_expired(root.expires, folder, f"the root, version {root.version}", now)  # M3
    raw = _read(folder / TARGETS)
    signed = _parse(raw, Targets, folder / TARGETS)
    _delegated(root, "targets", signed, folder / TARGETS)  # M4
    targets = signed.signed
    found = Seen(seen.first, root.version, _hash(root_bytes), targets.version, _hash(raw))
    _refuse_rollback(found, seen, folder)  # M5
    _refuse_expired(targets.expires, folder, f"{TARGETS}, version {targets.version}", now)  # M6
    listed = _read(folder / REVOKED)
    for name, content, place in ((POLICY, data, policy), (REVOKED, listed, folder / REVOKED)):  # M7
        _is_target(targets, name, content, place)
    entries = revocations.parse(listed, where=str(folder / REVOKED))
    return Vouched(entries, min(root.expires, targets.expires), found)


def _roots(folder: Path, seen: Seen) -> tuple[Root, bytes]:
    """The last root of the chain (M1, M2)."""
    path = folder / "1.root.json"
    data = _read(path)
    if _hash(data) != seen.first:
        raise _refused(
            "the first root is not the one that is trusted",
            path,
            f"sha256:{seen.first}",
            f"sha256:{_hash(data)}",
        )
    metadata = _parse(data, Root, path)
    _delegated(metadata.signed, "root", metadata, path)
    for version in range(2, MAX_ROOTS):
        path = folder / f"{version}.root.json"
        if not path.exists():
            return metadata.signed, data
        data = _read(path)
        following = _parse(data, Root, path)
        _delegated(metadata.signed, "root", following, path)
        _delegated(following.signed, "root", following, path)
        if following.signed.version != version:
            raise _refused(
                "a root has another version than its place", path, str(version), str(following.signed.version)
            )
        metadata = following
    raise _refused("there are too many roots", folder, f"at most {MAX_ROOTS}", "more")


def _delegated(root: Root, role: str, signed: Metadata[Any], path: Path) -> None:
    try:
        result = root.get_verification_result(role, signed.signed_bytes, signed.signatures)
    except (ValueError, RepositoryError, SerializationError) as error:
        raise _refused(f"the metadata cannot be checked: {error}", path) from None
    unknown = [keyid for keyid in root.roles[role].keyids if keyid not in root.keys]
    if unknown:
        raise _refused(
            f"the role {role!r} names a key that the root does not hold", path, found=unknown[0][:80]
        )
    publics = [str(root.keys[keyid].keyval.get("public")) for keyid in root.roles[role].keyids]
    if len(set(publics)) != len(publics):
        raise _refused(f"one key stands twice in the role {role!r}, and would count twice", path)
    if not result.verified:
        who = [_name_of(key) for key in result.signed.values()]
        raise _refused(
            f"too few signatures of the role {role!r} of root version {root.version}",
            path,
            f"{result.threshold} of {', '.join(_name_of(root.keys[k]) for k in root.roles[role].keyids)}",
            ", ".join(sorted(who)) or "none of them",
        )


def _refuse_rollback(found: Seen, seen: Seen, folder: Path) -> None:
    pairs = (
        ("root", found.root, found.root_sha256, seen.root, seen.root_sha256),
        (TARGETS, found.targets, found.targets_sha256, seen.targets, seen.targets_sha256),
    )
    for what, version, sha256, known, known_sha256 in pairs:
        if version < known:
            raise _refused(
                f"the trust metadata is older than what this host has seen ({what})",
                folder,
                f"version {known} or later",
                f"version {version}",
            )
        if version == known and sha256 != known_sha256:
            raise _refused(
                f"the trust metadata was changed without a new version ({what})",
                folder,
                f"version {version} with sha256:{known_sha256}",
                f"sha256:{sha256}",
            )


def _refuse_expired(expires: dt.datetime, folder: Path, what: str, now: dt.datetime) -> None:
    if now >= expires:
        raise SecureTrainError(
            "ST-S10",
            f"the trust metadata has expired ({what})",
            where=str(folder),
            expected="a date in the future",
            found=f"{expires:%Y-%m-%dT%H:%M:%SZ}",
            next_step="get the current metadata from its maintainer, or renew it: secure-train keys renew",
        )


def _is_target(targets: Targets, name: str, data: bytes, path: Path) -> None:
    target = targets.targets.get(name)
    try:
        if target is None or "sha256" not in target.hashes:
            raise _refused(f"the trust metadata does not vouch for {name}", path)
        target.verify_length_and_hashes(data)
    except LengthOrHashMismatchError:
        raise _refused(
            "the file is not the one that the trust metadata vouches for",
            path,
            f"sha256:{target.hashes['sha256'] if target else ''}",
            f"sha256:{_hash(data)}",
        ) from None


def _parse(data: bytes, kind: type[S], path: Path) -> Metadata[S]:
    """Strict JSON first, then TUF's own rules; ST-S09 for both."""
    parse_json(data, what="the trust metadata", where=str(path), code="ST-S09", limit=MAX_METADATA)
    try:
        metadata: Metadata[S] = Metadata.from_bytes(data)
    except (DeserializationError, ValueError, TypeError, AttributeError) as error:
        raise _refused(f"the trust metadata is malformed: {str(error)[:200]}", path) from None
    if not isinstance(metadata.signed, kind):
        raise _refused("the trust metadata is of another type", path, kind.type, str(metadata.signed.type))
    return metadata


def _read(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_METADATA + 1)
    except OSError as error:
        raise _refused(f"a file of the trust metadata cannot be read: {error.strerror}", path) from None


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _refused(
    what: str, path: Path, expected: str | None = None, found: str | None = None
) -> SecureTrainError:
    return SecureTrainError(
        "ST-S09",
        what,
        where=str(path),
        expected=expected,
        found=found,
        next_step="get the whole folder again from whoever maintains it; do not mend it by hand",
    )


def _name_of(key: Key) -> str:
    return f"{str(key.unrecognized_fields.get(_NAME, 'a key'))[:64]} ({key.keyid[:12]})"


# --- what a host remembers ----------------------------------------------------------------------------------


class Memory:
    """Where a host keeps what it has seen, by the policy's id. Only verified things get here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def _path(self, policy: str) -> Path:
        return self.folder / f"{_hash(policy.encode())[:32]}.json"

    def recall(self, policy: str) -> Seen | None:
        path = self._path(policy)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SecureTrainError(
                "ST-P02", f"what was seen before cannot be read: {error.strerror}", where=str(path)
            ) from None
        document = parse_json(data, what="what was seen before", where=str(path), code="ST-P02")
        try:
            return Seen(
                str(document["first"]),
                int(document["root"]),
                str(document["root_sha256"]),
                int(document["targets"]),
                str(document["targets_sha256"]),
            )
        except (KeyError, TypeError, ValueError):
            raise SecureTrainError(
                "ST-P02", "what was seen before is damaged", where=str(path), next_step="keys trust again"
            ) from None

    def remember(self, policy: str, seen: Seen) -> None:
        """M8. A host that cannot write cannot remember, and must not pretend to."""
        if self.recall(policy) == seen:
            return
        document = {name: str(value) for name, value in vars(seen).items()} | {"policy": policy}
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_durably(self._path(policy), canonical_json(document))
        except OSError as error:
            raise SecureTrainError(
                "ST-U04",
                f"what was seen cannot be remembered: {error.strerror}",
                where=str(self.folder),
            ) from None


# --- making it ----------------------------------------------------------------------------------------------


class _Signer(TufSigner):
    """One of our keys as python-tuf wants it."""

    def __init__(self, key: PrivateKey) -> None:
        self._key = key
        self._public = tuf_key(key.public)

    @property
    def public_key(self) -> Key:
        return self._public

    @classmethod
    def from_priv_key_uri(cls, *_: Any) -> _Signer:
        raise NotImplementedError("keys come from the key store")

    def sign(self, payload: bytes) -> Signature:
        return Signature(self._public.keyid, self._key.sign(payload).hex())


def tuf_key(key: VerifyingKey) -> SSlibKey:
    """The key with its name; TUF's identifier stays the digest of the key alone."""
    made = SSlibKey.from_crypto(key.key)
    made.unrecognized_fields[_NAME] = key.name
    return made


def create(
    policy: Path,
    data: bytes,
    signers: Iterable[PrivateKey],
    keys: Iterable[VerifyingKey],
    *,
    threshold: int,
    root_expires: dt.datetime,
    expires: dt.datetime,
) -> str:
    """Begin the trust metadata of a policy: the same keys and threshold for both roles, to start with. Gives
    the sha256 of the first root, which others pin.
    """
    folder = folder_of(policy)
    if folder.exists():
        raise SecureTrainError(
            "ST-U05",
            "there is trust metadata already",
            where=str(folder),
            next_step="keys rotate, keys renew",
        )
    root = Root(version=1, expires=root_expires, consistent_snapshot=False)
    for key in keys:
        for role in root.roles:
            root.add_key(tuf_key(key), role)
    _threshold(root, root.roles, threshold)
    metadata = Metadata(root)
    by = list(signers)
    for signer in by:
        metadata.sign(_Signer(signer), append=True)
    _delegated(root, "root", metadata, folder / "1.root.json")
    content = metadata.to_bytes()
    folder.mkdir(parents=True)
    write_durably(folder / "1.root.json", content)
    write_durably(folder / REVOKED, revocations.emit(()))
    renew(policy, data, by, expires=expires)
    return _hash(content)


def renew(
    policy: Path,
    data: bytes,
    signers: Iterable[PrivateKey],
    *,
    expires: dt.datetime,
    revoke: Iterable[Revocation] = (),
) -> int:
    """Sign the policy as it stands, and the revocations with `revoke` added, as the next version."""
    folder = folder_of(policy)
    root = _last_root(folder)
    old = revocations.parse(_read(folder / REVOKED), where=str(folder / REVOKED))
    listed = revocations.emit((*old, *revoke))
    version = 1
    if (folder / TARGETS).exists():
        version = _parse(_read(folder / TARGETS), Targets, folder / TARGETS).signed.version + 1
    targets = Targets(version=version, expires=expires)
    for name, content in ((POLICY, data), (REVOKED, listed)):
        targets.targets[name] = TargetFile.from_data(name, content, ["sha256"])
    metadata = Metadata(targets)
    for signer in signers:
        metadata.sign(_Signer(signer), append=True)
    _delegated(root, "targets", metadata, folder / TARGETS)
    write_durably(folder / REVOKED, listed)
    write_durably(folder / TARGETS, metadata.to_bytes())
    return version


def rotate(
    policy: Path,
    role: str,
    signers: Iterable[PrivateKey],
    *,
    add: Iterable[VerifyingKey] = (),
    remove: Iterable[VerifyingKey] = (),
    threshold: int | None = None,
    expires: dt.datetime,
) -> tuple[Path, bool]:
    """Make the next root: other keys or another threshold for `role` ("root" or "policy"). Its path, and
    whether it has the signatures that it needs; without them it is a draft that others countersign.
    """
    folder = folder_of(policy)
    root = _last_root(folder)
    root.version += 1
    root.expires = expires
    roles = ["root"] if role == "root" else [name for name in root.roles if name != "root"]
    for key in remove:
        for name in roles:
            keyid = tuf_key(key).keyid
            if keyid not in root.roles[name].keyids:
                raise SecureTrainError("ST-U03", f"{key.name!r} has not the role {role!r}", where=str(folder))
            root.revoke_key(keyid, name)
    for key in add:
        for name in roles:
            root.add_key(tuf_key(key), name)
    _threshold(root, roles, threshold)
    write_durably(folder / DRAFT, Metadata(root).to_bytes())
    return countersign(policy, signers)


def countersign(policy: Path, signers: Iterable[PrivateKey]) -> tuple[Path, bool]:
    """Add signatures to the drafted root; it becomes a root when it has enough of both."""
    folder = folder_of(policy)
    if not (folder / DRAFT).exists():
        raise SecureTrainError(
            "ST-U01", "there is no drafted root", where=str(folder), next_step="keys rotate"
        )
    metadata = _parse(_read(folder / DRAFT), Root, folder / DRAFT)
    for signer in signers:
        metadata.sign(_Signer(signer), append=True)
    final = folder / f"{metadata.signed.version}.root.json"
    write_durably(folder / DRAFT, metadata.to_bytes())
    try:
        for root in (_last_root(folder), metadata.signed):
            _delegated(root, "root", metadata, final)
    except SecureTrainError:
        return folder / DRAFT, False
    write_durably(final, metadata.to_bytes())
    (folder / DRAFT).unlink()
    return final, True


def _last_root(folder: Path) -> Root:
    """The root that the metadata stands at, for its maintainer: he made it, so nothing pins the first."""
    root, _ = _roots(folder, Seen(_hash(_read(folder / "1.root.json"))))
    return root


def _threshold(root: Root, roles: Iterable[str], threshold: int | None) -> None:
    for name in roles:
        role = root.roles[name]
        role.threshold = role.threshold if threshold is None else threshold
        if not 1 <= role.threshold <= len(role.keyids):
            raise SecureTrainError(
                "ST-U03",
                f"the role {name!r} cannot be filled",
                expected=f"a threshold from 1 to {len(role.keyids)}, its number of keys",
                found=str(role.threshold),
            )
