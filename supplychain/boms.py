"""Joins verification and bills of materials: what `sbom` describes was compared with a signed manifest first.

`sbom` knows nothing of gates, so this module hands it the verified bytes and facts, and turns its errors into
ours. Nothing here decides anything.
"""

from __future__ import annotations

import datetime as dt
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from sbom.allowed import Exemption, Lists
from sbom.document import Document, dump, load
from sbom.environment import Setting, Wheel
from sbom.errors import SbomError
from sbom.inventory import Installed, read_inventory
from sbom.tree import DiskTree
from sbom.validate import Finding, Pinned, require_schema, require_valid
from supplychain import statement
from supplychain.artifact import VerifiedArtifact, parse_json, write_durably
from supplychain.environment.lock import Lock, parse_lock
from supplychain.environment.verify import ENVIRONMENT, MAX_DOCUMENT, parse_environment
from supplychain.errors import SecureTrainError

if TYPE_CHECKING:  # verifying and signing bring in cryptography, which most verbs here do without
    from supplychain.policy import LicenceRule
    from supplychain.trust.bundle import Bundle
    from supplychain.trust.signers import Signer

MAX_BOM = 256 << 20


@contextmanager
def our_errors() -> Iterator[None]:
    """Errors of `sbom` as errors of the command."""
    try:
        yield
    except SbomError as error:
        raise SecureTrainError(
            error.code,
            error.what,
            where=error.where,
            expected=error.expected,
            found=error.found,
            next_step=error.next_step,
        ) from None


class VerifiedTree:
    """The files of an artifact; every byte read is compared with its manifest (`sbom.tree.Tree`)."""

    def __init__(self, artifact: VerifiedArtifact) -> None:
        self._artifact = artifact
        self._entries = {entry.path: entry for entry in artifact.manifest.files}

    def paths(self) -> list[str]:
        return sorted(self._entries)

    def read(self, path: str) -> bytes:
        return self._artifact.read_bytes(path)

    def sha256(self, path: str) -> str:
        return self._entries[path].sha256


@dataclass(frozen=True)
class Inventory:
    """What is installed in an environment, and what surrounds it."""

    installed: list[Installed]
    setting: Setting


def verified_inventory(prefix: Path, manifest: str, *, every_file: bool) -> Inventory:
    """Of an environment whose manifest has this digest. `every_file` tells that `verify_environment` found
    nothing; without it only what is read here is compared. ST-A.. for a byte that differs.
    """
    artifact = VerifiedArtifact.open(prefix, manifest)
    data = artifact.read_bytes(ENVIRONMENT, limit=MAX_DOCUMENT)
    said = parse_environment(data, where=str(prefix / ENVIRONMENT))
    wheels = said["distributions"]
    setting = Setting(
        verified="true" if every_file else "read",
        wheels={item["info"]: Wheel(item["sha256"], item["wheel"], item["files"]) for item in wheels},
        markers=said["markers"],
        lock=said["lock"],
        profile=said["profile"],
        python=said["python"]["version"],
        platform=said["python"]["platform"],
        python_sha256=str(said["python"].get("sha256", "")),
    )
    return Inventory(read_inventory(VerifiedTree(artifact), said["site"]), setting)


