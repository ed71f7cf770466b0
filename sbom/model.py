"""The bill of materials of a trained model: what it is, what it was made from, how, and who vouches for it.

An overlay of plain dictionaries that never passes through the library, which drops all of this silently: the
model card, the data, the run as a workflow (formulation), and the claims with their evidence (declarations).
Numbers are texts as they were recorded. What is not known is named: energy where nothing measured it, the
intended use, parents where there are none recorded.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from packageurl import PackageURL

from sbom import document
from sbom.dataset import Dataset, dataset_component
from sbom.document import PREFIX, Document
from sbom.environment import component, metadata
from sbom.inventory import clean

MODEL = "model"
LIMITS = (
    "Nothing but the metrics listed here is recorded as measured; behaviour and safety were not evaluated."
)


@dataclass(frozen=True)
class Linked:
    """Something that is referred to by digest: a file beside the BOM (`url` relative to it), or a thing."""

    name: str
    sha256: str
    url: str = ""


@dataclass(frozen=True)
class Run:
    """How a checkpoint came to be. Digests in hex; `evidence` are signed statements about the run."""

    id: str
    started: str = ""
    finished: str = ""
    status: str = ""
    policy: Linked | None = None
    plan: Linked | None = None
    code: Linked | None = None
    environment: Linked | None = None  # its manifest
    environment_bom: Linked | None = None  # the file; `name` is the serial number
    tokenizer: Linked | None = None
    decision: Linked | None = None
    evidence: Sequence[Linked] = ()
    datasets: Sequence[Dataset] = ()
    parents: Sequence[Linked] = ()
    hardware: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Model:
    """One checkpoint. `manifest` is its identity; `settings` are hyper-parameters, `architecture` the
    model's.
    """

    name: str
    version: str
    manifest: str
    files: Sequence[tuple[str, str, int]]  # path, sha256, bytes
    architecture: Mapping[str, str]
    settings: Mapping[str, str]
    parameters: str = ""
    metrics: Sequence[tuple[str, str, str]] = ()  # name, value, on what
    signers: Sequence[str] = ()
    tokens: str = ""
    run: Run | None = None
    verified: bool = False


def model_bom(
    model: Model, *, time: dt.datetime, tool_version: str, authors: Sequence[str] = (), spec: str = "1.6"
) -> Document:
    """The BOM of one checkpoint."""
    run = model.run or Run("unknown")
    data = [dataset_component(item, f"dataset-{number}") for number, item in enumerate(run.datasets, 1)]
    inputs = [*data, *_inputs(run)]
    refs = [item["bom-ref"] for item in inputs]
    content: Document = {
        "metadata": metadata(_root(model, run, data), "post-build", authors, tool_version),
        "components": inputs,
        "dependencies": [
            {"ref": MODEL, "dependsOn": refs} if refs else {"ref": MODEL},
            *({"ref": ref} for ref in refs),
        ],
        "compositions": [{"aggregate": "complete" if model.run else "unknown", "dependencies": [MODEL]}],
    }
    if model.run:
        content["formulation"] = [_formula(model, run, refs)]
    if run.decision:
        content["declarations"] = _declarations(run, run.decision)
    return document.finish(content, spec, time)


def _root(model: Model, run: Run, data: Sequence[Document]) -> Document:
    purl = PackageURL("generic", None, model.name, model.version, {"checksum": f"sha256:{model.manifest}"})
    files = [
        component(
            "file",
            f"file:{path}",
            path,
            sha256[:16],
            hashes=[("SHA-256", sha256)],
            properties=[("bytes", str(size))],
        )
        for path, sha256, size in model.files
    ]
    unknown = ["use", "energy", *([] if run.parents else ["parents"] if not model.run else [])]
    unknown += [] if run.datasets else ["datasets", "sources"]
    links = [_link("attestation", item) for item in run.evidence]
    return component(
        "machine-learning-model",
        MODEL,
        model.name,
        model.version,
        purl=purl.to_string(),
        hashes=[("SHA-256", model.manifest)],
        properties=[
            ("verified", "true" if model.verified else "false"),
            ("hash-of", "secure-train/manifest.json, which binds every file"),
            ("parameters", model.parameters),
            ("tokens-seen", model.tokens),
            ("parents", "none: trained from random weights" if model.run and not run.parents else ""),
            *(("signed-by", name) for name in model.signers),
        ],
        unknown=unknown,
        modelCard=_card(model, run, data),
        pedigree=_pedigree(run),
        externalReferences=links,
        components=files,
    )


def _card(model: Model, run: Run, data: Sequence[Document]) -> Document:
    flavor = model.architecture.get("flavor", "")
    measured = [
        {"type": name, "value": value, **({"slice": place} if place else {})}
        for name, value, place in model.metrics
    ]
    parameters: Document = {
        "approach": {"type": "self-supervised"},
        "task": "text-generation",
        "architectureFamily": "Llama",
        "modelArchitecture": f"Llama ({flavor})" if flavor else "Llama",
        "inputs": [{"format": "tokens"}],
        "outputs": [{"format": "tokens"}],
    }
    if data:
        parameters["datasets"] = [{"ref": item["bom-ref"]} for item in data]
    settings = [
        *((f"architecture:{key}", value) for key, value in sorted(model.architecture.items())),
        *((f"hyperparameter:{key}", value) for key, value in sorted(model.settings.items())),
    ]
    card: Document = {
        "modelParameters": parameters,
        "considerations": {"technicalLimitations": [LIMITS]},
        "properties": [{"name": PREFIX + name, "value": clean(value)} for name, value in settings],
    }
    if measured:
        card["quantitativeAnalysis"] = {"performanceMetrics": measured}
    return card


def _pedigree(run: Run) -> Document:
    """The checkpoints that this one goes on from."""
    return (
        {
            "ancestors": [
                component(
                    "machine-learning-model",
                    f"parent-{number}",
                    parent.name,
                    parent.sha256[:16],
                    hashes=[("SHA-256", parent.sha256)],
                    purl=PackageURL("generic", None, parent.name, parent.sha256[:16]).to_string(),
                )
                for number, parent in enumerate(run.parents, 1)
            ]
        }
        if run.parents
        else {}
    )


def _inputs(run: Run) -> list[Document]:
    """What the run used beside its data."""
    found: list[Document] = []
    named: Sequence[tuple[str, str, Linked | None, Document]] = (
        ("tokenizer", "data", run.tokenizer, {"data": [{"type": "configuration", "name": "tokenizer"}]}),
        ("environment", "application", run.environment, {"externalReferences": _environment_bom(run)}),
        ("code", "application", run.code, {}),
        ("policy", "data", run.policy, {"data": [{"type": "configuration", "name": "policy"}]}),
    )
    for ref, kind, item, more in named:
        if item is not None:
            version = item.sha256[:16]
            found.append(
                component(
                    kind,
                    ref,
                    item.name,
                    version,
                    hashes=[("SHA-256", item.sha256)],
                    purl=PackageURL("generic", None, item.name, version).to_string(),
                    unknown=["software"] if ref == "environment" and not run.environment_bom else [],
                    **more,
                )
            )
    if run.hardware:
        name = run.hardware.get("gpu", "none")
        found.append(
            component(
                "device",
                "hardware",
                name if name != "none" else "CPU",
                "",
                properties=sorted(run.hardware.items()),
                unknown=["hash"],
            )
        )
    return found


def _environment_bom(run: Run) -> list[Document]:
    if run.environment_bom is None:
        return []
    serial, item = run.environment_bom.name.removeprefix("urn:uuid:"), run.environment_bom
    hashes = [{"alg": "SHA-256", "content": item.sha256}]
    return [
        {"type": "bom", "url": f"urn:cdx:{serial}/1", "hashes": hashes},
        {"type": "bom", "url": item.url, "hashes": hashes},
    ]


def _link(kind: str, item: Linked) -> Document:
    return {
        "type": kind,
        "url": item.url or f"urn:sha256:{item.sha256}",
        "comment": item.name,
        "hashes": [{"alg": "SHA-256", "content": item.sha256}],
    }


def _formula(model: Model, run: Run, refs: Sequence[str]) -> Document:
    """The run as a workflow: every input, the parameters, and the checkpoint that came out."""
    parameters = [{"name": key, "value": clean(value)} for key, value in sorted(model.settings.items())]
    inputs: list[Document] = [{"resource": {"ref": ref}} for ref in refs if ref != "hardware"]
    if parameters:
        inputs.append({"parameters": parameters})
    workflow: Document = {
        "bom-ref": "workflow",
        "uid": run.id,
        "name": "secure-train run",
        "taskTypes": ["build"],
        "inputs": inputs,
        "outputs": [{"type": "artifact", "resource": {"ref": MODEL}}],
        "properties": [
            {"name": PREFIX + name, "value": value}
            for name, value in (
                ("status", run.status),
                ("plan:sha256", run.plan.sha256 if run.plan else ""),
            )
            if value
        ],
    }
    for name, moment in (("timeStart", run.started), ("timeEnd", run.finished)):
        if moment:
            workflow[name] = moment
    return {"bom-ref": "formula", "workflows": [workflow]}


def _declarations(run: Run, decision: Linked) -> Document:
    """What is claimed of the run, with the signed statement that says so."""
    evidence = {
        "bom-ref": "evidence-decision",
        "propertyName": "signed verification summary (VSA)",
        "description": decision.name,
        "data": [
            {"name": decision.name, "contents": {"url": decision.url or f"urn:sha256:{decision.sha256}"}}
        ],
    }
    claim = {
        "bom-ref": "claim-verified",
        "target": MODEL,
        "predicate": "Before training started, a policy's gate verified every input and allowed the run.",
        "evidence": ["evidence-decision"],
    }
    return {"claims": [claim], "evidence": [evidence]}
