"""Is a bill of materials valid, and does it agree with itself?

Two questions, in order: the official JSON schema of its version (bundled with cyclonedx-python-lib, checked
with jsonschema-rs), then what a schema cannot say:

B1  every reference is given once, and every reference that is used was given
B2  every component is reached from the root, by an edge or by being nested
B3  a purl is well-formed and agrees with name and version
B4  every hash has the length of its algorithm
B5  each package that the lock pins is there, with a hash that the lock allows
B6  a serial number that this program gave still fits the content
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from packageurl import PackageURL

from sbom.document import SPECS, Document, components, properties, serial_of
from sbom.errors import SbomError
from sbom.inventory import normalize

MAX_FINDINGS = 200
_LENGTHS = {
    "MD5": 32, "SHA-1": 40, "SHA-256": 64, "SHA-384": 96, "SHA-512": 128, "SHA3-256": 64, "SHA3-384": 96,
    "SHA3-512": 128, "BLAKE2b-256": 64, "BLAKE2b-384": 96, "BLAKE2b-512": 128,
}  # fmt: skip
_SHARED = ("spdx", "jsf-0.82", "cryptography-defs")


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong: the rule it breaks, where, and in words."""

    rule: str
    where: str
    what: str

    def as_dict(self) -> dict[str, str]:
        return {"rule": self.rule, "where": self.where, "what": self.what}


@dataclass(frozen=True)
class Pinned:
    """What a lock says of one package: its version and the sha256 of each file that is allowed."""

    version: str
    hashes: Sequence[str]


def validate(
    document: Document, lock: Mapping[str, Pinned] | None = None, *, as_written: bool = True
) -> list[Finding]:
    """Everything that is wrong; nothing else is asked of a document that its schema refuses. `as_written` is
    False for one that was translated from XML: its serial number is of another form.
    """
    found = list(check_schema(document))
    if not found:
        found = list(check_meaning(document, lock or {}))
        if as_written:
            found += _serial(document)
    return found[:MAX_FINDINGS]


def check_schema(document: Document) -> Iterator[Finding]:
    """Against the official schema of the version that the document states. ST-M01 for another version."""
    for error in _validator(str(document.get("specVersion"))).iter_errors(document):
        where = "/".join(str(step) for step in error.instance_path)
        yield Finding("schema", where or "document", str(error.message)[:300])


@functools.lru_cache
def _validator(spec: str) -> Any:
    import jsonschema_rs

    if spec not in SPECS:
        raise SbomError(
            "ST-M01", "the version of CycloneDX is not supported", expected=" or ".join(SPECS), found=spec
        )
    registry = jsonschema_rs.Registry(
        [(f"http://cyclonedx.org/schema/{name}.SNAPSHOT.schema.json", _schema(name)) for name in _SHARED],
        draft=jsonschema_rs.Draft7,
    )
    return jsonschema_rs.Draft7Validator(_schema(f"bom-{spec}"), registry=registry, validate_formats=True)


def _schema(name: str) -> Any:
    folder = resources.files("cyclonedx.schema") / "_res"  # the official files, under their official names
    return json.loads((folder / f"{name}.SNAPSHOT.schema.json").read_bytes())


def check_meaning(document: Document, lock: Mapping[str, Pinned]) -> Iterator[Finding]:
    """B1 to B5, of a document that its schema accepts."""
    everything = list(components(document))
    yield from _references(document)
    yield from _reached(document)
    for item in everything:
        where = str(item.get("bom-ref") or item["name"])
        if what := purl_problem(item.get("purl", ""), item["name"], item.get("version", "")):
            yield Finding("B3", where, what)
        for hashed in item.get("hashes", []):
            if len(hashed["content"]) != _LENGTHS.get(hashed["alg"], len(hashed["content"])):
                yield Finding("B4", where, f"the {hashed['alg']} hash has {len(hashed['content'])} digits")
    yield from _locked(everything, lock)


def _serial(document: Document) -> Iterator[Finding]:
    tools = document.get("metadata", {}).get("tools", {})
    names = [tool.get("name") for tool in tools.get("components", [])] if isinstance(tools, dict) else []
    if "secure-train" in names and document.get("serialNumber") != serial_of(document):
        yield Finding("B6", "serialNumber", "the document was changed after it got its serial number")


