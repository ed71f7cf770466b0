"""`secure-train inspect`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import click

from supplychain.artifact import SIGNATURES, Manifest, differences, parse_json, read_manifest, tree
from supplychain.cli.options import json_option
from supplychain.cli.output import Console
from supplychain.plan import FILE, Plan
from supplychain.trust import bundle, roots

SHOWN = 20  # files listed unless --all


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--all", "every", is_flag=True, help="List every file.")
@click.option("--diff", is_flag=True, help="Show what changed since it was signed; nothing is judged.")
@json_option
def command(folder: Path, every: bool, diff: bool, as_json: bool) -> int:
    """Show what FOLDER claims to be: its manifest, files and signers. Nothing is verified; `verify` does
    that.
    """
    console = Console(as_json)
    if diff:
        return _diff(console, folder)
    if (folder / FILE).is_file():
        return _run(console, folder)
    manifest = Manifest.parse(read_manifest(folder), where=str(folder))
    claimed = signatures(folder)
    console.text(f"{manifest.kind}: {len(manifest.files)} files, {manifest.total_bytes} bytes")
    console.text(f"  manifest  sha256:{manifest.digest}")
    for item in claimed:
        console.text(f"  claims to be signed by {item['name']} (sha256:{item['key']})")
    if not claimed:
        console.text("  not signed")
    files = manifest.files if every else manifest.files[:SHOWN]
    for file in files:
        console.text(f"  {file.size:>14}  {file.mode:04o}  sha256:{file.sha256[:16]}...  {file.path}")
    if len(files) < len(manifest.files):
        console.text(f"  ... and {len(manifest.files) - len(files)} more (--all)")
    console.text("nothing was verified: secure-train verify does that")
    console.answer(
        "inspect",
        0,
        kind=manifest.kind,
        manifest=manifest.digest,
        signatures=claimed,
        files=[file.as_dict() for file in manifest.files],
    )
    return 0


_SIGNS = {"ST-A03": "changed", "ST-A04": "missing", "ST-A05": "added", "ST-A06": "resized", "ST-A07": "mode"}


def _diff(console: Console, folder: Path) -> int:
    """Every file that differs from the manifest, one line each. Exit 0 whatever they are: `verify` judges."""
    manifest = Manifest.parse(read_manifest(folder), where=str(folder))
    with console.progress(f"hashing {folder}") as progress:
        found = differences(folder, manifest, progress=progress)
    rows = [
        {
            "change": _SIGNS.get(error.code, error.what),
            "path": (error.where or "").removeprefix(f"{folder}/").split(", block ")[0],
            "signed": error.expected,
            "found": error.found,
        }
        for error in found
    ]
    for row in rows:
        console.text(f"{row['change']:8} {row['path']}  {row['signed']} -> {row['found']}")
    same = len(manifest.files) - len({row["path"] for row in rows if row["change"] != "added"})
    console.text(f"{len(rows)} changes since it was signed, {same} files are the same")
    console.answer("inspect", 0, manifest=manifest.digest, changes=rows)
    return 0


def signatures(folder: Path) -> list[dict[str, Any]]:
    """Whom the bundles of an artifact name; nothing is verified."""
    return [_signature(path) for path in sorted((folder / SIGNATURES).glob("*.sigstore.json"))]


def _signature(path: Path) -> dict[str, Any]:
    """Whom a bundle names: a key by the name that this host calls it, or what its certificate says."""
    parsed = bundle.parse(
        tree.read_named(path, limit=bundle.MAX_BUNDLE, what="a signature", code="ST-S03"), where=str(path)
    )
    statement = parse_json(parsed.payload, what=f"the statement in {path}", code="ST-S03")
    kind = statement.get("predicateType") if isinstance(statement, dict) else None
    name, key = _claim(parsed, str(path))
    return {
        "file": path.name,
        "method": parsed.method,
        "key": key,
        "name": name,
        "timestamps": len(parsed.timestamps),
        "predicateType": kind,
    }


def _claim(parsed: bundle.Bundle, where: str) -> tuple[str, str]:
    """Whom the bundle names, and the sha256 of the key's PEM or of the certificate."""
    if parsed.method == "key":
        keys = [*roots.key_store().list(), *roots.policy_keys().list()]
        known = {key.identifier: key.name for key in keys}
        return known.get(parsed.key_hint, "a key unknown here"), parsed.key_hint
    digest = hashlib.sha256(parsed.certificates[0]).hexdigest()
    if parsed.method == "keyless":
        from supplychain.trust import keyless  # late: most signatures are by keys

        claimed = keyless.claimed(parsed, where=where)
        return f"{claimed.subject} of {claimed.issuer}", digest
    from supplychain.trust import certificates

    (first, *_) = certificates.load(parsed.certificates, where=where)
    return ", ".join(certificates.subjects(first, where=where)) or "a certificate without a name", digest


def _run(console: Console, folder: Path) -> int:
    plan = Plan.read(folder)
    document = plan.document
    console.text(f"run {plan.run_id}, segment {plan.segment}, plan sha256:{plan.digest}")
    console.text(
        f"  policy {document['policy']['id']} sha256:{document['policy']['sha256'][:16]}...; code "
        f"{document['code']['kind']} sha256:{document['code']['sha256'][:16]}..."
    )
    for item in plan.inputs:
        console.text(f"  {item.kind} {item.name} sha256:{item.manifest[:16]}...  {item.path}")
    console.text(f"  environment {plan.environment['prefix']} sha256:{plan.environment['manifest'][:16]}...")
    console.text(f"  {plan.launch['processes']} processes on {plan.launch['device']}")
    console.text("nothing was verified: secure-train verify does that")
    console.answer("inspect", 0, plan=plan.digest, document=document)
    return 0
