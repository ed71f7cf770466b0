"""What this host believes: keys, identities and certificates, the roles that they may fill, and until when.

A `Trust` comes from a policy that was itself verified, or from what the caller names. It is data: who someone
is, when he may sign, what was revoked; whether a signature is valid is `verify.py`'s word. `config_folder` is
where a user's own keys and the keys that he trusts for policies live.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import platformdirs

from supplychain.artifact import canonical_json
from supplychain.errors import SecureTrainError
from supplychain.trust.keys import KeyStore, VerifyingKey

# Claim of a certificate -> suffix of Fulcio's object identifier.
# https://github.com/sigstore/fulcio/blob/main/docs/oid-info.md
CLAIMS = {
    "build_signer_uri": "9",
    "build_signer_digest": "10",
    "runner_environment": "11",
    "source_repository_uri": "12",
    "source_repository_digest": "13",
    "source_repository_ref": "14",
    "source_repository_id": "15",
    "source_repository_owner_uri": "16",
    "source_repository_owner_id": "17",
    "build_config_uri": "18",
    "build_config_digest": "19",
    "build_trigger": "20",
    "run_invocation_uri": "21",
    "source_repository_visibility": "22",
}


class Signatory(Protocol):
    """Whoever can sign: a key, a Sigstore identity, or the holder of a certificate."""

    @property
    def name(self) -> str: ...

    @property
    def identifier(self) -> str: ...


@dataclass(frozen=True)
class Instance:
    """A Sigstore instance: its trusted root, whose sha256 somebody trusted has pinned."""

    name: str
    trusted_root: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.trusted_root).hexdigest()


@dataclass(frozen=True)
class Identity:
    """Somebody whom an OpenID issuer names, as a Sigstore certificate says: matched exactly, claims too.

    Two claims are one person: the identifier is of issuer and subject only, so that he counts once.
    """

    name: str
    issuer: str
    subject: str
    instance: Instance
    claims: tuple[tuple[str, str], ...] = ()

    @property
    def identifier(self) -> str:
        return _identifier("identity", self.issuer, self.subject)


@dataclass(frozen=True)
class Authority:
    """A private certificate authority: its root certificates, in PEM form."""

    name: str
    pem: bytes


@dataclass(frozen=True)
class Holder:
    """Somebody whom a certificate of a private authority names in its subject alternative name."""

    name: str
    subject: str
    authority: Authority

    @property
    def identifier(self) -> str:
        return _identifier("holder", hashlib.sha256(self.authority.pem).hexdigest(), self.subject)


def _identifier(*parts: str) -> str:
    return hashlib.sha256(canonical_json(parts)).hexdigest()


@dataclass(frozen=True)
class Window:
    """When a signatory may sign: from `start` on, before `end`. None: without bound."""

    start: dt.datetime | None = None
    end: dt.datetime | None = None

    def holds(self, moment: dt.datetime) -> bool:
        return (self.start is None or self.start <= moment) and (self.end is None or moment < self.end)

    def __str__(self) -> str:
        first = f"from {self.start:%Y-%m-%dT%H:%M:%SZ}" if self.start else ""
        last = f"before {self.end:%Y-%m-%dT%H:%M:%SZ}" if self.end else ""
        return f"{first} {last}".strip() or "at any time"


@dataclass(frozen=True)
class Revocation:
    """A digest (of a manifest, a subject or a bundle) or a signatory that is no longer believed.

    With `since` signatures stay valid that provably were made before. `what` is the digest, the signatory's
    identifier, or an identity's subject.
    """

    kind: Literal["digest", "key", "identity"]
    what: str
    reason: str
    since: dt.datetime | None = None


@dataclass(frozen=True)
class Role:
    """Who may vouch for something: at least `threshold` of the members (by identifier)."""

    name: str
    members: tuple[str, ...]
    threshold: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.threshold <= max(1, len(set(self.members))):
            raise SecureTrainError(
                "ST-P03",
                f"the role {self.name!r} cannot be filled",
                expected=f"a threshold from 1 to {len(set(self.members))}, its number of members",
                found=str(self.threshold),
            )


@dataclass(frozen=True)
class Trust:
    """Trusted keys by identifier, roles by name, and what else a signature is judged by.

    `stamps` are the authorities whose timestamps are believed; `windows` bound signatories by identifier;
    `now` is the moment to judge at, None the present.
    """

    keys: Mapping[str, VerifyingKey]
    roles: Mapping[str, Role]
    identities: tuple[Identity, ...] = ()
    holders: tuple[Holder, ...] = ()
    stamps: tuple[Authority, ...] = ()
    windows: Mapping[str, Window] = field(default_factory=dict)
    revocations: tuple[Revocation, ...] = ()
    now: dt.datetime | None = None

    @staticmethod
    def of(role: str, *members: Signatory) -> Trust:
        """Trust exactly these, any one of them, for one role."""
        return Trust(
            {item.identifier: item for item in members if isinstance(item, VerifyingKey)},
            {role: Role(role, tuple(item.identifier for item in members))},
            tuple(item for item in members if isinstance(item, Identity)),
            tuple(item for item in members if isinstance(item, Holder)),
        )

    @property
    def moment(self) -> dt.datetime:
        return self.now or dt.datetime.now(dt.UTC)

    def signatory(self, identifier: str) -> Signatory | None:
        """Whom the identifier belongs to, of those that are known."""
        named: list[Signatory] = [*self.identities, *self.holders]
        others = (item for item in named if item.identifier == identifier)
        return self.keys.get(identifier) or next(others, None)

    def describe(self, role: str) -> str:
        """The role's members by name, for messages."""
        rule = self.roles[role]
        members = [item for item in map(self.signatory, rule.members) if item is not None]
        names = [f"{item.name} ({subject_of(item)})" for item in members]
        return (f"{rule.threshold} of " if rule.threshold > 1 else "") + (", ".join(names) or "nobody")


def subject_of(item: Signatory) -> str:
    """What tells a signatory from others, short: a key's digest, an identity's subject and issuer."""
    if isinstance(item, Identity):
        return f"{item.subject} of {item.issuer}, Sigstore {item.instance.name}"
    if isinstance(item, Holder):
        return f"{item.subject}, authority {item.authority.name}"
    return item.identifier[:12]


def config_folder() -> Path:
    """SECURE_TRAIN_CONFIG, or the user's configuration folder."""
    explicit = os.environ.get("SECURE_TRAIN_CONFIG")
    return Path(explicit) if explicit else platformdirs.user_config_path("secure-train")


def key_store() -> KeyStore:
    """The user's own key pairs."""
    return KeyStore(config_folder() / "keys")


def policy_keys() -> KeyStore:
    """Public keys that this host trusts to sign policies: the first trust, put there by hand or by `keys new
    --trust`.
    """
    return KeyStore(config_folder() / "trusted")


def memory_folder() -> Path:
    """What this host has seen of trust metadata, so that nobody can show it an older version."""
    return config_folder() / "seen"
