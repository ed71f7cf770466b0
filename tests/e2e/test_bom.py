"""What a run leaves to be read: the bills of materials of its environment and model, bound to its
provenance.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from sbom import score, validate
from sbom.document import load
from tests.e2e.site import Site
from tests.e2e.test_main_job import payload

pytestmark = pytest.mark.e2e


def test_a_run_leaves_valid_boms_that_its_provenance_refers_to(finished: Path) -> None:
    result = json.loads((finished / "result.json").read_bytes())
    assert result["bom_problem"] is None
    assert set(result["bom"]) == {"bom/environment.cdx.json", "bom/model.cdx.json", "bom/README.md"}
    provenance = payload(finished / "statements" / "provenance.sigstore.json")
    byproducts = provenance["predicate"]["runDetails"]["byproducts"]
    listed = {item["name"]: item["digest"]["sha256"] for item in byproducts}
    assert result["bom"].items() <= listed.items()
    for name in ("environment", "model"):
        file = finished / "bom" / f"{name}.cdx.json"
        document = load(file.read_bytes(), where=str(file))
        assert validate.validate(document) == []
        attested = payload(finished / "bom" / f"{name}.cdx.json.sigstore.json")
        assert attested["predicateType"] == "https://cyclonedx.org/bom"
        assert attested["predicate"] == document
        fields = score.cisa(document, signed=True)
        assert {field.state for field in fields} <= {score.MET, score.DECLARED}


def test_the_model_bom_says_what_it_was_made_from(finished: Path) -> None:
    document = json.loads((finished / "bom" / "model.cdx.json").read_bytes())
    model = document["metadata"]["component"]
    subject = payload(finished / "statements" / "provenance.sigstore.json")["subject"][0]
    assert model["hashes"][0]["content"] == subject["digest"]["sha256"]
    plan = json.loads((finished / "plan.json").read_bytes())
    parts = {item["bom-ref"]: item for item in document["components"]}
    assert parts["dataset-1"]["hashes"][0]["content"] == plan["inputs"]["datasets"][0]["manifest"]
    assert parts["environment"]["hashes"][0]["content"] == plan["environment"]["manifest"]
    environment = json.loads((finished / "bom" / "environment.cdx.json").read_bytes())
    serial = environment["serialNumber"].removeprefix("urn:uuid:")
    assert parts["environment"]["externalReferences"][0]["url"] == f"urn:cdx:{serial}/1"
    assert model["modelCard"]["modelParameters"]["datasets"] == [{"ref": "dataset-1"}]
    assert model["modelCard"]["quantitativeAnalysis"]["performanceMetrics"]
    fields = {field.name: field.state for field in score.g7(document, signed=True)}
    assert set(fields.values()) <= {score.MET, score.DECLARED}
    assert fields["infrastructure: energy"] == score.DECLARED
    card = (finished / "bom" / "README.md").read_text()
    assert card.startswith("---\nlicense:")
    assert "Not verified" not in card
    assert plan["inputs"]["datasets"][0]["manifest"] in card


def test_verify_sees_a_changed_bom(site: Site, finished: Path, tmp_path: Path) -> None:
    assert "bills of materials: README.md, environment.cdx.json, model.cdx.json" in site.ok(
        "verify", finished
    )
    copy = tmp_path / finished.name
    shutil.copytree(finished, copy)
    file = copy / "bom" / "model.cdx.json"
    file.write_bytes(file.read_bytes().replace(b"Llama", b"Lhama"))
    code, document = site.json("verify", copy)
    assert code == 3
    assert "ST-R06" in json.dumps(document)
    done = site.run("sbom", "model", copy)
    assert done.returncode == 3


def test_a_model_can_be_described_later_from_what_verifies(
    site: Site, finished: Path, tmp_path: Path
) -> None:
    out = tmp_path / "model.json"
    site.ok("sbom", "model", finished, "-o", out, "--card", tmp_path / "card.md", "--sign")
    site.ok("sbom", "validate", out)
    later, left = json.loads(out.read_bytes()), json.loads((finished / "bom" / "model.cdx.json").read_bytes())
    assert later["metadata"]["component"]["hashes"] == left["metadata"]["component"]["hashes"]
    assert later["components"] == left["components"]
    site.ok("sbom", "dataset", site.data, "-o", tmp_path / "data.json", "--sign")
    site.ok("sbom", "validate", tmp_path / "data.json")
    code, document = site.json("sbom", "score", tmp_path / "data.json")
    assert (code, document["good"]) == (0, 17)
