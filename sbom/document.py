"""A bill of materials as bytes: canonical form, serial number from the content, and reading foreign ones.

The same facts give the same bytes: keys are sorted, lists have an order of their own, and the serial number
is a UUIDv5 of everything else but the time. The only time in it is the one that the caller gives.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import uuid
from collections.abc import Iterator
from typing import Any, NoReturn

from sbom.errors import SbomError

MAX_DOCUMENT = 256 << 20
MAX_DEPTH = 100
SPECS = ("1.6", "1.7")
NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "urn:secure-train:bom:v1")
PREFIX = "secure-train:"  # of the properties that this project defines
UNKNOWN = PREFIX + "unknown"

Document = dict[str, Any]


def finish(document: Document, spec: str, time: dt.datetime) -> Document:
    """`document` with its format, serial number and time."""
    content = {key: value for key, value in document.items() if key not in _FRAME}
    metadata = {**content.get("metadata", {}), "timestamp": utc(time)}
    return {
        "$schema": f"http://cyclonedx.org/schema/bom-{spec}.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": spec,
        "serialNumber": serial_of(document),
        "version": 1,
        **content,
        "metadata": metadata,
    }


_FRAME = ("$schema", "bomFormat", "specVersion", "serialNumber", "version")


def serial_of(document: Document) -> str:
    """The serial number that the content of `document` gives, whatever its time and version of the format."""
    content = {key: value for key, value in document.items() if key not in _FRAME}
    metadata = content.get("metadata", {})
    content["metadata"] = {key: value for key, value in metadata.items() if key != "timestamp"}
    return f"urn:uuid:{uuid.uuid5(NAMESPACE, hashlib.sha256(_compact(content).encode()).hexdigest())}"


def dump(document: Document) -> bytes:
    """The stored form: sorted keys, UTF-8, a final newline, and one line for each component, edge and other
    entry of a list, so that a line-by-line comparison of two documents shows what changed.
    """
    lines = []
    for key, value in sorted(document.items()):
        if isinstance(value, list):
            entries = ",\n  ".join(_compact(item) for item in value)
            lines.append(f" {json.dumps(key)}: [\n  {entries}\n ]" if value else f" {json.dumps(key)}: []")
        else:
            lines.append(f" {json.dumps(key)}: {_compact(value)}")
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(", ", ": "), sort_keys=True, allow_nan=False)


def load(data: bytes, *, where: str) -> Document:
    """Read a foreign BOM in JSON, strictly. ST-M01 if it is none."""

    def refuse(what: str) -> NoReturn:
        raise SbomError(
            "ST-M01", f"this is no bill of materials: {what}", where=where, expected="CycloneDX JSON"
        )

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in items}) != len(items):
            refuse("an object repeats a key")
        return dict(items)

    if len(data) > MAX_DOCUMENT:
        refuse(f"it is larger than {MAX_DOCUMENT} bytes")
    try:
        found = json.loads(
            data, object_pairs_hook=pairs, parse_constant=lambda name: refuse(f"it has {name}")
        )
    except (ValueError, RecursionError) as error:
        refuse(str(error)[:200])
    if not isinstance(found, dict) or found.get("bomFormat") != "CycloneDX":
        refuse("bomFormat is not CycloneDX")
    if _depth(found) > MAX_DEPTH:
        refuse(f"it is nested deeper than {MAX_DEPTH}")
    return found


def _depth(value: Any) -> int:
    deepest, waiting = 0, [(value, 1)]
    while waiting:
        item, depth = waiting.pop()
        deepest = max(deepest, depth)
        children = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
        waiting += [(child, depth + 1) for child in children]
    return deepest


def components(document: Document) -> Iterator[Document]:
    """Every component: the one described, the listed ones, and those nested in them. Not the tools."""
    root = document.get("metadata", {}).get("component")
    waiting = [*([root] if root else []), *document.get("components", [])]
    while waiting:
        item = waiting.pop(0)
        yield item
        waiting[:0] = item.get("components", [])


def properties(component: Document) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for item in component.get("properties", []):
        found.setdefault(str(item.get("name")), []).append(str(item.get("value", "")))
    return found


def unknowns(component: Document) -> set[str]:
    """The facts that a component says it does not know."""
    return {word for value in properties(component).get(UNKNOWN, []) for word in value.split(",")}


def utc(time: dt.datetime) -> str:
    return time.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
