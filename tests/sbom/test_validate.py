"""A known-good document, changed one field at a time: the schema or a rule of ours must see it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sbom import document as documents
from sbom import score, validate
from sbom.diff import diff
from sbom.errors import SbomError
from sbom.validate import Pinned
from tests.sbom.support import TIME, bom, install


@pytest.fixture
def good(tmp_path: Path) -> dict[str, Any]:
    install(tmp_path, "a", headers=["Requires-Dist: b"])
    install(tmp_path, "b")
    document = bom(tmp_path)
    assert validate.validate(document) == []
    return document


Change = Callable[[dict[str, Any]], object]
BROKEN: dict[str, tuple[str, Change]] = {
    "a reference to nothing": ("B1", lambda d: d["dependencies"][1].update(dependsOn=["nobody"])),
    "a composition of nothing": ("B1", lambda d: d["compositions"].append(
        {"aggregate": "complete", "assemblies": ["nobody"]})),
    "one reference for two": ("B1", lambda d: d["components"][0].update({"bom-ref": "b@1.0"})),
    "an island": ("B2", lambda d: d["components"].append(
        {"type": "library", "bom-ref": "x", "name": "x", "version": "1"})),
    "no root": ("B2", lambda d: d["metadata"].pop("component")),
    "a purl of another name": ("B3", lambda d: d["components"][0].update(purl="pkg:pypi/other@1.0")),
    "a purl of another version": ("B3", lambda d: d["components"][0].update(purl="pkg:pypi/a@2.0")),
    "no purl at all": ("B3", lambda d: d["components"][0].update(purl="nonsense")),
    "a short hash": ("B4", lambda d: d["components"][0].update(
        hashes=[{"alg": "SHA-256", "content": "a" * 32}])),
    "another content": ("B6", lambda d: d["components"][0].update(description="something else")),
    "an unknown field": ("schema", lambda d: d["components"][0].update(flavour="sweet")),
    "an unknown type": ("schema", lambda d: d["components"][0].update(type="thing")),
    "a hash with letters": ("schema", lambda d: d["components"][0].update(
        hashes=[{"alg": "SHA-256", "content": "z" * 64}])),
    "no name": ("schema", lambda d: d["components"][0].pop("name")),
    "a time that is none": ("schema", lambda d: d["metadata"].update(timestamp="yesterday")),
    "a serial number that is none": ("schema", lambda d: d.update(serialNumber="1")),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_every_change_is_found(good: dict[str, Any], case: str) -> None:
    rule, change = BROKEN[case]
    change(good)
    assert rule in {finding.rule for finding in validate.validate(good)}


def test_the_lock_must_be_there_whole(good: dict[str, Any]) -> None:
    good["components"][0]["hashes"] = [{"alg": "SHA-256", "content": "a" * 64}]
    good["serialNumber"] = documents.serial_of(good)
    fine = {"a": Pinned("1.0", ["a" * 64])}
    assert validate.validate(good, fine) == []
    for wrong in (
        {"a": Pinned("1.1", ["a" * 64])},
        {"a": Pinned("1.0", ["b" * 64])},
        {"c": Pinned("1", ["a" * 64])},
    ):
        assert [finding.rule for finding in validate.validate(good, wrong)] == ["B5"]


NO_DOCUMENTS = [
    b"",
    b"null",
    b"{}",
    b"\xff\xfe",
    b"[" * 200_000,
    b'{"bomFormat":"SPDX"}',
    b'{"bomFormat":"CycloneDX","bomFormat":"CycloneDX"}',
    b'{"bomFormat":"CycloneDX","version":NaN}',
    b'{"bomFormat":"CycloneDX","x":' + b"[" * 150 + b"]" * 150 + b"}",
]


@pytest.mark.parametrize("data", NO_DOCUMENTS)
def test_what_is_no_document_is_refused(data: bytes) -> None:
    with pytest.raises(SbomError) as caught:
        documents.load(data, where="test")
    assert caught.value.code == "ST-M01"


def test_an_unsupported_version_is_refused(good: dict[str, Any]) -> None:
    good["specVersion"] = "1.3"
    with pytest.raises(SbomError) as caught:
        validate.validate(good)
    assert caught.value.code == "ST-M01"


# --- diff ---------------------------------------------------------------------------------------------------


def test_the_same_has_no_differences(good: dict[str, Any]) -> None:
    assert diff(good, copy.deepcopy(good)) == []


def test_other_bytes_under_one_version_are_an_alarm(good: dict[str, Any]) -> None:
    good["components"][0]["hashes"] = [{"alg": "SHA-256", "content": "a" * 64}]
    other = copy.deepcopy(good)
    other["components"][0]["hashes"][0]["content"] = "b" * 64
    (change,) = diff(good, other)
    assert (change.kind, change.component, change.alarm) == ("hash", "pkg:pypi/a@1.0", True)
    del other["components"][0]["hashes"]
    (change,) = diff(good, other)
    assert (change.kind, change.after, change.alarm) == ("hash", "unknown", True)


def test_what_comes_goes_and_changes_is_told(good: dict[str, Any], tmp_path: Path) -> None:
    install(tmp_path / "new", "a", "2.0", headers=["License-Expression: MIT", "Requires-Dist: c"])
    install(tmp_path / "new", "c", "1.0")
    found = {(change.kind, change.component) for change in diff(good, bom(tmp_path / "new"))}
    assert {
        ("version", "pkg:pypi/a"),
        ("removed", "pkg:pypi/b"),
        ("added", "pkg:pypi/c"),
        ("edges", "pkg:pypi/a"),
    } <= found
    assert not any(change.alarm for change in diff(good, bom(tmp_path / "new")))


# --- score --------------------------------------------------------------------------------------------------


def test_ours_meets_or_declares_all_seventeen(good: dict[str, Any]) -> None:
    fields = score.cisa(good, signed=True)
    assert len(fields) == 17
    assert {field.state for field in fields} <= {score.MET, score.DECLARED}
    states = {field.name: field.state for field in fields}
    assert states["SBOM author"] == score.DECLARED
    assert states["component hash value"] == score.DECLARED
    assert states["component name"] == score.MET


def test_silence_is_not_declared(good: dict[str, Any]) -> None:
    bare = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "components": [{"type": "library", "name": "a"}, {"type": "library", "name": "b", "version": "1"}],
    }
    assert validate.validate(json.loads(json.dumps(bare)))[0].rule == "B2"
    states = {field.name: field.state for field in score.cisa(bare)}
    assert states["component hash value"] == score.MISSING
    assert states["component version"] == score.PARTIAL
    assert states["SBOM author"] == score.MISSING
    assert states["component dependency relationship"] == score.MISSING


def test_the_time_is_the_only_thing_that_changes_with_time(good: dict[str, Any]) -> None:
    later = documents.finish(good, "1.6", TIME.replace(year=2027))
    assert later["serialNumber"] == good["serialNumber"]
    assert later["metadata"]["timestamp"] == "2027-11-30T12:00:00Z"
