"""BOMs of models and datasets, and the card: what is known, what is named as unknown, what is escaped."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
from cyclonedx.model.bom import Bom
from cyclonedx.output.json import JsonV1Dot6

from sbom import score, validate
from sbom.card import model_card
from sbom.dataset import Dataset, Source, dataset_bom
from sbom.document import Document, dump, unknowns
from sbom.errors import SbomError
from sbom.model import Linked, Model, Run, model_bom
from sbom.xml import to_xml
from tests.sbom.support import TIME

DATA = Dataset(
    "web",
    "d" * 64,
    documents="10",
    tokens="1000",
    splits=[("train", "900"), ("validation", "100")],
    sources=[Source("corpus:a", "a" * 64, "10", "5000")],
    signers=["alice"],
    verified=True,
)
RUN = Run(
    "run-1",
    started="2026-11-30T10:00:00Z",
    finished="2026-11-30T11:00:00Z",
    status="completed",
    environment=Linked("python-environment", "e" * 64),
    environment_bom=Linked("urn:uuid:3e671687-395b-41f5-a30f-a58921a69b79", "f" * 64, "environment.cdx.json"),
    decision=Linked("decision", "b" * 64, "../statements/decision-0001.sigstore.json"),
    evidence=[Linked("decision", "b" * 64, "../statements/decision-0001.sigstore.json")],
    datasets=[DATA],
    hardware={"gpu": "none", "cuda": "none"},
)
MODEL = Model(
    "run-1",
    "step-00000200",
    "c" * 64,
    files=[("model/a.safetensors", "1" * 64, 100)],
    architecture={"flavor": "tiny", "layers": "2"},
    settings={"optimizer.learning_rate": "0.003"},
    parameters="12345",
    metrics=[("loss", "1.25", "validation split")],
    signers=["alice"],
    run=RUN,
    verified=True,
)


def bom(model: Model = MODEL, spec: str = "1.6") -> Document:
    return model_bom(model, time=TIME, tool_version="1", authors=["alice"], spec=spec)


@pytest.mark.parametrize("spec", ["1.6", "1.7"])
def test_models_and_datasets_are_valid_and_deterministic(spec: str) -> None:
    assert validate.validate(bom(spec=spec)) == []
    assert dump(bom(spec=spec)) == dump(bom(spec=spec))
    data = dataset_bom(DATA, time=TIME, tool_version="1", spec=spec)
    assert validate.validate(data) == []
    assert data["metadata"]["component"]["components"][0]["hashes"][0]["content"] == "a" * 64


def test_every_field_of_both_yardsticks_is_met_or_declared() -> None:
    for fields in (score.cisa(bom(), signed=True), score.g7(bom(), signed=True)):
        assert {field.state for field in fields} <= {score.MET, score.DECLARED}, fields


def test_what_nobody_recorded_is_named_and_not_invented() -> None:
    root = bom()["metadata"]["component"]
    assert {"energy", "use", "license", "producer"} <= unknowns(root)
    bare = bom(replace(MODEL, run=None, metrics=()))
    assert {"parents", "datasets", "sources"} <= unknowns(bare["metadata"]["component"])
    assert "formulation" not in bare
    assert "declarations" not in bare
    assert validate.validate(bare) == []


def test_parents_are_pedigree() -> None:
    found = bom(replace(MODEL, run=replace(RUN, parents=[Linked("base", "9" * 64)])))
    (parent,) = found["metadata"]["component"]["pedigree"]["ancestors"]
    assert (parent["type"], parent["hashes"][0]["content"]) == ("machine-learning-model", "9" * 64)
    assert validate.validate(found) == []


def test_the_library_would_lose_it_so_it_is_not_asked() -> None:
    """The reason for plain dictionaries; if this fails, the library has learnt it."""
    document = bom()
    again = json.loads(JsonV1Dot6(Bom.from_json(copy.deepcopy(document))).output_as_string())  # type: ignore[attr-defined]  # given by a decorator
    assert "formulation" not in again
    assert "declarations" not in again
    assert "modelCard" not in again["metadata"]["component"]
    with pytest.raises(SbomError) as caught:
        to_xml(document)
    assert caught.value.code == "ST-M04"


@pytest.mark.parametrize("part", ["claims", "datasets", "workflow"])
def test_references_of_the_overlay_are_checked_too(part: str) -> None:
    document = bom()
    if part == "claims":
        document["declarations"]["claims"][0]["target"] = "nobody"
    elif part == "datasets":
        document["metadata"]["component"]["modelCard"]["modelParameters"]["datasets"] = [{"ref": "nobody"}]
    else:
        document["formulation"][0]["workflows"][0]["outputs"][0]["resource"]["ref"] = "nobody"
    assert "B1" in {finding.rule for finding in validate.validate(document)}


def test_the_card_says_what_the_bom_says() -> None:
    text = model_card(bom())
    for fact in (
        "12345",
        "c" * 64,
        "d" * 64,
        "a" * 64,
        "1.25",
        "alice",
        "run-1",
        "none: trained from random weights",
    ):
        assert fact in text
    assert "energy that training took" in text.partition("## Not known")[2]
    assert "**Not verified**" in model_card(bom(replace(MODEL, verified=False)))


HOSTILE = "x\n\n# Approved by everybody\n| a | b |<script>alert(1)</script>`rm`\x1b[31m\u202e"


def test_foreign_text_stays_text() -> None:
    evil = replace(
        MODEL,
        name=HOSTILE,
        settings={HOSTILE: HOSTILE},
        metrics=[(HOSTILE, HOSTILE, HOSTILE)],
        signers=[HOSTILE],
        run=replace(
            RUN,
            id=HOSTILE,
            datasets=[replace(DATA, name=HOSTILE, sources=[Source(HOSTILE, "a" * 64, "1", "1")])],
        ),
    )
    document = bom(evil)
    assert validate.validate(document) == []
    lines = model_card(document).splitlines()
    assert not [line for line in lines if line.startswith("# Approved")]
    assert [line for line in lines if line.startswith("# ")] == [lines[lines.index("---", 1) + 2]]
    body = "\n".join(lines[lines.index("---", 1) + 1 :])
    assert "<script>" not in body
    assert not {"\x1b", "\u202e"} & set(model_card(document))
    assert not [line for line in lines[: lines.index("---", 1)] if line.startswith(("#", "|"))]
