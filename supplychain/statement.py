"""The in-toto statements of a run, as canonical bytes: policy, decision (VSA), checkpoint link, run
provenance (SLSA v1).

Owns predicate types and field names, and nothing else: data in, bytes out. Subjects are sha256 only, integers
are strings, there are no floats. Statements refer to each other by digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from supplychain.artifact import canonical_json
from supplychain.artifact.oms import STATEMENT_TYPE

POLICY = "urn:secure-train:policy:v1"
DECISION = "https://slsa.dev/verification_summary/v1"
CHECKPOINT = "urn:secure-train:checkpoint:v1"
PROVENANCE = "https://slsa.dev/provenance/v1"
BOM = "https://cyclonedx.org/bom"

BUILD_TYPE = "urn:secure-train:fsdp-train:v1"
GATE = "urn:secure-train:gate:v1"
LAUNCHER = "urn:secure-train:launcher:v1"


@dataclass(frozen=True)
class Subject:
    """What a statement is about: a name for people, and its sha256 (hex)."""

    name: str
    sha256: str

    def as_dict(self) -> dict[str, Any]:
        return {"name": self.name, "digest": {"sha256": self.sha256}}


@dataclass(frozen=True)
class Resource:
    """A resource descriptor: something that a statement refers to. `annotations` hold what a reader wants to
    see beside the digest.
    """

    name: str
    sha256: str
    uri: str | None = None
    annotations: tuple[tuple[str, str], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        result: dict[str, Any] = {"name": self.name, "digest": {"sha256": self.sha256}}
        if self.uri is not None:
            result["uri"] = self.uri
        if self.annotations:
            result["annotations"] = dict(self.annotations)
        return result


def digest_of(value: Any) -> str:
    """sha256 (hex) of the canonical JSON of a document."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def _statement(subjects: Sequence[Subject], predicate_type: str, predicate: dict[str, Any]) -> bytes:
    return canonical_json(
        {
            "_type": STATEMENT_TYPE,
            "subject": [subject.as_dict() for subject in subjects],
            "predicateType": predicate_type,
            "predicate": predicate,
        }
    )


def policy(name: str, data: bytes, identifier: str, expires: str) -> bytes:
    """Whoever signs this vouches for the policy."""
    return _statement(
        [Subject(name, hashlib.sha256(data).hexdigest())], POLICY, {"id": identifier, "expires": expires}
    )


def bom(subjects: Sequence[Subject], document: dict[str, Any]) -> bytes:
    """A bill of materials about the subjects; the predicate is the CycloneDX document itself."""
    return _statement(subjects, BOM, document)


def decision(
    *,
    subjects: Sequence[Subject],
    run: str,
    policy: Resource,
    inputs: Sequence[Resource],
    passed: bool,
    time: str,
    levels: Sequence[str],
    verdicts: Sequence[dict[str, str]],
    version: str,
) -> bytes:
    """What the gate decided (SLSA verification summary v1): for a refusal too. Every rule's verdict is in the
    extension field.
    """
    return _statement(
        subjects,
        DECISION,
        {
            "verifier": {"id": GATE, "version": {"secure-train": version}},
            "timeVerified": time,
            "resourceUri": f"secure-train:run/{run}",
            "policy": policy.as_dict(),
            "inputAttestations": [item.as_dict() for item in inputs],
            "verificationResult": "PASSED" if passed else "FAILED",
            "verifiedLevels": list(levels) if passed else ["FAILED"],
            "slsaVersion": "1.1",
            "urn:secure-train:verdicts:v1": list(verdicts),
        },
    )


def checkpoint(
    *,
    run: str,
    step: int,
    manifest: Subject,
    files: int,
    size: int,
    state: dict[str, str],
    decision: str,
    chain: dict[str, Any],
    parent: dict[str, Any] | None,
) -> bytes:
    """One link of a run's chain of checkpoints. `chain` is {index, head}, `decision` the digest of the
    decision's bundle.
    """
    return _statement(
        [manifest],
        CHECKPOINT,
        {
            "run": run,
            "step": str(step),
            "manifest": {"files": str(files), "bytes": str(size)},
            "state": state,
            "decision": {"digest": {"sha256": decision}},
            "parent": parent,
            "chain": chain,
        },
    )


def provenance(
    *,
    subject: Subject,
    external: dict[str, Any],
    internal: dict[str, Any],
    materials: Sequence[Resource],
    byproducts: Sequence[Resource],
    invocation: str,
    started: str,
    finished: str,
    version: str,
) -> bytes:
    """How the last checkpoint came to be (SLSA provenance v1, build type of ours)."""
    return _statement(
        [subject],
        PROVENANCE,
        {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": external,
                "internalParameters": internal,
                "resolvedDependencies": [item.as_dict() for item in materials],
            },
            "runDetails": {
                "builder": {"id": LAUNCHER, "version": {"secure-train": version}},
                "metadata": {"invocationId": invocation, "startedOn": started, "finishedOn": finished},
                "byproducts": [item.as_dict() for item in byproducts],
            },
        },
    )
