"""The plan: the one file that says what to train on what, every input named by digest.

Read once as bytes, compared with the digest on the command line, then parsed; what is in memory afterwards is
what was decided. Torch-free.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from supplychain.artifact import SecureTrainError, parse_json
from trainer.config import Config
from trainer.errors import TrainerError

SCHEMA = "urn:secure-train:plan:v1"
LIMIT = 16 << 20  # bytes

Reads = Literal["always", "once", "off"]


@dataclass(frozen=True)
class Input:
    """An artifact that the gate verified: where it lies and the sha256 of its manifest."""

    name: str
    path: Path
    manifest: str


@dataclass(frozen=True)
class Plan:
    """The sections of a plan that the trainer acts on."""

    digest: str
    run: str
    directory: Path
    datasets: tuple[Input, ...]
    tokenizer: Input | None
    checkpoint: Input | None
    resume: bool  # go on from the checkpoint, instead of only starting from its weights
    reads: Reads
    config: Config


def read(path: Path, digest: str) -> Plan:
    """The plan in `path`; ST-R01 unless its bytes have this sha256."""
    try:
        with path.open("rb") as file:
            data = file.read(LIMIT + 1)
    except OSError as error:
        raise SecureTrainError(
            "ST-U01", f"the plan cannot be read: {error.strerror}", where=str(path)
        ) from None
    found = hashlib.sha256(data).hexdigest()
    if found != digest:
        raise SecureTrainError(
            "ST-R01",
            "this is not the plan that the gate decided on",
            where=str(path),
            expected=f"sha256:{digest}",
            found=f"sha256:{found}",
            next_step="start the run again with `secure-train run`",
        )
    document = parse_json(data, what="the plan", limit=LIMIT)
    try:
        return _plan(document, digest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TrainerError(
            "ST-T06", f"the plan is malformed: {type(error).__name__}: {error}", where=str(path)
        ) from None


def _plan(document: Mapping[str, Any], digest: str) -> Plan:
    if document["schema"] != SCHEMA:
        raise ValueError(f"its schema is {document['schema']!r:.80}, not {SCHEMA}")
    inputs = document["inputs"]
    checkpoint = inputs.get("checkpoint")
    tokenizer = inputs.get("tokenizer")
    if document["reads"] not in ("always", "once", "off"):
        raise ValueError(f"reads is {document['reads']!r:.40}")
    return Plan(
        digest=digest,
        run=str(document["run"]["id"]),
        directory=Path(document["run"]["directory"]),
        datasets=tuple(_input(item["name"], item) for item in inputs["datasets"]),
        tokenizer=_input("tokenizer", tokenizer) if tokenizer else None,
        checkpoint=_input("checkpoint", checkpoint) if checkpoint else None,
        resume=bool(checkpoint and checkpoint["resume"]),
        reads=cast(Reads, document["reads"]),
        config=Config.from_document(document["config"]),
    )


def _input(name: str, item: Mapping[str, Any]) -> Input:
    if not re.fullmatch(r"[0-9a-f]{64}", item["manifest"]):
        raise ValueError(f"{item['manifest']!r:.80} is no sha256")
    return Input(str(name), Path(item["path"]), item["manifest"])
