"""The facts of a run, a checkpoint or a dataset for its bill of materials, and the two that every run leaves.

Facts come from bytes that were compared with a signed manifest or stand in the plan that the gate decided on.
RUN/bom/environment.cdx.json and RUN/bom/model.cdx.json lie beside the checkpoints, each signed as an
attestation; the run's provenance refers to them by digest.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sbom.card import model_card
from sbom.dataset import Dataset, Source
from sbom.document import Document
from sbom.environment import environment_bom
from sbom.model import Linked, Model, Run, model_bom
from supplychain import boms, chain
from supplychain.artifact import VerifiedArtifact, parse_json, read_manifest, write_durably
from supplychain.errors import SecureTrainError
from supplychain.plan import FILE as PLAN
from supplychain.plan import Input, Plan

if TYPE_CHECKING:
    from supplychain.chain import Link
    from supplychain.lineage import Checker
    from supplychain.trust.signers import Signer

FOLDER = "bom"
ENVIRONMENT = f"{FOLDER}/environment.cdx.json"
MODEL = f"{FOLDER}/model.cdx.json"
CARD = f"{FOLDER}/README.md"
_SECTIONS = ("train", "optimizer", "precision", "parallel", "data")


@dataclass(frozen=True)
class Written:
    """The BOMs of a run: name in the run's folder and sha256. `problem` says why there is none."""

    files: tuple[tuple[str, str], ...] = ()
    problem: str = ""


def leave(
    run: Path, plan: Plan, last: Link, signer: Signer, *, started: str, finished: str, status: str
) -> Written:
    """Write, and sign, the BOMs of the checkpoint `last`. Never raises: a run is not worth less for want of
    its description, so a failure is a `problem` that the caller records.
    """
    try:
        return Written(tuple(_leave(run, plan, last, signer, started, finished, status)))
    except (SecureTrainError, OSError) as error:
        return Written(problem=" ".join(str(error).split()))
    except Exception as error:  # a fault of ours must not cost a training either
        return Written(problem=f"internal error: {type(error).__name__}: {error}")


def _leave(
    run: Path, plan: Plan, last: Link, signer: Signer, started: str, finished: str, status: str
) -> Iterator[tuple[str, str]]:
    with boms.our_errors():
        (run / FOLDER).mkdir(exist_ok=True)
        time, version = boms.now(), boms.tool_version()
        authors = (signer.public.name,)
        manifest = plan.environment["manifest"]
        inventory = boms.verified_inventory(Path(plan.environment["prefix"]), manifest, every_file=True)
        setting = replace(inventory.setting, authors=authors)
        described = environment_bom(inventory.installed, setting, time=time, tool_version=version)
        yield ENVIRONMENT, _store(run / ENVIRONMENT, described, manifest, signer)
        model = model_facts(
            run / chain.CHECKPOINTS / last.name,
            last.manifest,
            plan=plan,
            run=run,
            started=started,
            finished=finished,
            status=status,
            signers=authors,
        )
        document = model_bom(model, time=time, tool_version=version, authors=authors)
        yield MODEL, _store(run / MODEL, document, last.manifest, signer)
        card = model_card(document).encode()
        write_durably(run / CARD, card)
        yield CARD, hashlib.sha256(card).hexdigest()


def _store(path: Path, document: Document, subject: str, signer: Signer) -> str:
    data = boms.write(document, "json", path)
    boms.attest(document, subject, signer, path)
    return hashlib.sha256(data).hexdigest()


def model_facts(
    checkpoint: Path,
    manifest: str,
    *,
    plan: Plan | None = None,
    run: Path | None = None,
    started: str = "",
    finished: str = "",
    status: str = "",
    signers: Sequence[str] = (),
    verified: bool = True,
) -> Model:
    """What a checkpoint says of itself, and, with its run, what it was made from."""
    artifact = VerifiedArtifact.open(checkpoint, manifest)
    state, config = _json(artifact, "state.json"), _json(artifact, "config.json")
    files = [(entry.path, entry.sha256, entry.size) for entry in artifact.manifest.files]
    settings = {
        f"{section}.{key}": _plain(value)
        for section in _SECTIONS
        for key, value in sorted(config.get(section, {}).items())
    }
    settings["seed"] = _plain(config.get("seed", ""))
    return Model(
        name=plan.run_id if plan else checkpoint.resolve().name,
        version=checkpoint.resolve().name,
        manifest=manifest,
        files=files,
        architecture={key: _plain(value) for key, value in config.get("model", {}).items()},
        settings=settings,
        parameters=_parameters(artifact),
        metrics=_metrics(run, state),
        signers=signers,
        tokens=_plain(state.get("tokens", "")),
        run=_run(plan, run, checkpoint.name, state, started, finished, status) if plan and run else None,
        verified=verified,
    )


