"""The chain of a run's checkpoints: each signed statement names its predecessor, so that none can be removed,
reordered, exchanged or rolled back unnoticed.

    head_n = sha256(canonical({"v", "run", "index", "previous": head_(n-1), "step", "manifest", "decision"}))

The chain starts from the digest of the run's first decision. Statements lie in
RUN/statements/checkpoint-STEP.sigstore.json, the checkpoints themselves in RUN/checkpoints/step-STEP.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from supplychain import statement
from supplychain.artifact import canonical_json, tree, write_durably
from supplychain.artifact.digest import Progress
from supplychain.errors import SecureTrainError
from supplychain.trust import bundle
from supplychain.trust.bundle import Bundle
from supplychain.trust.roots import Signatory, Trust
from supplychain.trust.signers import Signer, sign_artifact
from supplychain.trust.verify import VerifiedStatement, verify_statement

CHECKPOINTS = "checkpoints"
STATEMENTS = "statements"
_STEP = re.compile(r"step-([0-9]{8,18})")
_STATEMENT = re.compile(r"checkpoint-([0-9]{8,18})\.sigstore\.json")


@dataclass(frozen=True)
class Link:
    """One verified or just written link."""

    index: int
    step: int
    manifest: str
    head: str
    decision: str
    statement: str  # sha256 of the statement's bundle
    signer: Signatory

    @property
    def name(self) -> str:
        return step_name(self.step)


def step_name(step: int) -> str:
    return f"step-{step:08d}"


def checkpoint_folders(run: Path) -> list[tuple[int, Path]]:
    """Finished checkpoints of a run by step: real folders under their exact names. Ranks can write here, so
    links do not count.
    """
    folder = run / CHECKPOINTS
    if folder.is_symlink() or not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        found = [
            (int(match[1]), folder / entry.name)
            for entry in entries
            if (match := _STEP.fullmatch(entry.name)) and entry.is_dir(follow_symlinks=False)
        ]
    return sorted((step, path) for step, path in found if path.name == step_name(step))


def strangers(run: Path) -> list[Path]:
    """What lies among the checkpoints and is none: look-alike names, links. Saves in progress begin with a
    dot.
    """
    folder = run / CHECKPOINTS
    known = {path for _, path in checkpoint_folders(run)}
    return (
        sorted(path for path in folder.iterdir() if path not in known and not path.name.startswith("."))
        if folder.is_dir()
        else []
    )


def append(
    run: Path,
    run_id: str,
    step: int,
    decision: str,
    previous: Link | None,
    signer: Signer,
    *,
    progress: Progress | None = None,
) -> Link:
    """Sign the finished checkpoint of `step` and write the statement that links it to `previous`."""
    folder = run / CHECKPOINTS / step_name(step)
    manifest = sign_artifact(folder, "checkpoint", signer, progress=progress)
    index = previous.index + 1 if previous else 0
    head = _head(run_id, index, previous.head if previous else decision, step, manifest.digest, decision)
    payload = statement.checkpoint(
        run=run_id,
        step=step,
        manifest=statement.Subject(f"{run_id}/{step_name(step)}", manifest.digest),
        files=len(manifest.files),
        size=manifest.total_bytes,
        state={file.path: file.sha256 for file in manifest.files if file.path.endswith(".json")},
        decision=decision,
        chain={"index": str(index), "head": {"sha256": head}},
        parent={
            "name": previous.name,
            "manifest": {"sha256": previous.manifest},
            "statement": {"sha256": previous.statement},
        }
        if previous
        else None,
    )
    signed = signer.sign_payload(payload)
    write_durably(_statement_path(run, step), signed.data)
    return Link(index, step, manifest.digest, head, decision, signed.digest, signer.public)


def load(run: Path, run_id: str, trust: Trust, role: str, decisions: list[str]) -> list[Link]:
    """The verified chain, oldest first. ST-R03 names what was removed, reordered, exchanged or added.

    `decisions` are the digests of the run's verified decisions, first segment first.
    """
    folder = run / STATEMENTS
    names = (
        sorted(
            (int(match[1]), path) for path in folder.iterdir() if (match := _STATEMENT.fullmatch(path.name))
        )
        if folder.is_dir()
        else []
    )
    links: list[Link] = []
    for step, path in names:
        verified = verify_statement(
            _read(path), trust, role, statement.CHECKPOINT, subject=None, where=str(path)
        )
        links.append(_link(verified, links[-1] if links else None, run_id, step, decisions, path))
    return links


def _link(
    verified: VerifiedStatement,
    previous: Link | None,
    run_id: str,
    step: int,
    decisions: list[str],
    path: Path,
) -> Link:
    predicate = verified.predicate
    try:
        subject = verified.statement["subject"][0]["digest"]["sha256"]
        decision = predicate["decision"]["digest"]["sha256"]
        index, head = int(predicate["chain"]["index"]), predicate["chain"]["head"]["sha256"]
        found: dict[str, Any] = {
            "run": predicate["run"],
            "step": predicate["step"],
            "index": index,
            "parent": predicate["parent"]
            and (predicate["parent"]["manifest"]["sha256"], predicate["parent"]["statement"]["sha256"]),
        }
    except (KeyError, TypeError, IndexError, ValueError):
        raise SecureTrainError("ST-S03", "the checkpoint statement is malformed", where=str(path)) from None
    expected: dict[str, Any] = {
        "run": run_id,
        "step": str(step),
        "index": previous.index + 1 if previous else 0,
        "parent": (previous.manifest, previous.statement) if previous else None,
    }
    for field, value in expected.items():
        if found[field] != value:
            raise _broken(
                f"the checkpoint statement has another {field} than the chain needs here",
                path,
                str(value),
                str(found[field]),
            )
    if decision not in decisions:
        raise _broken(
            "the checkpoint was made under a decision that this run does not have",
            path,
            " or ".join(decisions),
            str(decision),
        )
    wanted = _head(run_id, index, previous.head if previous else decision, step, subject, decision)
    if head != wanted:
        raise _broken("the head of the chain is not the one that its links give", path, wanted, str(head))
    return Link(index, step, subject, head, decision, verified.bundle.digest, verified.signer)


def _broken(what: str, path: Path, expected: str, found: str) -> SecureTrainError:
    return SecureTrainError(
        "ST-R03",
        what,
        where=str(path),
        expected=expected,
        found=found,
        next_step="restore the run's folder as the launcher left it",
    )


def _head(run: str, index: int, previous: str, step: int, manifest: str, decision: str) -> str:
    link = {
        "v": 1,
        "run": run,
        "index": str(index),
        "previous": previous,
        "step": str(step),
        "manifest": manifest,
        "decision": decision,
    }
    return hashlib.sha256(canonical_json(link)).hexdigest()


def _statement_path(run: Path, step: int) -> Path:
    return run / STATEMENTS / f"checkpoint-{step:08d}.sigstore.json"


def decision_path(run: Path, segment: int) -> Path:
    return run / STATEMENTS / f"decision-{segment:04d}.sigstore.json"


def decision_bundles(run: Path) -> list[tuple[Path, Bundle]]:
    """The stored decisions of the run's segments, parsed and not yet verified."""
    found = sorted((run / STATEMENTS).glob("decision-*.sigstore.json"))
    return [(path, bundle.parse(_read(path), where=str(path))) for path in found]


def _read(path: Path) -> bytes:
    return tree.read_named(path, limit=bundle.MAX_BUNDLE, what="a statement of the run", code="ST-R03")
