"""Bills of materials that wheels bring with them (PEP 770): what is compiled or copied into a package.

CycloneDX JSON documents are reduced to plain facts: name, version, purl, licence, hashes, producers, and the
edges between them. They are foreign bytes: bounded, and a document that cannot be read is a `problem`,
never an exception. Other formats are named and not merged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from sbom.inventory import clean
from sbom.licenses import expression

MAX_COMPONENTS = 20_000
MAX_DEPTH = 32
_HASH_LENGTHS = {"MD5": 32, "SHA-1": 40, "SHA-256": 64, "SHA-384": 96, "SHA-512": 128}
_TYPES = (
    "application", "framework", "library", "container", "platform", "operating-system", "device",
    "device-driver", "firmware", "file", "machine-learning-model", "data", "cryptographic-asset",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One embedded component; `ref` is its own name in the document it came from."""

    ref: str
    type: str
    name: str
    version: str
    purl: str
    licence: str
    hashes: tuple[tuple[str, str], ...] = ()
    producers: tuple[str, ...] = ()


@dataclass
class Embedded:
    """The parts of one document; `root` is the ref of what it describes."""

    file: str
    root: str = ""
    parts: list[Part] = field(default_factory=list)
    edges: dict[str, list[str]] = field(default_factory=dict)
    problem: str = ""


def read_embedded(file: str, data: bytes) -> Embedded:
    """The facts of one embedded document."""
    result = Embedded(file)
    try:
        document = json.loads(data)
        if not isinstance(document, dict) or document.get("bomFormat") != "CycloneDX":
            return Embedded(file, problem=f"{file} is not CycloneDX JSON and was not merged")
        described = document.get("metadata", {}).get("component")
        if isinstance(described, dict):
            result.root = str(described.get("bom-ref") or "")
            result.parts += _parts([described], 0)
        result.parts += _parts(document.get("components") or [], 0)
        for item in document.get("dependencies") or []:
            result.edges[str(item["ref"])] = [str(ref) for ref in item.get("dependsOn") or []]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return Embedded(file, problem=f"{file} cannot be read and was not merged")
    if len(result.parts) > MAX_COMPONENTS:
        return Embedded(file, problem=f"{file} has more than {MAX_COMPONENTS} components and was not merged")
    return result


def _parts(components: list[Any], depth: int) -> Iterator[Part]:
    if depth > MAX_DEPTH:
        raise ValueError("nested too deeply")
    for item in components:
        name, version = clean(str(item["name"]), 200), clean(str(item.get("version") or ""), 200)
        purl = str(item.get("purl") or "")
        kind = item.get("type")
        yield Part(
            str(item.get("bom-ref") or f"{name}@{version}"),
            kind if kind in _TYPES else "library",
            name,
            version,
            purl if re.fullmatch(r"pkg:[\x21-\x7e]{1,1000}", purl) else "",
            _licence(item.get("licenses") or []),
            tuple(sorted(_hashes(item.get("hashes") or []))),
            tuple(_producers(item)),
        )
        yield from _parts(item.get("components") or [], depth + 1)


def _licence(licenses: list[Any]) -> str:
    """One expression, if all that is said can be said as one."""
    found = []
    for item in licenses:
        said = item.get("expression") or (item.get("license") or {}).get("id") or ""
        found.append(expression(str(said)))
    if not found or not all(found):
        return ""
    return found[0] if len(found) == 1 else expression(" AND ".join(f"({one})" for one in sorted(set(found))))


def _hashes(hashes: list[Any]) -> Iterator[tuple[str, str]]:
    for item in hashes:
        kind, content = str(item.get("alg")), str(item.get("content"))
        if _HASH_LENGTHS.get(kind) == len(content) and re.fullmatch(r"[0-9a-f]+", content):
            yield kind, content


def _producers(item: dict[str, Any]) -> Iterator[str]:
    said = [item.get("author"), item.get("publisher"), (item.get("supplier") or {}).get("name")]
    said += [author.get("name") for author in item.get("authors") or []]
    yield from dict.fromkeys(clean(str(one), 200) for one in said if one)