def _run(
    plan: Plan, run: Path, name: str, state: Mapping[str, Any], started: str, finished: str, status: str
) -> Run:
    document, environment = plan.document, plan.environment
    step = name.removeprefix("step-")
    statements = run / chain.STATEMENTS
    decision = chain.decision_path(run, plan.segment)
    evidence = [
        ("verification summary of the gate", decision),
        ("checkpoint, linked to its predecessors", statements / f"checkpoint-{step}.sigstore.json"),
    ]
    tokenizers = [item for item in plan.inputs if item.kind == "tokenizer"]
    bases = [item for item in plan.inputs if item.kind == "checkpoint" and plan.segment == 1]
    facts = {key: _plain(value) for key, value in state.get("facts", {}).items()}
    return Run(
        id=plan.run_id,
        started=started,
        finished=finished,
        status=status,
        policy=Linked(f"policy {document['policy']['id']}", document["policy"]["sha256"]),
        plan=Linked("plan", plan.digest),
        code=Linked(f"secure-train code ({document['code']['kind']})", document["code"]["sha256"]),
        environment=Linked("python-environment", environment["manifest"]),
        environment_bom=_environment_bom(run),
        tokenizer=Linked(f"tokenizer {tokenizers[0].name}", tokenizers[0].manifest) if tokenizers else None,
        decision=_file("verification summary of the gate", decision, run),
        evidence=[found for text, path in evidence if (found := _file(text, path, run))],
        datasets=[_dataset(item) for item in plan.inputs if item.kind == "dataset"],
        parents=[Linked(item.name, item.manifest) for item in bases],
        hardware={**facts, "processes": _plain(state.get("world_size", plan.launch["processes"]))},
    )


