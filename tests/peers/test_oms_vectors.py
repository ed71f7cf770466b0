"""The test vectors and schemas of the OpenSSF Model Signing specification, v1.0.

They are not ours to carry: OMS_SPEC names a checkout of model-signing-spec.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from supplychain.artifact import build_manifest, oms, parse_json
from supplychain.trust import bundle
from supplychain.trust.signers import CertificateSigner, LocalSigner
from tests.artifact.support import make_tree, refused
from tests.trust import authority
from tests.trust.support import key


@pytest.fixture(scope="module")
def spec() -> Path:
    place = os.environ.get("OMS_SPEC")
    if not place:
        pytest.skip("OMS_SPEC names no checkout of model-signing-spec")
    return Path(place)


@pytest.mark.parametrize("method", ["key", "certificate", "sigstore"])
def test_valid_vectors_are_read(spec: Path, method: str) -> None:
    path = spec / "test-vectors/v1.0/valid" / f"{method}.bundle.json"
    parsed = bundle.parse(path.read_bytes(), where=path.name)
    assert parsed.method == {"sigstore": "keyless"}.get(method, method)
    statement = parse_json(parsed.payload, what="the statement")
    assert set(oms.foreign_files(statement, where=path.name)) == {"signme-1", "signme-2"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("empty", "not JSON"),
        ("missing-envelope", "other fields"),
        ("missing-tlog-entries", "log entry"),
        ("missing-verification-material", "other fields"),
    ],
)
def test_invalid_vectors_are_refused(spec: Path, name: str, text: str) -> None:
    data = (spec / "test-vectors/v1.0/invalid" / f"{name}.bundle.json").read_bytes()
    with refused("ST-S03", text):
        bundle.parse(data, where=name)


def test_another_predicate_is_none_of_ours(spec: Path) -> None:
    data = (spec / "test-vectors/v1.0/invalid-payload/wrong-predicate.bundle.json").read_bytes()
    statement = parse_json(bundle.parse(data, where="it").payload, what="the statement")
    assert statement["predicateType"] != oms.PREDICATE_TYPE  # V5, whose tests are in tests/trust


def test_what_we_write_fits_the_schemas(spec: Path, tmp_path: Path) -> None:
    schemas = pytest.importorskip("jsonschema_rs")
    payload = oms.payload(tmp_path, "it", build_manifest(make_tree(tmp_path), "dataset"))
    leaf = authority.issue("leaf", san="a@acme.test", eku=authority.CODE)
    by = CertificateSigner(leaf.signing_key(), leaf.pem, where="it.crt")
    documents = {
        "statement": [json.loads(payload)],
        "predicate": [json.loads(payload)["predicate"]],
        "bundle": [json.loads(s.sign_payload(payload).data) for s in (LocalSigner(key("alice")), by)],
    }
    for name, values in documents.items():
        schema = json.loads((spec / "schemas/v1.0" / f"{name}.schema.json").read_bytes())
        others = {
            item["$id"]: item
            for path in (spec / "schemas/v1.0").iterdir()
            if "$id" in (item := json.loads(path.read_bytes()))
        }
        registry = schemas.Registry(list(others.items()))
        validator = schemas.validator_for(schema, registry=registry)
        for value in values:
            assert [str(error) for error in validator.iter_errors(value)] == []
