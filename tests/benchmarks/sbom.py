"""Writing the bill of materials of the training environment beside cyclonedx-py, and what is in it.

The peer reads an environment that nobody verified. Ours does so, too (and hashes the native libraries,
which it does not); with the manifest that `env verify` has just passed, comparing what it reads; and after
hashing every byte, which the peer has no counterpart to. Both validate what they write. Completeness is
counted in the two documents.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sbom import score
from sbom.document import components
from sbom.graph import resolve
from supplychain import boms
from supplychain.artifact import MANIFEST
from supplychain.environment.build import build_environment
from tests.benchmarks._report import OURS, Report, command, gate, options, peers

ROOT = Path(__file__).resolve().parents[2]
HOME = Path(os.environ.get("SECURE_TRAIN_TEST_HOME", ROOT / ".secure-train"))
PEER = "cyclonedx-py"


def main() -> None:
    chosen = options(__doc__ or "").parse_args()
    profile = json.loads((HOME / "training" / "environment.json").read_bytes())["profile"]
    lock = ROOT / "requirements" / f"training-{profile}.lock"
    report = Report(
        f"bill of materials of the training environment ({profile} profile), written and validated"
    )
    with tempfile.TemporaryDirectory(dir=HOME, prefix=".bench-") as folder:
        environment = build_environment(lock, Path(folder), cache=HOME / "cache" / "wheels", profile=profile)
        manifest = hashlib.sha256((environment / MANIFEST).read_bytes()).hexdigest()
        copy = Path(folder) / "environment"
        shutil.copytree(environment, copy, copy_function=os.link)  # starting its Python can leave bytecode
        ours, theirs = Path(folder) / "ours.json", Path(folder) / "theirs.json"
        write: list[str | Path] = [gate() / "secure-train", "sbom", "environment", "-o", ours, "--env"]
        peer: list[str | Path] = [peers() / PEER, "environment", "--output-reproducible", "-o", theirs]
        for case, arguments in (
            ("as found, not verified", [copy, "--unverified"]),
            ("files read are verified", [environment, "--manifest", manifest]),
            ("every byte is verified", [environment]),
        ):
            race(report, case, [*write, *arguments], [*peer, copy / "bin" / "python"], chosen.repeat)
        race(
            report,
            "the gate's environment, as found",
            [*write, HOME / "gate", "--unverified"],
            [*peer, HOME / "gate" / "bin" / "python"],
            chosen.repeat,
        )
        command([*write, environment])
        command([*peer, copy / "bin" / "python"])
        count(report, OURS, json.loads(ours.read_bytes()), copy)
        count(report, PEER, json.loads(theirs.read_bytes()), copy)
    report.finish(chosen.json)


def race(
    report: Report, case: str, ours: Sequence[str | Path], peer: Sequence[str | Path], repeat: int
) -> None:
    """Both write nothing that the official schema refuses."""
    report.race(case, {OURS: partial(command, ours), PEER: partial(command, peer)}, repeat)


def count(report: Report, system: str, document: dict[str, Any], environment: Path) -> None:
    """What the document says: hashes, licences, producers, edges against the truth, parts of parts, fields.
    """
    everything = [item for item in components(document) if item is not document["metadata"].get("component")]
    top = [item for item in document["components"] if str(item.get("purl", "")).startswith("pkg:pypi/")]
    names = {item["bom-ref"]: item["purl"].partition("@")[0] for item in top}
    found = boms.unverified_inventory(environment)
    truth = {
        (f"pkg:pypi/{key}", f"pkg:pypi/{target}")
        for key, targets in resolve(found.installed, {}).edges.items()
        for target in targets
    }
    edges = {
        (names[item["ref"]], names[ref])
        for item in document["dependencies"]
        for ref in item.get("dependsOn", [])
        if item["ref"] in names and ref in names
    }
    fields = score.cisa(document)
    for metric, value in (
        ("packages", len(top)),
        ("hashed", sum(bool(item.get("hashes")) for item in top)),
        ("producer", sum(bool(item.get("authors")) for item in top)),
        ("edges", len(edges)),
        ("false", len(edges - truth)),
        ("missing", len(truth - edges)),
        ("nested", len(everything) - len(document["components"])),
        ("met", sum(field.state == score.MET for field in fields)),
        ("declared", sum(field.state == score.DECLARED for field in fields)),
    ):
        report.note("completeness", system, metric, value, "")


if __name__ == "__main__":
    main()
