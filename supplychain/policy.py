"""The policy: a TOML file with a closed vocabulary that says who may vouch for what, and until when.

Loading checks the policy's own signature and expiry, so that a `Policy` in hand is one that this host trusts.
A file that is not understood whole is not applied in part: unknown keys are refused.
"""

from __future__ import annotations

import datetime as dt
import difflib
import hashlib
import re
import string
import tomllib
from collections.abc import Collection, Iterable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from supplychain import statement
from supplychain.artifact import tree, write_durably
from supplychain.errors import SecureTrainError
from supplychain.trust import revocations, roots
from supplychain.trust.keys import VerifyingKey, parse_public
from supplychain.trust.roots import (
    CLAIMS,
    Authority,
    Holder,
    Identity,
    Instance,
    Revocation,
    Role,
    Signatory,
    Trust,
    Window,
)
from supplychain.trust.signers import Signer
from supplychain.trust.verify import verify_statement

if TYPE_CHECKING:
    from supplychain.trust import metadata

MAX_POLICY = 1 << 20  # bytes
SIGNATURE_SUFFIX = ".sigstore.json"
LIFETIME = dt.timedelta(days=90)  # of a policy that `policy new` writes

Format = Literal["shards", "safetensors", "json"]
Reads = Literal["always", "once", "off"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Timed(_Strict):
    """Somebody who may sign for a time: from `valid_from` on, before `valid_until`."""

    valid_from: str | None = None
    valid_until: str | None = None


class KeyRule(_Timed):
    """A public key, in PEM form."""

    pem: str


class InstanceRule(_Strict):
    """A Sigstore instance: its trusted root, a file beside the policy, pinned by digest."""

    trusted_root: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class AuthorityRule(_Strict):
    """A certificate or timestamp authority: certificates in PEM form, a timestamp authority's own first."""

    pem: str


class IdentityRule(_Timed):
    """Whom a certificate names: one of a Sigstore instance (with issuer), or of a private authority."""

    san: str = Field(min_length=1)
    instance: str | None = None
    issuer: str | None = None
    claims: dict[str, str] = {}
    authority: str | None = None

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> IdentityRule:
        if (self.instance is None) == (self.authority is None):
            raise ValueError("an identity needs either an `instance` of Sigstore or an `authority`")
        if (self.instance is None) != (self.issuer is None):
            raise ValueError("`issuer` belongs to the identities of an `instance`, and these need it")
        if self.claims and self.instance is None:
            raise ValueError("only certificates of a Sigstore instance have `claims`")
        unknown = sorted(set(self.claims) - set(CLAIMS))
        if unknown:
            raise ValueError(f"{unknown[0]!r} is no claim; there are {', '.join(CLAIMS)}")
        return self


class RoleRule(_Strict):
    """Who fills a role: `threshold` of the named keys and identities."""

    keys: list[str] = []
    identities: list[str] = []
    threshold: int = Field(default=1, ge=1)


class TimestampRule(_Strict):
    """Whose timestamps prove when something was signed."""

    authorities: list[str] = []


class RevocationRule(_Strict):
    """Something or somebody who is no longer believed, or from `since` on."""

    kind: Literal["digest", "key", "identity"]
    what: str
    reason: str
    since: str | None = None


class ArtifactRule(_Strict):
    """What a kind of artifact must satisfy. `formats` absent: not checked (environments have a check of their
    own).
    """

    signed_by: str
    coverage: Literal["lazy", "full"] = "lazy"
    formats: list[Format] | None = None


class EnvironmentRule(_Strict):
    """What the training environment must satisfy."""

    require_sealed: bool = True


class RunRule(_Strict):
    """What a run may ask for."""

    reads: list[Reads] = Field(default=["always"], min_length=1)
    isolation: Literal["auto", "required", "off"] = "auto"


class LicenceException(_Strict):
    """A component (its purl without version, perhaps with `*` at the end) that is accepted until a day."""

    component: str
    reason: str = Field(min_length=1)
    until: str = Field(pattern=r"^\d{4}-\d\d-\d\d$")


class LicenceRule(_Strict):
    """Which licences `sbom licenses` accepts, by SPDX name; `unknown`: what it makes of one not known."""

    allow: list[str] = []
    deny: list[str] = []
    review: list[str] = []
    unknown: Literal["allowed", "review", "denied"] = "review"
    exceptions: list[LicenceException] = []


class Document(_Strict):
    """The whole file."""

    version: Literal[1]
    id: str = Field(pattern=r"^[a-z0-9][a-z0-9./-]{0,79}$")
    expires: str
    keys: dict[str, KeyRule] = {}
    identities: dict[str, IdentityRule] = {}
    sigstore: dict[str, InstanceRule] = {}
    authorities: dict[str, AuthorityRule] = {}
    timestamps: TimestampRule = TimestampRule()
    revoked: list[RevocationRule] = []
    roles: dict[str, RoleRule]
    artifacts: dict[str, ArtifactRule]
    environment: EnvironmentRule = EnvironmentRule()
    run: RunRule = RunRule()
    licenses: LicenceRule | None = None

    @model_validator(mode="after")
    def _names_exist(self) -> Document:
        for name, role in self.roles.items():
            _known(f"roles.{name}", role.keys, self.keys, "keys")
            _known(f"roles.{name}", role.identities, self.identities, "identities")
            members = len(set(role.keys)) + len(set(role.identities))
            if not members:
                raise ValueError(f"roles.{name} has neither keys nor identities")
            if role.threshold > members:
                raise ValueError(
                    f"roles.{name} asks for {role.threshold} signatures and has {members} members"
                )
        for name, identity in self.identities.items():
            _known(f"identities.{name}", [identity.instance or ""], self.sigstore | {"": None}, "sigstore")
            _known(
                f"identities.{name}", [identity.authority or ""], self.authorities | {"": None}, "authorities"
            )
        who = [(item.san, item.issuer, item.authority) for item in self.identities.values()]
        if len(set(who)) != len(who):
            raise ValueError("two of [identities] are the same person, who would count twice")
        _known("timestamps", self.timestamps.authorities, self.authorities, "authorities")
        for kind, rule in self.artifacts.items():
            if rule.signed_by not in self.roles:
                raise ValueError(
                    f"artifacts.{kind} is signed by the role {rule.signed_by!r}, which [roles] does not have"
                )
        launcher = self.artifacts.get("checkpoint")
        if launcher and self.roles[launcher.signed_by].threshold != 1:
            raise ValueError(
                f"roles.{launcher.signed_by} signs checkpoints: the launcher does so alone, so its "
                "threshold must be 1"
            )
        return self


def _known(where: str, names: Iterable[str], table: Collection[str], title: str) -> None:
    missing = [name for name in names if name not in table]
    if missing:
        raise ValueError(f"{where} names {missing[0]!r}, which [{title}] does not have")


class Policy:
    """A policy that was parsed, is not expired and is trusted by this host. Only `load` makes it."""

    def __init__(
        self,
        document: Document,
        data: bytes,
        path: Path,
        vouched_by: str,
        now: dt.datetime | None = None,
        revoked: tuple[Revocation, ...] = (),
    ) -> None:
        self.document = document
        self.data = data
        self.path = path
        self.vouched_by = vouched_by
        self.trust = _trust(document, path, now, revoked)

    @property
    def id(self) -> str:
        return self.document.id

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    def rule(self, kind: str) -> ArtifactRule:
        """The rule for a kind of artifact; ST-P04 if the policy has none."""
        try:
            return self.document.artifacts[kind]
        except KeyError:
            raise SecureTrainError(
                "ST-P04",
                f"the policy has no rule for artifacts of kind {kind!r}",
                where=str(self.path),
                expected=", ".join(sorted(self.document.artifacts)),
                found=kind,
                next_step=f"add [artifacts.{kind}] to the policy and sign it again",
            ) from None


def _trust(document: Document, path: Path, now: dt.datetime | None, revoked: tuple[Revocation, ...]) -> Trust:
    """Who is trusted for what, with the files beside the policy that it pins."""
    keys = {
        name: parse_public(name, rule.pem.encode(), where=f"{path}: keys.{name}")
        for name, rule in document.keys.items()
    }
    instances = {name: _instance(name, rule, path) for name, rule in document.sigstore.items()}
    authorities = {name: Authority(name, rule.pem.encode()) for name, rule in document.authorities.items()}
    people: dict[str, Identity | Holder] = {}
    for name, rule in document.identities.items():
        if rule.instance is not None:
            claims = tuple(sorted(rule.claims.items()))
            people[name] = Identity(name, str(rule.issuer), rule.san, instances[rule.instance], claims)
        else:
            people[name] = Holder(name, rule.san, authorities[str(rule.authority)])
    timed: list[tuple[Signatory, _Timed]] = [(keys[name], rule) for name, rule in document.keys.items()]
    timed += [(people[name], rule) for name, rule in document.identities.items()]
    return Trust(
        {key.identifier: key for key in keys.values()},
        {
            name: Role(
                name,
                tuple(
                    item.identifier
                    for item in (*map(keys.get, rule.keys), *map(people.get, rule.identities))
                    if item
                ),
                rule.threshold,
            )
            for name, rule in document.roles.items()
        },
        tuple(item for item in people.values() if isinstance(item, Identity)),
        tuple(item for item in people.values() if isinstance(item, Holder)),
        tuple(authorities[name] for name in document.timestamps.authorities),
        {
            item.identifier: Window(_moment(rule.valid_from, path), _moment(rule.valid_until, path))
            for item, rule in timed
            if rule.valid_from or rule.valid_until
        },
        revoked
        + tuple(
            Revocation(entry.kind, entry.what, entry.reason, _moment(entry.since, path))
            for entry in document.revoked
        ),
        now,
    )


def _instance(name: str, rule: InstanceRule, path: Path) -> Instance:
    """The pinned trusted root, read once; ST-S09 if it is another file than the policy pins."""
    file = path.parent / rule.trusted_root
    instance = Instance(name, _read(file))
    if instance.sha256 != rule.sha256:
        raise SecureTrainError(
            "ST-S09",
            f"the trusted root of the Sigstore instance {name!r} is not the one that the policy pins",
            where=str(file),
            expected=f"sha256:{rule.sha256}",
            found=f"sha256:{instance.sha256}",
            next_step="restore the file, or review the new root and pin it in the policy",
        )
    return instance


def _moment(text: str | None, path: Path) -> dt.datetime | None:
    return None if text is None else _time(text, path)


def signature_path(policy: Path) -> Path:
    return policy.with_name(policy.name + SIGNATURE_SUFFIX)


def load(
    path: Path, *, trusted: list[VerifyingKey], pinned: str | None = None, now: dt.datetime | None = None
) -> Policy:
    """Read, authenticate and check the policy at `path`.

    It must have the sha256 `pinned` (hex), or be vouched for by trust metadata whose first root this host
    trusts, or be signed by one of `trusted`. Errors: ST-U01 absent, ST-P03 not understood, ST-P02 not trusted
    (cannot decide), ST-P01 expired, ST-S01 wrong signature, ST-S09 and ST-S10 metadata wrong or expired.
    """
    data = _read(path)
    moment = now or dt.datetime.now(dt.UTC)
    revoked = revocations.of_this_host()
    if pinned is not None:
        vouched_by = _check_pin(data, pinned, path)
    elif (seen := _remembered(data, path)) is not None:
        vouched_by, more = _check_metadata(data, path, seen, moment)
        revoked += more
    else:
        vouched_by = _check_signature(data, path, trusted)
    document = parse(data, where=str(path))
    expires = _time(document.expires, path)
    if moment >= expires:
        raise SecureTrainError(
            "ST-P01",
            f"the policy {document.id!r} has expired",
            where=str(path),
            expected="a date in the future",
            found=document.expires,
            next_step=f"review it, set a new date, and: secure-train policy sign {path} --key NAME",
        )
    return Policy(document, data, path, vouched_by, now, revoked)


def parse(data: bytes, *, where: str) -> Document:
    """The document in these bytes; ST-P03 names all problems, and for an unknown key the nearest one."""
    try:
        values = tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise SecureTrainError("ST-P03", "the policy is not UTF-8 text", where=where) from None
    except (ValueError, RecursionError) as error:  # also numbers of more digits than Python converts
        raise SecureTrainError("ST-P03", f"the policy is not TOML: {error}", where=where) from None
    try:
        return Document.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(_problem(item["loc"], item["type"], item["msg"]) for item in error.errors()[:8])
        raise SecureTrainError(
            "ST-P03", f"the policy cannot be used: {problems}", where=where, next_step="see docs/policy.md"
        ) from None


def _problem(location: tuple[int | str, ...], kind: str, message: str) -> str:
    name = ".".join(map(str, location)) or "policy"
    if kind == "extra_forbidden":
        known = {
            field
            for model in (*_Strict.__subclasses__(), *_Timed.__subclasses__())
            for field in model.model_fields
        }
        near = difflib.get_close_matches(str(location[-1]), sorted(known), 1)
        return f"{name} is not a key of a policy" + (f" (did you mean {near[0]!r}?)" if near else "")
    return f"{name}: {message.removeprefix('Value error, ')}"


def new(path: Path, profile: str, signer: Signer, *, now: dt.datetime) -> None:
    """Write the shipped policy `profile` with the signer's key in every role, and sign it."""
    available = {
        item.name.removesuffix(".toml"): item
        for item in resources.files("policies").iterdir()
        if item.name.endswith(".toml")
    }
    if profile not in available:
        raise SecureTrainError(
            "ST-U03", f"there is no policy {profile!r}", expected=", ".join(sorted(available)), found=profile
        )
    if path.exists():
        raise SecureTrainError(
            "ST-U05",
            "there is a policy of this name already",
            where=str(path),
            next_step="choose another name, or sign this one: secure-train policy sign",
        )
    key = signer.public
    if not isinstance(key, VerifyingKey):
        raise SecureTrainError(
            "ST-S06",
            "a new policy trusts a key, and this signer is an identity",
            found=key.name,
            next_step="name a key, then add the identity to the policy",
        )
    expires = (now + LIFETIME).strftime("%Y-%m-%dT00:00:00Z")
    text = string.Template(available[profile].read_text("utf-8")).substitute(
        key=re.sub(r"[^A-Za-z0-9_-]", "-", key.name),
        pem=key.pem.decode(),
        expires=expires,
    )
    parse(text.encode(), where=str(path))
    _write(path, text.encode())
    sign(path, signer)


def sign(path: Path, signer: Signer) -> Path:
    """Sign the policy as it stands; ST-P03 if it cannot be understood."""
    data = _read(path)
    document = parse(data, where=str(path))
    signed = signer.sign_payload(statement.policy(path.name, data, document.id, document.expires))
    _write(signature_path(path), signed.data)
    return signature_path(path)


def _remembered(data: bytes, path: Path) -> metadata.Seen | None:
    """What this host trusts of the policy's metadata; None if it never began to.

    The policy's own word for its name is not verified yet, and decides only which memory is asked: under
    another name there is none, and then a key that this host trusts has to have signed.
    """
    from supplychain.trust import metadata  # late: a policy of one person has none

    if not roots.memory_folder().is_dir():
        return None
    return metadata.Memory(roots.memory_folder()).recall(parse(data, where=str(path)).id)


def _check_metadata(
    data: bytes, path: Path, seen: metadata.Seen, now: dt.datetime
) -> tuple[str, tuple[Revocation, ...]]:
    from supplychain.trust import metadata  # late: as above

    found = metadata.verify(path, data, seen, now=now)
    metadata.Memory(roots.memory_folder()).remember(parse(data, where=str(path)).id, found.seen)
    return f"trust metadata, root {found.seen.root}, version {found.seen.targets}", found.revocations


def trust_metadata(path: Path, root: str, *, now: dt.datetime) -> metadata.Seen:
    """From now on this host believes the policy at `path` by its metadata, which begins with the root of the
    sha256 `root` (hex), and nothing older.
    """
    from supplychain.trust import metadata  # late: as above

    data = _read(path)
    document = parse(data, where=str(path))
    memory = metadata.Memory(roots.memory_folder())
    known = memory.recall(document.id)
    first = root.removeprefix("sha256:")
    seen = known if known is not None and known.first == first else metadata.Seen(first)
    found = metadata.verify(path, data, seen, now=now)
    memory.remember(document.id, found.seen)
    return found.seen


def _check_pin(data: bytes, pinned: str, path: Path) -> str:
    found = hashlib.sha256(data).hexdigest()
    if found != pinned.removeprefix("sha256:"):
        raise SecureTrainError(
            "ST-P02",
            "the policy is not the pinned one",
            where=str(path),
            expected=f"sha256:{pinned.removeprefix('sha256:')}",
            found=f"sha256:{found}",
        )
    return "its digest, given on the command line"


def _check_signature(data: bytes, path: Path, trusted: list[VerifyingKey]) -> str:
    bundle = signature_path(path)
    if not bundle.exists():
        raise SecureTrainError(
            "ST-P02",
            "the policy is not signed",
            where=str(path),
            expected=f"a signature in {bundle.name}",
            found="none",
            next_step=f"secure-train policy sign {path} --key NAME, or pin it with --policy-sha256",
        )
    trust = Trust.of("policy", *trusted)
    try:
        verified = verify_statement(
            _read(bundle),
            trust,
            "policy",
            statement.POLICY,
            subject=hashlib.sha256(data).hexdigest(),
            where=str(bundle),
        )
    except SecureTrainError as error:
        if error.code == "ST-S02":
            raise SecureTrainError(
                "ST-P02",
                "the policy is signed by a key that this host does not trust for policies",
                where=str(bundle),
                expected=trust.describe("policy"),
                found=error.found,
                next_step="secure-train keys trust KEY.pub, after checking whose key it is",
            ) from None
        if error.code == "ST-S04":
            raise SecureTrainError(
                "ST-S04",
                "the policy was edited after it was signed",
                where=str(path),
                expected=error.found,
                found=error.expected,
                next_step=f"review the change, then: secure-train policy sign {path} --key NAME",
            ) from None
        raise
    return f"the key {verified.signer.name} ({verified.signer.identifier[:12]})"


def _time(text: str, path: Path) -> dt.datetime:
    try:
        value = dt.datetime.fromisoformat(text)
        if value.tzinfo is None:
            raise ValueError
    except ValueError:
        raise SecureTrainError(
            "ST-P03",
            "a date of the policy is none with a time zone",
            where=str(path),
            expected="2027-01-31T00:00:00Z",
            found=text,
        ) from None
    return value


def _read(path: Path) -> bytes:
    return tree.read_named(path, limit=MAX_POLICY, what="the policy or its signature")


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, data)
    except OSError as error:
        raise SecureTrainError(
            "ST-U04", f"the file cannot be written: {error.strerror}", where=str(path)
        ) from None
