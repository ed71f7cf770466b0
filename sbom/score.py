"""How complete is a bill of materials? Two public yardsticks, field by field.

- CISA, "Minimum Elements for a Software Bill of Materials" of 2026: 17 fields
- G7, "SBOM for AI: minimum elements" of 2026: seven clusters

A field is `met`, `declared` (what is not known is named as unknown: explicit, which both documents ask for),
`partial` (some components have it, and others say nothing) or `missing`. Unknown is never counted as met.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sbom.document import PREFIX, Document, components, properties, unknowns

MET, DECLARED, PARTIAL, MISSING = "met", "declared", "partial", "missing"
YARDSTICKS = ("cisa-2026", "g7-ai")


@dataclass(frozen=True)
class Field:
    """One field of a yardstick, how it stands, and the count behind that."""

    name: str
    state: str
    note: str = ""

    def as_dict(self) -> dict[str, str]:
        return dict(self.__dict__)


def cisa(document: Document, *, signed: bool = False) -> list[Field]:
    """The 17 fields. `signed` tells that a signature over exactly this document was found beside it."""
    metadata = document.get("metadata", {})
    tools = _tools(metadata)
    said = unknowns(metadata)
    parts = list(components(document))
    author = bool(metadata.get("authors") or metadata.get("manufacturer") or metadata.get("supplier"))
    return [
        Field("SBOM author", MET if author else DECLARED if "author" in said else MISSING),
        Field("SBOM author signature", _one(signed or bool(document.get("signature")))),
        Field("SBOM data format name", _one(document.get("bomFormat"))),
        Field("SBOM data format version", _one(document.get("specVersion"))),
        Field("SBOM version", _one(document.get("serialNumber") and document.get("version"))),
        Field("SBOM timestamp", _one(metadata.get("timestamp"))),
        Field("SBOM tool name", _one(tools and all(tool.get("name") for tool in tools))),
        Field("SBOM tool version", _one(tools and all(tool.get("version") for tool in tools))),
        Field("SBOM generation context", _one(metadata.get("lifecycles"))),
        _each("component producer", parts, "producer", _producer),
        _each("component name", parts, "name", lambda item: bool(item.get("name"))),
        _each("component version", parts, "version", lambda item: bool(item.get("version"))),
        _each("component identifiers", parts, "identifier", _identifier),
        _each("component hash value", parts, "hash", lambda item: bool(item.get("hashes"))),
        _each("component hash algorithm", parts, "hash", lambda item: all(h.get("alg") for h in
        item["hashes"]) if item.get("hashes") else False), _each("component license", parts, "license",
        _spdx), _relationships(document, parts), ]  # fmt: skip


def _one(value: Any) -> str:
    return MET if value else MISSING


def _tools(metadata: Document) -> list[Document]:
    tools = metadata.get("tools", [])
    return tools if isinstance(tools, list) else [*tools.get("components", []), *tools.get("services", [])]


def _each(name: str, parts: Iterable[Document], word: str, test: Callable[[Document], bool]) -> Field:
    """A field that every component must have; the note counts."""
    known = declared = silent = 0
    for item in parts:
        if test(item):
            known += 1
        elif word in unknowns(item):
            declared += 1
        else:
            silent += 1
    total = known + declared + silent
    note = f"{known} of {total}" + (f", {declared} declared unknown" if declared else "")
    if not silent:
        return Field(name, DECLARED if declared else MET, note)
    return Field(name, PARTIAL if known or declared else MISSING, note)


def _producer(item: Document) -> bool:
    return any(item.get(key) for key in ("authors", "manufacturer", "supplier", "publisher", "author"))


def _identifier(item: Document) -> bool:
    return any(item.get(key) for key in ("purl", "cpe", "swid", "omniborId", "swhid"))


def _spdx(item: Document) -> bool:
    """A licence that a machine can read: an expression or an SPDX identifier. A name alone is none."""
    return any(one.get("expression") or one.get("license", {}).get("id") for one in item.get("licenses", []))


def _relationships(document: Document, parts: list[Document]) -> Field:
    """Edges from a root, and a word on how complete they are."""
    stated = {item.get("ref") for item in document.get("dependencies", [])}
    root = document.get("metadata", {}).get("component")
    top = [item for item in document.get("components", []) if item.get("bom-ref") in stated]
    whole = len(top) == len(document.get("components", []))
    aggregated = bool(document.get("compositions"))
    note = f"{len(top)} of {len(document.get('components', []))} components"
    if not stated:
        return Field("component dependency relationship", MISSING)
    if root and root.get("bom-ref") in stated and whole and aggregated:
        return Field("component dependency relationship", MET, note)
    missing = [word for word, there in (("root", root), ("completeness", aggregated)) if not there]
    without = ", ".join(missing) or "all"
    return Field("component dependency relationship", PARTIAL, f"{note}; without {without}")


def g7(document: Document, *, signed: bool = False) -> list[Field]:
    """The seven clusters for AI: elements that only a BOM with a model can meet."""
    parts = list(components(document))
    models = [item for item in parts if item.get("type") == "machine-learning-model"]
    data = [item for item in parts if item.get("type") == "data"]
    cards = [item.get("modelCard", {}) for item in models]
    metadata = document.get("metadata", {})
    said = {word for item in [metadata, *parts] for word in unknowns(item)}

    def element(name: str, word: str, there: object) -> Field:
        return Field(name, MET if there else DECLARED if word in said else MISSING)

    return [
        element("metadata: author, tool, time", "author", metadata.get("authors")),
        element("system: how it was made", "formulation", document.get("formulation")),
        element(
            "models: identity and digest", "model", models and all(item.get("hashes") for item in models)
        ),
        element("models: architecture", "architecture", _parameters(cards, "modelArchitecture")),
        element("models: parents", "parents", any(_parents(item) for item in models)),
        element("models: licence", "license", models and all(_spdx(item) for item in models)),
        element("models: intended use and limits", "use", any(card.get("considerations") for card in cards)),
        element("data: identity and digest", "datasets", data and all(item.get("hashes") for item in data)),
        element("data: licence", "license", data and all(_spdx(item) for item in data)),
        element("data: sources", "sources", data and all(item.get("data") for item in data)),
        element("performance: metrics", "metrics", any(card.get("quantitativeAnalysis") for card in cards)),
        element("infrastructure: software", "software", _links(document, "bom")),
        element("infrastructure: hardware", "hardware", any(item.get("type") == "device" for item in parts)),
        element("infrastructure: energy", "energy", any(_energy(card) for card in cards)),
        element("security: attestations", "attestations", document.get("declarations")),
        Field("security: signature", _one(signed)),
    ]


def _parents(item: Document) -> bool:
    """Parents, or the word that there are none."""
    return bool(item.get("pedigree", {}).get("ancestors") or properties(item).get(PREFIX + "parents"))


def _parameters(cards: Iterable[Document], name: str) -> bool:
    return any(card.get("modelParameters", {}).get(name) for card in cards)


def _energy(card: Document) -> bool:
    considerations = card.get("considerations", {})
    return bool(considerations.get("environmentalConsiderations", {}).get("energyConsumptions"))


def _links(document: Document, kind: str) -> bool:
    pattern = re.compile(r"^urn:cdx:")
    return any(
        link.get("type") == kind and pattern.match(str(link.get("url")))
        for item in components(document)
        for link in item.get("externalReferences", [])
    )
