"""The XML form of an environment's BOM, written by cyclonedx-python-lib from the document.

The library loses what it has no model for (compositions, model cards, data); the one such part that an
environment's BOM has is written beside it, and a document with any other is refused instead of being cut.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any, cast
from xml.sax.saxutils import quoteattr

from sbom.document import Document, components
from sbom.errors import SbomError
from sbom.validate import Finding

_LOST = ("formulation", "declarations", "annotations", "definitions")  # in a round trip through the library
_PARTS = ("assemblies", "dependencies")
_LOST_PARTS = ("modelCard", "data")


def to_xml(document: Document) -> bytes:
    """`document` as XML. ST-M04 if it says something that would be lost."""
    from cyclonedx.model.bom import Bom
    from cyclonedx.output.xml import XmlV1Dot6, XmlV1Dot7

    lost = [name for name in _LOST if name in document]
    lost += [name for item in components(document) for name in _LOST_PARTS if name in item]
    if lost:
        raise SbomError(
            "ST-M04",
            f"the XML form would lose {lost[0]}",
            expected="the BOM of an environment",
            next_step="write it as JSON",
        )
    plain = copy.deepcopy(document)
    compositions = plain.pop("compositions", [])
    bom = cast(Any, Bom).from_json(plain)
    writer = {"1.6": XmlV1Dot6, "1.7": XmlV1Dot7}[document["specVersion"]](bom)
    text = str(writer.output_as_string(indent=1))
    head, closing, tail = text.rpartition("</bom>")
    return "".join([head.rstrip(), "\n", *_compositions(compositions), closing, tail.rstrip(), "\n"]).encode()


def _compositions(compositions: Sequence[Document]) -> list[str]:
    """They come last of what we write, as the schema wants it."""
    lines = [" <compositions>\n"] if compositions else []
    for item in compositions:
        lines += ["  <composition>\n", f"   <aggregate>{item['aggregate']}</aggregate>\n"]
        for part, leaf in (("assemblies", "assembly"), ("dependencies", "dependency")):
            if part in item:
                refs = [f"    <{leaf} ref={quoteattr(ref)}/>\n" for ref in item[part]]
                lines += [f"   <{part}>\n", *refs, f"   </{part}>\n"]
        lines.append("  </composition>\n")
    return [*lines, " </compositions>\n"] if lines else []


def from_xml(data: bytes, *, where: str) -> tuple[Document, list[Finding]]:
    """A foreign XML BOM as a document, and what its schema says of it. No entity is expanded. ST-M01 if it is
    none; ST-M08 where lxml, which knows XML schemas, is not installed.
    """

    stated = re.search(rb'xmlns="http://cyclonedx.org/schema/bom/(1\.[67])"', data[:4096])
    if not stated or b"<!DOCTYPE" in data or b"<!ENTITY" in data:
        raise SbomError(
            "ST-M01",
            "this is no bill of materials, or of another version",
            where=where,
            expected="CycloneDX 1.6 or 1.7 without a document type",
        )
    version = stated[1].decode()
    findings = _check(data, version, where)
    if findings:
        return {"specVersion": version}, findings
    from cyclonedx.model.bom import Bom
    from cyclonedx.output.json import JsonV1Dot6, JsonV1Dot7
    from defusedxml.ElementTree import fromstring  # type: ignore[import-untyped]  # it has no types

    tree = fromstring(data)
    bom = cast(Any, Bom).from_xml(tree)
    writer = {"1.6": JsonV1Dot6, "1.7": JsonV1Dot7}[version](bom)
    document: Document = json.loads(writer.output_as_string())
    space = f"{{http://cyclonedx.org/schema/bom/{version}}}"
    if found := [
        {
            "aggregate": item.findtext(f"{space}aggregate"),
            **{
                part: [one.get("ref") for one in place]
                for part in _PARTS
                for place in item.iter(space + part)
            },
        }
        for item in tree.iterfind(f"{space}compositions/{space}composition")
    ]:
        document["compositions"] = found
    return document, []


def _check(data: bytes, version: str, where: str) -> list[Finding]:
    """Against the official XML schema."""
    try:
        from lxml import etree  # type: ignore[import-untyped]  # it has no types
    except ModuleNotFoundError:
        raise SbomError(
            "ST-M08",
            "an XML document cannot be checked against its schema here",
            where=where,
            expected="lxml, which the extra `xml` brings",
            next_step="install secure-train[xml], or write the document as JSON",
        ) from None
    folder = resources.files("cyclonedx.schema") / "_res"
    with resources.as_file(folder) as place:
        schema = etree.XMLSchema(etree.parse(str(place / f"bom-{version}.SNAPSHOT.xsd")))
    try:
        tree = etree.fromstring(
            data, etree.XMLParser(resolve_entities=False, no_network=True, huge_tree=True)
        )
    except etree.XMLSyntaxError as error:
        raise SbomError("ST-M01", f"this is no XML: {error}"[:300], where=where) from None
    schema.validate(tree)
    return [Finding("schema", f"line {entry.line}", entry.message[:300]) for entry in schema.error_log]