def _given(value: Any) -> Iterator[str]:
    """Every bom-ref in the document, wherever it stands."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            if isinstance(item.get("bom-ref"), str):
                yield item["bom-ref"]
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item


def _used(document: Document) -> Iterator[tuple[str, str]]:
    for item in document.get("dependencies", []):
        yield "dependencies", item["ref"]
        for ref in [*item.get("dependsOn", []), *item.get("provides", [])]:
            yield f"dependencies of {item['ref']}", ref
    for item in document.get("compositions", []):
        for part in ("assemblies", "dependencies"):
            for ref in item.get(part, []):
                yield "compositions", ref
    for claim in document.get("declarations", {}).get("claims", []):
        for ref in [claim.get("target"), *claim.get("evidence", [])]:
            if ref is not None:
                yield "claims", ref
    for formula in document.get("formulation", []):
        for flow in formula.get("workflows", []):
            for item in [*flow.get("inputs", []), *flow.get("outputs", [])]:
                if ref := item.get("resource", {}).get("ref"):
                    yield f"workflow {flow['uid']}", ref
    for item in components(document):
        for data in (item.get("modelCard") or {}).get("modelParameters", {}).get("datasets", []):
            if isinstance(data.get("ref"), str):
                yield f"datasets of {item['name']}", data["ref"]


def _references(document: Document) -> Iterator[Finding]:
    seen: set[str] = set()
    for ref in _given(document):
        if ref in seen:
            yield Finding("B1", ref, "two things have this reference")
        seen.add(ref)
    for where, ref in _used(document):
        if ref not in seen and not ref.startswith("urn:cdx:"):
            yield Finding("B1", where, f"nothing has the reference {ref!r}")


def _reached(document: Document) -> Iterator[Finding]:
    root = document.get("metadata", {}).get("component")
    if root is None:
        yield Finding("B2", "metadata", "there is no root component")
        return
    edges: dict[str, list[str]] = {}
    for item in document.get("dependencies", []):
        edges.setdefault(item["ref"], []).extend(item.get("dependsOn", []))
    for item in components(document):
        inside = [part["bom-ref"] for part in item.get("components", []) if "bom-ref" in part]
        edges.setdefault(item.get("bom-ref", ""), []).extend(inside)
    reached: set[str] = set()
    waiting = [root.get("bom-ref", "")]
    while waiting:
        ref = waiting.pop()
        if ref not in reached:
            reached.add(ref)
            waiting += edges.get(ref, [])
    for item in components(document):
        if item.get("bom-ref", "") not in reached:
            yield Finding("B2", str(item.get("bom-ref") or item["name"]), "it is not reached from the root")


def purl_problem(text: str, name: str, version: str) -> str:
    """Why a purl is not one of this name and version; empty if it is, or if there is none. A purl with a
    subpath names a part of a package, which may have a name of its own.
    """
    if not text:
        return ""
    try:
        purl = PackageURL.from_string(text)
    except ValueError:
        return f"the purl is malformed: {text[:200]}"
    same = normalize if purl.type == "pypi" else str.lower
    if not purl.subpath and same(name) not in (same(purl.name), same(f"{purl.namespace}/{purl.name}")):
        return f"the purl names {purl.name!r}, the component is {name!r}"
    if purl.version and version and purl.version != version:
        return f"the purl has version {purl.version}, the component has {version}"
    return ""


def _locked(everything: Sequence[Document], lock: Mapping[str, Pinned]) -> Iterator[Finding]:
    present: dict[str, list[Document]] = {}
    for item in everything:
        if str(item.get("purl", "")).startswith("pkg:pypi/"):
            present.setdefault(normalize(item["name"]), []).append(item)
    for name, pin in lock.items():
        same = [item for item in present.get(name, []) if item.get("version") == pin.version]
        if not same:
            yield Finding("B5", name, f"the lock pins {name}=={pin.version}, and it is not here")
        elif not any(hashed["content"] in pin.hashes for item in same for hashed in item.get("hashes", [])):
            stated = [value for item in same for value in properties(item).get("secure-train:locked", [])]
            if not set(stated) & set(pin.hashes):
                yield Finding("B5", name, "it does not have a hash that the lock allows")


def require_schema(document: Document, *, where: str) -> None:
    """ST-M02 if the schema refuses it."""
    found = list(check_schema(document))
    if found:
        raise SbomError(
            "ST-M02",
            f"the schema refuses the bill of materials: {found[0].what}",
            where=f"{where}: {found[0].where}",
            expected=f"CycloneDX {document.get('specVersion')}",
            next_step="secure-train sbom validate shows everything",
        )


def require_valid(document: Document, *, where: str) -> None:
    """What we write ourselves is valid, whatever was in the packages that it describes. ST-M02, ST-M03."""
    if found := validate(document):
        raise SbomError(
            "ST-M02" if found[0].rule == "schema" else "ST-M03",
            f"the document would not be valid: {found[0].what}",
            where=f"{where}: {found[0].where}",
            expected=f"rule {found[0].rule}",
            next_step="report it, with the package that it is about",
        )