def _environment_bom(run: Path) -> Linked | None:
    try:
        data = (run / ENVIRONMENT).read_bytes()
        serial = str(json.loads(data)["serialNumber"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Linked(serial, hashlib.sha256(data).hexdigest(), Path(ENVIRONMENT).name)


def _file(name: str, path: Path, run: Path) -> Linked | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    return Linked(name, hashlib.sha256(data).hexdigest(), f"../{path.relative_to(run).as_posix()}")


def _dataset(item: Input) -> Dataset:
    """An input of a plan; where the dataset is not here any more, only what the plan says."""
    try:
        return dataset_facts(Path(item.path), item.manifest, name=item.name, signers=item.signers)
    except SecureTrainError:
        return Dataset(item.name, item.manifest, signers=item.signers, verified=True)


def dataset_facts(
    path: Path, manifest: str, *, name: str, signers: Sequence[str] = (), verified: bool = True
) -> Dataset:
    """What a dataset says of itself, in files that its manifest binds."""
    artifact = VerifiedArtifact.open(path, manifest)
    said = _json(artifact, "dataset.json")
    prepared = _json(artifact, "preparation.json", optional=True)
    splits: dict[str, int] = {}
    for shard in said.get("shards", []):
        splits[_plain(shard.get("split", "all"))] = splits.get(_plain(shard.get("split", "all")), 0) + int(
            shard["tokens"]
        )
    return Dataset(
        name,
        manifest,
        documents=_plain(said.get("documents", "")),
        tokens=_plain(said.get("tokens", "")),
        vocabulary=_plain(said.get("vocab_size", "")),
        tokenizer=_plain(said.get("tokenizer", "")),
        splits=[(split, str(tokens)) for split, tokens in sorted(splits.items())],
        sources=[
            Source(_plain(one["name"]), _plain(one["sha256"]), _plain(one["documents"]), _plain(one["size"]))
            for one in prepared.get("sources", [])
        ],
        settings=[(key, _plain(value)) for key, value in sorted(prepared.get("parameters", {}).items())],
        signers=signers,
        verified=verified,
    )


def _json(artifact: VerifiedArtifact, path: str, *, optional: bool = False) -> dict[str, Any]:
    if all(entry.path != path for entry in artifact.manifest.files):
        if optional:
            return {}
        raise SecureTrainError(
            "ST-M01", f"there is no {path}, so it cannot be described", where=str(artifact.root / path)
        )
    found = parse_json(artifact.read_bytes(path), what=path, where=str(artifact.root / path))
    if not isinstance(found, dict):
        raise SecureTrainError("ST-U02", f"{path} is no object", where=str(artifact.root / path))
    return found


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _parameters(artifact: VerifiedArtifact) -> str:
    """How many weights the model's files hold, from their headers, each read verified; empty if unreadable.
    """
    count = 0
    for entry in artifact.manifest.files:
        if entry.path.startswith("model/") and entry.path.endswith(".safetensors"):
            with artifact.open_file(entry.path) as file:
                (length,) = struct.unpack("<Q", file.read(0, 8)) if file.size >= 8 else (0,)
                if not 0 < length <= min(file.size - 8, 64 << 20):
                    return ""
                header = json.loads(bytes(file.read(8, length)))
            for name, tensor in header.items():
                if name != "__metadata__":
                    size = 1
                    for extent in tensor["shape"]:
                        size *= int(extent)
                    count += size
    return str(count) if count else ""


def _metrics(run: Path | None, state: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The loss at the checkpoint, and the last validation up to it (measured by the trainer)."""
    found = [("loss", _plain(state["loss"]), "training split, at this step")] if "loss" in state else []
    last = ""
    try:
        lines = (run / "metrics.jsonl").read_text("utf-8").splitlines() if run else []
        for line in lines:
            said = json.loads(line)
            if "validation_loss" in said and int(said["step"]) <= int(state.get("step", 0)):
                last = f"{float(said['validation_loss']):.6f}"
    except (OSError, ValueError, TypeError, KeyError):
        return found
    return [*found, ("loss", last, "validation split")] if last else found


def read_dataset(path: Path, checker: Checker | None) -> Dataset:
    """The facts of a dataset that `checker` vouches for, to the last byte; without one they are unverified.
    """
    if checker is None:
        return dataset_facts(path, _own_manifest(path), name=path.name, verified=False)
    _verify(path, checker)
    signed = checker.signed(path, "dataset")
    names = [signer.name for signer in signed.signers]
    return dataset_facts(path, signed.manifest.digest, name=path.name, signers=names)


def read_model(path: Path, checker: Checker | None) -> Model:
    """The facts of a checkpoint, or of the last of a run, that `checker` vouches for: a run with its whole
    graph. ST-R02 if there is no checkpoint.
    """
    run, checkpoint = _place(path)
    plan = Plan.read(run) if run else None
    if checker is None:
        return model_facts(checkpoint, _own_manifest(checkpoint), plan=plan, run=run, verified=False)
    _verify(run or checkpoint, checker)
    signed = checker.signed(checkpoint, "checkpoint")
    names = [signer.name for signer in signed.signers]
    started, finished = _times(run, signed.manifest.digest) if run else ("", "")
    return model_facts(
        checkpoint,
        signed.manifest.digest,
        plan=plan,
        run=run,
        started=started,
        finished=finished,
        status="completed" if finished else "",
        signers=names,
    )


def _place(path: Path) -> tuple[Path | None, Path]:
    """The run, if there is one, and the checkpoint that `path` means."""
    if (path / PLAN).is_file():
        found = chain.checkpoint_folders(path)
        if not found:
            raise SecureTrainError("ST-R02", "the run has no checkpoint", where=str(path))
        return path, found[-1][1]
    run = path.parent.parent
    inside = path.parent.name == chain.CHECKPOINTS and (run / PLAN).is_file()
    return (run if inside else None), path


def _verify(path: Path, checker: Checker) -> None:
    """Everything below `path`, or the gravest error."""
    from supplychain.lineage import verify_folder

    tree = verify_folder(path, checker)
    for error in tree.all_errors():
        if error.exit_code == tree.exit_code:
            raise error


def _times(run: Path, manifest: str) -> tuple[str, str]:
    """When the run began and ended, if its provenance (which was verified) is about this checkpoint."""
    from supplychain.trust import bundle

    path = run / chain.STATEMENTS / "provenance.sigstore.json"
    try:
        said = json.loads(bundle.parse(path.read_bytes(), where=str(path)).payload)
        if said["subject"][0]["digest"]["sha256"] != manifest:
            return "", ""
        moments = said["predicate"]["runDetails"]["metadata"]
        return str(moments["startedOn"]), str(moments["finishedOn"])
    except (OSError, SecureTrainError, ValueError, KeyError, TypeError, IndexError):
        return "", ""


def digest_of(path: Path) -> str:
    """sha256 of a file of a run's BOMs; empty if it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def _own_manifest(path: Path) -> str:
    """The digest of a folder's own manifest, when nobody vouches for one."""
    return hashlib.sha256(read_manifest(path)).hexdigest()
