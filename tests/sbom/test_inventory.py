"""What is installed, also where its metadata is broken or hostile."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbom import validate
from sbom.environment import Setting, environment_bom
from sbom.inventory import Installed, clean, parse_metadata
from sbom.licenses import licence_of
from supplychain import boms
from tests.sbom.support import SITE, TIME, bom, component, install, inventory


def test_nothing_of_the_environment_is_executed(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    install(tmp_path / "env", "evil", files={"evil.py": f"open({str(marker)!r}, 'w')".encode()})
    (tmp_path / "env" / SITE / "evil.pth").write_text(f"import os; os.mkdir({str(marker)!r})\n")
    bom(tmp_path / "env")
    assert not marker.exists()
    assert "evil" not in sys.modules


@pytest.mark.parametrize("name", ["Friendly-Bard", "friendly.bard", "FRIENDLY_BARD", "friendly--._bard"])
def test_every_spelling_of_a_name_is_one_package(tmp_path: Path, name: str) -> None:
    install(tmp_path, name)
    install(tmp_path, "user", headers=["Requires-Dist: FrIeNdLy.-_.bArD>=1"])
    document = bom(tmp_path)
    assert component(document, name)["purl"] == "pkg:pypi/friendly-bard@1.0"
    assert {"ref": "user@1.0", "dependsOn": ["friendly-bard@1.0"]} in document["dependencies"]
    assert validate.validate(document) == []


def test_a_distribution_without_metadata_is_listed_with_its_facts_unknown(tmp_path: Path) -> None:
    (install(tmp_path, "bare", "2.1") / "METADATA").unlink()
    found = component(bom(tmp_path), "bare")
    assert (found["version"], found["bom-ref"]) == ("2.1", "bare@2.1")
    said = {item["name"]: item["value"] for item in found["properties"]}
    assert said["secure-train:unknown"] == "hash,license,producer"
    assert said["secure-train:problem"] == "it has no METADATA"


def test_two_of_one_name_are_both_listed_and_marked(tmp_path: Path) -> None:
    install(tmp_path, "twice", "1.0")
    install(tmp_path, "twice", "2.0")
    install(tmp_path, "twice", "2.0", info="Twice-2.0.dist-info")
    document = bom(tmp_path)
    refs = [item["bom-ref"] for item in document["components"] if item["name"] == "twice"]
    assert sorted(refs) == ["twice@1.0", "twice@2.0", "twice@2.0~2"]
    assert str(document).count("secure-train:duplicate") == 3
    assert validate.validate(document) == []


def test_metadata_that_is_not_utf8_is_read_and_said(tmp_path: Path) -> None:
    text = "Name: latin\nVersion: 1\nAuthor: J\xf6rg M\xfcller\n\n".encode("latin-1")
    install(tmp_path, "latin", "1", metadata=text)
    found = component(bom(tmp_path), "latin")
    assert found["authors"] == [{"name": "Jörg Müller"}]
    assert "its METADATA is not UTF-8" in str(found["properties"])


def test_a_licence_of_a_hundred_kilobytes_is_no_expression(tmp_path: Path) -> None:
    text = "License: Free for all\n" + "        and so on and so on\n" * 4000
    install(tmp_path, "long", metadata=b"Name: long\nVersion: 1.0\n" + text.encode() + b"\nText\n")
    document = bom(tmp_path)
    assert component(document, "long")["licenses"] == [
        {"license": {"name": "Free for all", "acknowledgement": "declared"}}
    ]
    assert len(str(document)) < 10_000


@pytest.mark.parametrize(
    ("headers", "expected", "source"),
    [
        (["License-Expression: mit or apache-2.0"], "MIT OR Apache-2.0", "License-Expression"),
        (["License: BSD-3-Clause"], "BSD-3-Clause", "License"),
        (["License: Apache 2.0"], "Apache-2.0", "License"),
        (["Classifier: License :: OSI Approved :: MIT License"], "MIT", "Classifier"),
        (["Classifier: License :: OSI Approved :: BSD License"], "", "Classifier"),
        (["License-Expression: made-up-9.9"], "", ""),
        (
            [
                "Classifier: License :: OSI Approved :: MIT License",
                "Classifier: License :: OSI Approved :: ISC License (ISCL)",
            ],
            "",
            "Classifier",
        ),
        ([], "", ""),
    ],
)
def test_the_licence_is_what_is_declared_or_unknown(headers: list[str], expected: str, source: str) -> None:
    fields = parse_metadata("\n".join(headers).encode(), [])
    found = licence_of(Installed("x", "1", "x-1.dist-info", fields))
    assert (found.expression, found.source) == (expected, source)


def test_an_editable_install_has_no_hash_of_what_is_used(tmp_path: Path) -> None:
    folder = install(tmp_path, "mine")
    (folder / "direct_url.json").write_text(
        '{"url": "file:///home/somebody/mine", "dir_info": {"editable": true}}'
    )
    document = bom(tmp_path)
    found = component(document, "mine")
    assert "hashes" not in found
    assert "hash" in str(found["properties"])
    assert "somebody" not in str(document)
    assert {"aggregate": "incomplete", "assemblies": ["mine@1.0"]} in document["compositions"]


@pytest.mark.parametrize(
    "data",
    [
        b"[1]",
        b"{",
        b'{"dir_info": []}',
        b"\xff",
        b"[" * 100_000,
        b'{"archive_info": {"hashes": {"sha256": "x"}}}',
    ],
)
def test_a_broken_direct_url_is_no_obstacle(tmp_path: Path, data: bytes) -> None:
    (install(tmp_path, "odd") / "direct_url.json").write_bytes(data)
    assert validate.validate(bom(tmp_path)) == []


def test_links_and_pipes_in_place_of_metadata_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("Name: secret\nVersion: 9\n")
    (install(tmp_path / "env", "linked") / "METADATA").unlink()
    (tmp_path / "env" / SITE / "linked-1.0.dist-info" / "METADATA").symlink_to(tmp_path / "secret")
    folder = install(tmp_path / "env", "piped")
    (folder / "METADATA").unlink()
    os.mkfifo(folder / "METADATA")
    assert [item.name for item in inventory(tmp_path / "env")] == ["linked", "piped"]


def test_an_environment_whose_lib_is_a_link_is_not_empty(tmp_path: Path) -> None:
    install(tmp_path / "real", "alpha")
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / "lib").symlink_to(tmp_path / "real" / "lib")
    found = boms.unverified_inventory(tmp_path / "env")
    assert [item.name for item in found.installed] == ["alpha"]


def test_old_egg_info_is_listed_too(tmp_path: Path) -> None:
    site = tmp_path / SITE
    (site / "old-1.2.egg-info").mkdir(parents=True)
    (site / "old-1.2.egg-info" / "PKG-INFO").write_text("Name: old\nVersion: 1.2\n")
    (site / "older-0.1-py3.11.egg-info").write_text("Name: older\nVersion: 0.1\n")
    assert [(item.name, item.version) for item in inventory(tmp_path)] == [("old", "1.2"), ("older", "0.1")]


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=400))
def test_any_metadata_gives_a_valid_document(data: bytes) -> None:
    problems: list[str] = []
    fields = parse_metadata(b"Name: any\nVersion: 1\n" + data, problems)
    item = Installed("any", clean("1"), "any-1.dist-info", fields, problems=tuple(problems))
    document = environment_bom([item], Setting(python="3.11.7"), time=TIME, tool_version="1")
    assert validate.validate(document) == []


@pytest.mark.slow
def test_thousands_of_packages_take_seconds(tmp_path: Path) -> None:
    for number in range(3000):
        install(tmp_path, f"package{number}", headers=[f"Requires-Dist: package{(number * 7 + 1) % 3000}"])
    document = bom(tmp_path)
    assert len(document["components"]) == 3001
    assert validate.validate(document) == []
