"""The OpenSSF Model Signing (OMS) v1.0 payload of an artifact: the in-toto statement that a signature covers.

It lists every file of the artifact, with our manifest and the block digests among them, so that one signature
serves two readers: tools that know OMS check all files by sha256, and ours takes the manifest from it, which
adds identity, sizes, modes and block roots. Only the folder of the signatures themselves is left out.
Standard library only.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from supplychain.artifact import digest, tree
from supplychain.artifact.canonical import canonical_json
from supplychain.artifact.manifest import BLOCKS, MANIFEST, SIGNATURES, Manifest
from supplychain.errors import SecureTrainError

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"
_SERIALIZATION = {
    "method": "files",
    "hash_type": "sha256",
    "allow_symlinks": False,
    "ignore_paths": [SIGNATURES],
}


def payload(root: Path, name: str, manifest: Manifest) -> bytes:
    """The canonical statement over `root`, whose manifest has just been built. `name` is for people: identity
    is the manifest's digest.
    """
    digests = {file.path: file.sha256 for file in manifest.files}
    digests[MANIFEST] = manifest.digest
    for file in manifest.files:
        if file.has_block_file:
            digests[f"{BLOCKS}/{file.path}"] = _sha256_of(root, f"{BLOCKS}/{file.path}")
    resources = [{"name": path, "algorithm": "sha256", "digest": digests[path]} for path in sorted(digests)]
    return canonical_json(
        {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": name, "digest": {"sha256": _subject_digest(resources)}}],
            "predicateType": PREDICATE_TYPE,
            "predicate": {"serialization": _SERIALIZATION, "resources": resources},
        }
    )


def signed_files(statement: dict[str, Any], *, where: str) -> dict[str, str]:
    """The files that an OMS statement covers: sha256 (hex) by path. ST-S04 unless it lists them in the one
    way that is accepted and its subject agrees with the list.
    """
    try:
        predicate, subjects = statement["predicate"], statement["subject"]
        resources = predicate["resources"]
        signed = {item["name"]: item["digest"] for item in resources}
        if predicate.get("serialization") != _SERIALIZATION or set(predicate) != {
            "serialization",
            "resources",
        }:
            raise _refuse(
                "the signature lists its files in a way that is not accepted",
                where,
                str(_SERIALIZATION),
                str(predicate.get("serialization"))[:300],
            )
        consistent = (
            all(set(item) == {"name", "algorithm", "digest"} for item in resources)
            and all(item["algorithm"] == "sha256" and isinstance(item["name"], str) for item in resources)
            and len(signed) == len(resources)
            and len(subjects) == 1
            and subjects[0]["digest"] == {"sha256": _subject_digest(resources)}
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        raise _refuse("the signature's list of files is malformed", where) from None
    if not consistent:
        raise _refuse("the signature's list of files contradicts itself", where)
    return signed


def check_manifest_digest(signed: dict[str, str], found: str, *, where: str) -> None:
    """ST-S04 unless the signed files have the manifest whose sha256 is `found`: asked before it is parsed."""
    if signed.get(MANIFEST) != found:
        raise _refuse(
            "the signature covers another manifest",
            where,
            f"sha256:{signed.get(MANIFEST)}",
            f"sha256:{found}",
        )


def check_files(signed: dict[str, str], manifest: Manifest, *, where: str) -> None:
    """ST-S04 unless the signed files are exactly those of the manifest, it and the block digests."""
    ours = {file.path: file.sha256 for file in manifest.files}
    sidecars = {f"{BLOCKS}/{file.path}" for file in manifest.files if file.has_block_file} | {MANIFEST}
    listed = {name: value for name, value in signed.items() if name not in sidecars}
    if listed != ours or not sidecars <= set(signed):
        name = next(iter(sorted(set(listed.items()) ^ set(ours.items()))), ("block digests", ""))[0]
        raise _refuse(f"the signature and the manifest disagree about {name}", where)


def _refuse(what: str, where: str, expected: str | None = None, found: str | None = None) -> SecureTrainError:
    return SecureTrainError(
        "ST-S04",
        what,
        where=where,
        expected=expected,
        found=found,
        next_step="restore the artifact and its signature together",
    )


def _subject_digest(resources: list[dict[str, str]]) -> str:
    """OMS: sha256 over the raw digests in the order of the names. It does not bind the names, so it is
    nobody's identity.
    """
    return hashlib.sha256(b"".join(bytes.fromhex(item["digest"]) for item in resources)).hexdigest()


def _sha256_of(root: Path, path: str) -> str:
    try:
        with tree.reading(root, path) as descriptor:
            return digest.hash_descriptor(descriptor, blocks=False)[1]
    except FileNotFoundError:
        raise SecureTrainError(
            "ST-A04",
            "the block digests of a file are missing",
            where=str(root / path),
            next_step=f"secure-train sign {root}",
        ) from None