def unverified_inventory(prefix: Path) -> Inventory:
    """Of any virtual environment, as it lies there; the result says that nothing was verified. ST-E05 if it
    is none.
    """
    sites = sorted(prefix.glob("lib/python3.*/site-packages"))
    try:
        lines = (prefix / "pyvenv.cfg").read_text("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    if len(sites) != 1:
        raise SecureTrainError(
            "ST-E05",
            "there is no virtual environment here",
            where=str(prefix),
            expected="one folder lib/python3.*/site-packages",
            found=f"{len(sites)}",
        )
    stated = {key.strip(): value.strip() for key, _, value in (line.partition("=") for line in lines)}
    series = sites[0].parent.name.removeprefix("python")
    python = stated.get("version") or stated.get("version_info") or series
    python = ".".join(python.split(".")[:3])
    markers = {"python_version": series, "python_full_version": python}
    site = sites[0].resolve()  # `lib` may be a link
    root = site.parents[2]
    below = site.relative_to(root).as_posix()
    inventory = read_inventory(DiskTree(root, below), below)
    return Inventory(inventory, Setting(markers=markers, python=python))


def locked_inventory(lock: Lock) -> Inventory:
    """What a lock pins for this interpreter, without an environment: versions and hashes, and nothing else.
    """
    from packaging.markers import default_environment

    pins = lock.applicable({name: str(value) for name, value in default_environment().items()})
    installed = [Installed(pin.name, pin.version, pin.name) for pin in pins]
    wheels = {
        pin.name: Wheel(pin.hashes[0]) if len(pin.hashes) == 1 else Wheel("", allowed=pin.hashes)
        for pin in pins
    }
    return Inventory(installed, Setting(verified="lock", wheels=wheels, lock=lock.digest, phase="pre-build"))


def with_lock(inventory: Inventory, lock: Lock) -> Inventory:
    """The same, with the names that the lock pins for its interpreter and that are not installed."""
    present = {(item.key, item.version) for item in inventory.installed}
    pins = sorted(pinned(lock, inventory.setting).items())
    missing = [f"{name}=={pin.version}" for name, pin in pins if (name, pin.version) not in present]
    return Inventory(inventory.installed, replace(inventory.setting, missing=missing))


def read_lock(path: Path) -> Lock:
    """The lock in a file. ST-U01, ST-E01."""
    try:
        return parse_lock(path.read_bytes(), where=str(path))
    except OSError as error:
        raise SecureTrainError(
            "ST-U01", f"the file cannot be read: {error.strerror}", where=str(path)
        ) from None


def pinned(lock: Lock, setting: Setting | None = None) -> dict[str, Pinned]:
    """The lock as `sbom.validate` reads it, for the interpreter of `setting`, else for this one."""
    from packaging.markers import default_environment

    markers = {name: str(value) for name, value in default_environment().items()}
    markers |= setting.markers if setting else {}
    return {pin.name: Pinned(pin.version, pin.hashes) for pin in lock.applicable(markers)}


def tool_version() -> str:
    """Our own version, for the tools of a BOM."""
    try:
        return metadata.version("secure-train")
    except metadata.PackageNotFoundError:
        return "not installed"


def now() -> dt.datetime:
    """SOURCE_DATE_EPOCH where it is set, so that the same inputs give the same bytes; else the time."""
    said = os.environ.get("SOURCE_DATE_EPOCH")
    if said is None:
        return dt.datetime.now(dt.UTC).replace(microsecond=0)
    try:
        return dt.datetime.fromtimestamp(int(said), dt.UTC)
    except (ValueError, OverflowError, OSError):
        raise SecureTrainError(
            "ST-U03", "SOURCE_DATE_EPOCH is no number of seconds", expected="seconds since 1970", found=said
        ) from None


def write(document: Document, form: str, output: Path | None) -> bytes:
    """The stored form of a BOM (json or xml), written under its name if it has one, and only if it is
    valid.
    """
    require_valid(document, where=str(output or "document"))
    if form == "xml":
        from sbom.xml import to_xml

        data = to_xml(document)
    else:
        data = dump(document)
    if output is not None:
        write_file(output, data)
    return data


def write_file(path: Path, data: bytes) -> None:
    """Under its name only when it is whole. ST-U04."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, data)
    except OSError as error:
        raise SecureTrainError(
            "ST-U04", f"the file cannot be written: {error.strerror}", where=str(path)
        ) from None


def read(path: Path) -> tuple[Document, list[Finding], bool]:
    """A BOM from a file in JSON or XML, what the XML schema says of the latter, and whether the document is
    as it was written. ST-M01, ST-M08.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BOM + 1)
    except OSError as error:
        raise SecureTrainError(
            "ST-U01", f"the file cannot be read: {error.strerror}", where=str(path)
        ) from None
    if data.lstrip()[:1] == b"<":
        from sbom.xml import from_xml

        return *from_xml(data, where=str(path)), False
    return load(data, where=str(path)), [], True


def read_valid(path: Path) -> Document:
    """A BOM that its schema accepts; ST-M02 otherwise."""
    document, schema, _ = read(path)
    if not schema:
        require_schema(document, where=str(path))
        return document
    raise SecureTrainError("ST-M02", schema[0].what, where=f"{path}: {schema[0].where}")


def licence_lists(rule: LicenceRule, where: str) -> Lists:
    """The lists of a policy. ST-P03 for an exception whose day does not exist."""
    try:
        exemptions = [
            Exemption(item.component, item.reason, dt.date.fromisoformat(item.until))
            for item in rule.exceptions
        ]
    except ValueError as error:
        raise SecureTrainError(
            "ST-P03", f"an exception of [licenses] has no end: {error}", where=where
        ) from None
    return Lists(rule.allow, rule.deny, rule.review, exemptions, rule.unknown)


def attestation(output: Path) -> Path:
    return output.with_name(output.name + ".sigstore.json")


def attest(document: Document, subject: str, signer: Signer, output: Path) -> Bundle:
    """Sign the BOM as a statement about the manifest `subject`, beside the file that holds it."""
    name = str(document["metadata"]["component"]["name"])
    signed = signer.sign_payload(statement.bom([statement.Subject(name, subject)], document))
    write_durably(attestation(output), signed.data)
    return signed


def is_attested(path: Path, document: Document) -> bool:
    """Whether a well-formed attestation beside the file has exactly this document in it. Whose it is, and
    whether the signature is right, `secure-train verify` decides under a policy.
    """
    from supplychain.trust import bundle

    try:
        data = attestation(path).read_bytes()
        said = parse_json(bundle.parse(data, where=str(path)).payload, what="the attestation", limit=MAX_BOM)
    except (OSError, SecureTrainError):
        return False
    right = isinstance(said, dict) and said.get("predicateType") == statement.BOM
    return right and said.get("predicate") == document
