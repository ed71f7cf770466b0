"""The bill of materials of an environment: complete, nested, the same bytes twice and in every folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
from cyclonedx.model.bom import Bom
from cyclonedx.output.json import JsonV1Dot6

from sbom import validate
from sbom.document import dump, unknowns
from sbom.environment import Setting, Wheel
from sbom.xml import from_xml, to_xml
from tests.sbom.support import SITE, bom, component, install

EMBEDDED = {
    "bomFormat": "CycloneDX",
    "specVersion": "1.5",
    "metadata": {"component": {"type": "library", "bom-ref": "me", "name": "crate", "version": "0.1"}},
    "components": [
        {
            "type": "library",
            "bom-ref": "serde",
            "name": "serde",
            "version": "1.0.2",
            "purl": "pkg:cargo/serde@1.0.2",
            "licenses": [{"expression": "MIT OR Apache-2.0"}],
            "hashes": [{"alg": "SHA-256", "content": "a" * 64}],
            "author": "The Serde people",
        },
        {"type": "library", "bom-ref": "liar", "name": "good", "version": "1", "purl": "pkg:cargo/bad@1"},
    ],
    "dependencies": [{"ref": "me", "dependsOn": ["serde", "liar"]}, {"ref": "serde"}],
}


@pytest.fixture
def rich(tmp_path: Path) -> Path:
    """An environment with an embedded document, native libraries, and a package of every kind."""
    root = tmp_path / "env"
    install(
        root,
        "Rich",
        "2.0+cpu",
        headers=["License-Expression: MIT", "Author-email: A Person <a@example.org>", "Requires-Dist: poor",
                 "Project-URL: Source, https://example.org/source"],
        files={"rich/lib/libgomp-a34b3233.so.1.0.0": b"\x7fELF 1", "rich/_c.cpython-311.so": b"\x7fELF 2"},
    )  # fmt: skip
    sboms = root / SITE / "Rich-2.0+cpu.dist-info" / "sboms"
    sboms.mkdir()
    (sboms / "rich.cdx.json").write_text(json.dumps(EMBEDDED))
    install(root, "poor", headers=["License: Something of our own"])
    return root


def test_it_is_valid_under_both_versions_and_forms(rich: Path) -> None:
    for spec in ("1.6", "1.7"):
        document = bom(rich, spec=spec)
        assert validate.validate(document) == []
        again, schema = from_xml(to_xml(document), where="test")
        assert schema == []
        assert {item["bom-ref"] for item in again["components"]} == {
            item["bom-ref"] for item in document["components"]
        }


def test_the_library_reads_the_same_out_of_it(rich: Path) -> None:
    """cyclonedx-python-lib as an oracle: what it reads and writes again is the document, but for what it
    has no model of, the spelling of the time, and empty edges that it adds where nothing is known.
    """
    document = bom(rich)
    library = cast(Any, Bom).from_json(json.loads(json.dumps(document)))
    again = json.loads(JsonV1Dot6(library).output_as_string())
    del document["compositions"]
    for side in (document, again):
        side["metadata"]["timestamp"] = side["metadata"]["timestamp"].replace("+00:00", "Z")
        side["dependencies"] = [item for item in side["dependencies"] if item.get("dependsOn")]
    assert _sorted(again) == _sorted(document)


def _sorted(value: object) -> object:
    if isinstance(value, dict):
        return {key: _sorted(item) for key, item in value.items() if key not in ("$schema",)}
    if isinstance(value, list):
        return sorted((_sorted(item) for item in value), key=lambda item: json.dumps(item, sort_keys=True))
    return value


def test_the_same_bytes_twice_and_in_another_folder(rich: Path, tmp_path: Path) -> None:
    shutil.copytree(rich, tmp_path / "elsewhere" / "deep")
    first, second = bom(rich), bom(tmp_path / "elsewhere" / "deep")
    assert dump(first) == dump(second)
    assert to_xml(first) == to_xml(second)
    assert str(tmp_path) not in dump(first).decode()


def test_the_serial_number_follows_the_content(rich: Path) -> None:
    before = bom(rich)
    assert bom(rich, spec="1.7")["serialNumber"] == before["serialNumber"]
    install(rich, "another")
    assert bom(rich)["serialNumber"] != before["serialNumber"]


def test_embedded_documents_are_merged_with_their_edges(rich: Path) -> None:
    document = bom(rich)
    parts = {part["name"]: part for part in component(document, "Rich")["components"]}
    assert parts["serde"]["purl"] == "pkg:cargo/serde@1.0.2"
    assert parts["serde"]["licenses"] == [{"expression": "MIT OR Apache-2.0", "acknowledgement": "declared"}]
    assert unknowns(parts["serde"]) == set()
    edges = {item["ref"]: item.get("dependsOn", []) for item in document["dependencies"]}
    assert edges["rich@2.0+cpu#crate@0.1"] == ["rich@2.0+cpu#good@1", "rich@2.0+cpu#serde@1.0.2"]
    assert "rich@2.0+cpu#crate@0.1" in edges["rich@2.0+cpu"]


def test_a_purl_of_something_else_is_not_taken_over(rich: Path) -> None:
    parts = {part["name"]: part for part in component(bom(rich), "Rich")["components"]}
    assert "purl" not in parts["good"]
    assert "identifier" in unknowns(parts["good"])


UNREADABLE = [
    b"",
    b"{}",
    b"[]",
    b"[" * 99_999,
    b'{"bomFormat":"CycloneDX","components":[1]}',
    b'{"bomFormat":"CycloneDX","components":"x"}',
    b'{"spdxVersion":"SPDX-2.3"}',
]


@pytest.mark.parametrize("data", UNREADABLE)
def test_an_embedded_document_that_cannot_be_read_is_said(rich: Path, data: bytes) -> None:
    (rich / SITE / "Rich-2.0+cpu.dist-info" / "sboms" / "rich.cdx.json").write_bytes(data)
    document = bom(rich)
    found = component(document, "Rich")
    assert "was not merged" in str(found["properties"])
    assert {"aggregate": "incomplete", "assemblies": ["rich@2.0+cpu"]} in document["compositions"]
    assert validate.validate(document) == []


def test_native_libraries_are_nested_with_evidence(rich: Path) -> None:
    parts = {part["name"]: part for part in component(bom(rich), "Rich")["components"]}
    library = parts["libgomp"]
    path = f"{SITE}/rich/lib/libgomp-a34b3233.so.1.0.0"
    assert library["evidence"]["occurrences"] == [{"location": path}]
    assert library["evidence"]["identity"][0]["methods"][0]["technique"] == "filename"
    assert len(library["hashes"][0]["content"]) == 64
    assert unknowns(library) == {"license", "producer", "version"}
    assert not [name for name in parts if "_c" in name]


def test_hash_licence_producer_and_version_are_there_or_unknown(rich: Path) -> None:
    wheels = {"Rich-2.0+cpu.dist-info": Wheel("b" * 64, "Rich-2.0+cpu-py3-none-any.whl")}
    document = bom(rich, Setting(verified="true", wheels=wheels, python="3.11.7"))
    known, unknown = component(document, "Rich"), component(document, "poor")
    assert known["hashes"] == [{"alg": "SHA-256", "content": "b" * 64}]
    assert known["purl"] == "pkg:pypi/rich@2.0%2Bcpu"
    assert known["authors"] == [{"name": "A Person", "email": "a@example.org"}]
    assert known["externalReferences"] == [{"type": "vcs", "url": "https://example.org/source"}]
    assert unknowns(known) == set()
    assert unknowns(unknown) == {"hash", "license", "producer"}
    assert {"name": "secure-train:verified", "value": "true"} in known["properties"]
    assert {"name": "secure-train:public-version", "value": "2.0"} in known["properties"]
