"""The plan: the run request with every name resolved to a digest, as one canonical file.

The gate writes it, the launcher starts it, the trainer obeys it, the provenance records its digest, and
`verify` reads it again. It holds everything that the trainer may use and nothing that is not yet verified.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from supplychain.artifact import canonical_json, parse_json, tree
from supplychain.errors import SecureTrainError

SCHEMA = "urn:secure-train:plan:v1"
FILE = "plan.json"
MAX_PLAN = 16 << 20  # bytes


@dataclass(frozen=True)
class Input:
    """A verified artifact: where it lies now, the digest of its manifest, its kind and who signed it (key
    identifiers).
    """

    name: str
    kind: str
    path: str
    manifest: str
    signers: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "kind": self.kind,
            "path": self.path,
            "manifest": self.manifest,
            "signers": list(self.signers),
        }


@dataclass(frozen=True)
class Plan:
    """A plan's document and its bytes, which are what is digested, stored and handed on."""

    document: dict[str, Any]

    @cached_property
    def data(self) -> bytes:
        return canonical_json(self.document)

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def run_id(self) -> str:
        return str(self.document["run"]["id"])

    @property
    def segment(self) -> int:
        """1 for a fresh run, one more for each resume."""
        return int(self.document["run"]["segment"])

    @property
    def inputs(self) -> list[Input]:
        """Datasets, then the tokenizer, then the base checkpoint."""
        section = self.document["inputs"]
        found = [*section["datasets"], *(section[key] for key in ("tokenizer", "checkpoint") if section[key])]
        return [
            Input(item["name"], item["kind"], item["path"], item["manifest"], tuple(item["signers"]))
            for item in found
        ]

    @property
    def environment(self) -> dict[str, Any]:
        section: dict[str, Any] = self.document["environment"]
        return section

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole run."""
        return int(self.document["config"]["train"]["steps"])

    @property
    def launch(self) -> dict[str, Any]:
        section: dict[str, Any] = self.document["launch"]
        return section

    @staticmethod
    def parse(data: bytes, *, where: str) -> Plan:
        """Read a stored plan; ST-U02 unless it is canonical and of this version."""
        document = parse_json(data, what=f"the plan {where}", limit=MAX_PLAN)
        sections = {
            "schema",
            "run",
            "request",
            "policy",
            "environment",
            "code",
            "inputs",
            "reads",
            "config",
            "launch",
        }
        if not isinstance(document, dict) or document.get("schema") != SCHEMA or set(document) != sections:
            raise SecureTrainError(
                "ST-U02", "this is not a plan of this version", where=where, expected=SCHEMA
            )
        plan = Plan(document)
        try:
            _ = (
                plan.run_id,
                plan.segment,
                plan.inputs,
                plan.environment["manifest"],
                plan.launch["processes"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise SecureTrainError(
                "ST-U02", f"the plan is malformed ({type(error).__name__}: {error})", where=where
            ) from None
        if plan.segment < 1:
            raise SecureTrainError("ST-U02", "the plan's segments are counted from 1", where=where)
        if plan.data != data:
            raise SecureTrainError("ST-U02", "the plan is not in its canonical form", where=where)
        return plan

    @staticmethod
    def read(run: Path) -> Plan:
        path = run / FILE
        try:
            data = tree.read_file(run, FILE, limit=MAX_PLAN, code="ST-U02")
        except FileNotFoundError:
            next_step = "name the folder of a run"
            raise SecureTrainError(
                "ST-U01", "the run has no plan", where=str(path), next_step=next_step
            ) from None
        return Plan.parse(data, where=str(path))
