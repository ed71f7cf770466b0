"""`secure-train sbom`: from verified environments only, deterministic, with the promised exit codes."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from sbom.document import components
from supplychain.artifact import canonical_json
from supplychain.cli import invoke
from supplychain.environment.build import build_environment
from tests.environment.wheelhouse import make_lock, make_wheel, sha256
from tests.sbom.support import install

EPOCH = "1764500000"


@pytest.fixture(autouse=True)
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", EPOCH)
    monkeypatch.setenv("SECURE_TRAIN_CONFIG", str(tmp_path / "config"))


@pytest.fixture
def house(tmp_path: Path) -> tuple[Path, Path]:
    """A wheelhouse and its lock."""
    wheels = [
        make_wheel(tmp_path / "house", "alpha", scripts={"hello": "alpha:main"}),
        make_wheel(tmp_path / "house", "beta", files={"beta/lib/libb.so.1": b"\x7fELF"}),
    ]
    return tmp_path / "house", make_lock(tmp_path / "lock", wheels)


def build(house: tuple[Path, Path], store: Path) -> Path:
    return build_environment(house[1], store, wheelhouse=house[0], profile="cpu")


def run(*arguments: str | Path) -> int:
    return invoke([str(argument) for argument in arguments], as_json="--json" in arguments)


def answer(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = run(*arguments, "--json")
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, document


def failure(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    capsys.readouterr()
    code = run(*arguments)
    return code, capsys.readouterr().err.partition("[")[2].partition("]")[0]


def everything(file: Path) -> list[dict[str, Any]]:
    return list(components(json.loads(file.read_bytes())))


def test_environments_built_in_two_folders_have_one_bom(
    house: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = build(house, tmp_path / "one"), build(house, tmp_path / "another" / "deeper")
    assert run("sbom", "environment", "--env", first, "--lock", house[1], "-o", tmp_path / "1.json") == 0
    assert run("sbom", "environment", "--env", second, "-o", tmp_path / "2.json") == 0
    data = (tmp_path / "1.json").read_bytes()
    assert data == (tmp_path / "2.json").read_bytes()
    assert str(tmp_path).encode() not in data
    assert run("sbom", "validate", tmp_path / "1.json", "--lock", house[1]) == 0
    document = json.loads(data)
    alpha = next(item for item in document["components"] if item["name"] == "alpha")
    assert alpha["hashes"] == [{"alg": "SHA-256", "content": sha256(house[0] / "alpha-1.0-py3-none-any.whl")}]
    assert document["metadata"]["timestamp"] == "2025-11-30T10:53:20Z"
    assert {"name": "secure-train:verified", "value": "true"} in document["metadata"]["component"][
        "properties"
    ]


def test_a_changed_environment_has_no_bom(
    house: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = build(house, tmp_path / "store")
    (module,) = root.glob("lib/*/site-packages/alpha/__init__.py")
    module.chmod(0o644)
    module.write_text("evil")
    out = tmp_path / "out.json"
    assert failure(capsys, "sbom", "environment", "--env", root, "-o", out) == (3, "ST-E03")
    assert not out.exists()
    assert run("sbom", "environment", "--env", root, "-o", out, "--unverified") == 0
    said = [item for part in everything(out) for item in part.get("properties", [])]
    assert {item["value"] for item in said if item["name"] == "secure-train:verified"} == {"false"}


def test_with_a_manifest_that_was_just_verified_each_byte_read_is_compared(
    house: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = build(house, tmp_path / "store")
    digest = sha256(root / "secure-train" / "manifest.json")
    arguments = ("sbom", "environment", "--env", root, "--manifest")
    assert run(*arguments, digest, "-o", tmp_path / "out.json") == 0
    assert failure(capsys, *arguments, "0" * 64) == (3, "ST-A01")
    (metadata,) = root.glob("lib/*/site-packages/alpha-1.0.dist-info/METADATA")
    metadata.chmod(0o644)
    metadata.write_bytes(metadata.read_bytes().replace(b"1.0", b"1.1"))
    assert failure(capsys, *arguments, digest) == (3, "ST-A03")


def test_another_lock_is_refused(
    house: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = build(house, tmp_path / "store")
    other = make_lock(tmp_path / "other", [house[0] / "alpha-1.0-py3-none-any.whl"])
    assert failure(capsys, "sbom", "environment", "--env", root, "--lock", other) == (3, "ST-E02")


def test_a_lock_alone_can_be_described(house: tuple[Path, Path], tmp_path: Path) -> None:
    assert run("sbom", "environment", "--lock", house[1], "-o", tmp_path / "lock.json") == 0
    assert run("sbom", "validate", tmp_path / "lock.json", "--lock", house[1]) == 0


@pytest.mark.parametrize(("form", "spec"), [("json", "1.6"), ("json", "1.7"), ("xml", "1.6"), ("xml", "1.7")])
def test_every_form_is_valid(house: tuple[Path, Path], tmp_path: Path, form: str, spec: str) -> None:
    root, out = build(house, tmp_path / "store"), tmp_path / f"out.{form}"
    assert run("sbom", "environment", "--env", root, "-o", out, "--format", form, "--spec", spec) == 0
    first = out.read_bytes()
    assert run("sbom", "validate", out) == 0
    assert run("sbom", "environment", "--env", root, "-o", out, "--format", form, "--spec", spec) == 0
    assert out.read_bytes() == first


def test_a_signed_bom_meets_or_declares_all_seventeen_fields(
    house: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("keys", "new", "owner") == 0
    root, out = build(house, tmp_path / "store"), tmp_path / "out.json"
    assert run("sbom", "environment", "--env", root, "--sign") == 2
    assert run("sbom", "environment", "--env", root, "-o", out, "--sign") == 0
    code, document = answer(capsys, "sbom", "score", out, "--require")
    assert (code, document["good"], len(document["fields"])) == (0, 17, 17)
    states = {field["name"]: field["state"] for field in document["fields"]}
    assert states["SBOM author"] == states["SBOM author signature"] == "met"
    bundle = json.loads((tmp_path / "out.json.sigstore.json").read_bytes())
    payload = base64.b64decode(bundle["dsseEnvelope"]["payload"])
    statement = json.loads(payload)
    assert statement["predicateType"] == "https://cyclonedx.org/bom"
    assert statement["subject"][0]["digest"]["sha256"] == sha256(root / "secure-train" / "manifest.json")
    assert statement["predicate"] == json.loads(out.read_bytes())
    assert canonical_json(statement) == payload
    out.write_bytes(out.read_bytes().replace(b"python-environment", b"other-environment"))
    assert answer(capsys, "sbom", "score", out, "--require")[0] == 4


def test_what_was_not_verified_is_not_attested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("keys", "new", "owner") == 0
    install(tmp_path / "env", "alpha")
    arguments = ("sbom", "environment", "--env", tmp_path / "env", "--unverified", "--sign")
    assert failure(capsys, *arguments, "-o", tmp_path / "out.json") == (5, "ST-M08")


def test_exit_codes_of_validate_and_diff(
    house: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = tmp_path / "good.json"
    assert run("sbom", "environment", "--env", build(house, tmp_path / "store"), "-o", good) == 0
    text = good.read_text()
    broken, lying, changed, none = (tmp_path / name for name in ("broken", "lying", "changed", "none"))
    broken.write_text(text.replace('"library"', '"thing"'))
    lying.write_text(text.replace("pkg:pypi/alpha@1.0", "pkg:pypi/alphb@1.0"))
    changed.write_text(text.replace(sha256(house[0] / "alpha-1.0-py3-none-any.whl"), "0" * 64))
    none.write_text("<html>")
    assert failure(capsys, "sbom", "validate", broken) == (2, "ST-M02")
    assert failure(capsys, "sbom", "validate", lying) == (3, "ST-M03")
    assert failure(capsys, "sbom", "validate", changed, "--lock", house[1]) == (3, "ST-M03")
    assert failure(capsys, "sbom", "validate", none) == (2, "ST-M01")
    assert failure(capsys, "sbom", "validate", tmp_path / "absent") == (2, "ST-U01")
    assert failure(capsys, "sbom", "diff", good, changed) == (4, "ST-M05")
    code, document = answer(capsys, "sbom", "diff", good, good)
    assert (code, document["changes"]) == (0, [])


def test_bad_settings_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path / "env", "alpha")
    assert failure(capsys, "sbom", "environment", "--env", tmp_path, "--unverified") == (5, "ST-E05")
    assert failure(capsys, "sbom", "environment", "--env", tmp_path / "env") == (5, "ST-E05")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "yesterday")
    arguments = ("sbom", "environment", "--env", tmp_path / "env", "--unverified")
    assert failure(capsys, *arguments) == (2, "ST-U03")


def test_xml_with_a_document_type_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bomb = '<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b "bb">]><bom xmlns="http://cyclonedx.org/schema/bom/1.6"/>'
    (tmp_path / "bomb.xml").write_text(bomb)
    assert failure(capsys, "sbom", "validate", tmp_path / "bomb.xml") == (2, "ST-M01")
    (tmp_path / "cut.xml").write_text('<bom xmlns="http://cyclonedx.org/schema/bom/1.6"><a>')
    assert failure(capsys, "sbom", "validate", tmp_path / "cut.xml") == (2, "ST-M01")
