"""The OpenSSF Model Signing (OMS) v1.0 payload of an artifact: the in-toto statement that a signature covers.

It lists every file of the artifact, with our manifest and the block digests among them, so that one signature
serves two readers: tools that know OMS check all files by sha256, and ours takes the manifest from it, which
adds identity, sizes, modes and block roots. Only the folder of the signatures themselves is left out.
Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from supplychain.artifact import digest, tree
from supplychain.artifact.canonical import canonical_json
from supplychain.artifact.manifest import BLOCKS, MANIFEST, SIGNATURES, Manifest
from supplychain.errors import SecureTrainError

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"
_RESOURCE = re.compile(r'\{"algorithm":"sha256","digest":"([0-9a-f]{64})","name":("(?:[^"\\]|\\.)*")\}')
_HEX = re.compile(r"[0-9a-f]{64}")
_text = json.encoder.encode_basestring
_SERIALIZATION = {
    "method": "files",
    "hash_type": "sha256",
    "allow_symlinks": False,
    "ignore_paths": [SIGNATURES],
}
_HEAD = f'{{"_type":{_text(STATEMENT_TYPE)},"predicate":{{"resources":['
_MIDDLE = (
    f'],"serialization":{canonical_json(_SERIALIZATION).decode()}}},'
    f'"predicateType":{_text(PREDICATE_TYPE)},"subject":['
)


def payload(root: Path, name: str, manifest: Manifest) -> bytes:
    """The canonical statement over `root`, whose manifest has just been built. `name` is for people: identity
    is the manifest's digest.
    """
    digests = {file.path: file.sha256 for file in manifest.files}
    digests[MANIFEST] = manifest.digest
    for file in manifest.files:
        if file.has_block_file:
            digests[f"{BLOCKS}/{file.path}"] = _sha256_of(root, f"{BLOCKS}/{file.path}")
    return _write(name, digests)


def _write(name: str, digests: dict[str, str]) -> bytes:
    """The canonical statement, entry by entry: an entry's keys stand in order, a digest needs no escapes."""
    names = sorted(digests)
    resources = ",".join(
        f'{{"algorithm":"sha256","digest":"{digests[path]}","name":{_text(path)}}}' for path in names
    )
    subject = {"name": name, "digest": {"sha256": _subject_digest(digests[path] for path in names)}}
    return f"{_HEAD}{resources}{_MIDDLE}{canonical_json(subject).decode()}]}}".encode()


def canonical_files(payload: bytes) -> dict[str, str] | None:
    """The files that a statement covers if it is exactly one that `payload` writes, or None: then it has to
    be parsed as any other statement.

    It is read in its one form, entry after entry without a gap, in order, with no other spelling.
    """
    text = payload.decode("utf-8", "surrogateescape")
    end = text.rfind(_MIDDLE)
    if end < 0 or not text.startswith(_HEAD):
        return None
    found: dict[str, str] = {}
    position, last = len(_HEAD), ""
    for match in _RESOURCE.finditer(text, position, end):
        value, quoted = match.groups()
        name = quoted[1:-1] if "\\" not in quoted else None
        if match.start() != position or name is None or name <= last or not name.isprintable():
            return None  # escapes are rare, and read by the general parser
        found[name], last, position = value, name, match.end() + 1
        if position <= end and text[position - 1] != ",":
            return None
    if position != end + 1:
        return None
    subject = f'"digest":{{"sha256":"{_subject_digest(found.values())}"}},"name":'
    rest = re.fullmatch(rf'\{{{re.escape(subject)}"[^"\\]*"\}}\]\}}', text[end + len(_MIDDLE) :])
    return found if rest else None


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
            all(len(item) == 3 and item["algorithm"] == "sha256" for item in resources)
            and all(isinstance(item["name"], str) for item in resources)
            and len(signed) == len(resources)
            and len(subjects) == 1
            and subjects[0]["digest"] == {"sha256": _subject_digest(item["digest"] for item in resources)}
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        raise _refuse("the signature's list of files is malformed", where) from None
    if not consistent:
        raise _refuse("the signature's list of files contradicts itself", where)
    return signed


def foreign_files(statement: dict[str, Any], *, where: str) -> dict[str, str]:
    """The files that another tool's OMS statement covers: sha256 (hex) by path. ST-S04 unless it lists plain
    files by sha256 and its subject agrees with the list. Paths that it ignores mean nothing here: whoever
    compares the folder finds what lies there uncovered.
    """
    try:
        predicate = statement["predicate"]
        kinds = {name: predicate["serialization"][name] for name in ("method", "hash_type", "allow_symlinks")}
        resources = predicate["resources"]
        files = {item["name"]: item["digest"] for item in resources}
        wanted = {name: _SERIALIZATION[name] for name in kinds}
        if kinds != wanted:
            raise _refuse(
                "the signature lists its files in a way that is not accepted", where, str(wanted), str(kinds)
            )
        names = [name if isinstance(name, str) else "" for name in files]
        consistent = (
            bool(files)
            and len(files) == len(resources)
            and all(item["algorithm"] == "sha256" for item in resources)
            and all(_HEX.fullmatch(value) for value in files.values())
            and not any(map(tree.path_problem, names))
            and tree.collision(names) is None
            and [subject["digest"] for subject in statement["subject"]]
            == [{"sha256": _subject_digest(files[name] for name in sorted(files))}]
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        raise _refuse("the signature's list of files is malformed", where) from None
    if not consistent:
        raise _refuse("the signature's list of files contradicts itself, or leaves the folder", where)
    return files


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


def _subject_digest(digests: Iterable[str]) -> str:
    """OMS: sha256 over the raw digests in the order of the names. It does not bind the names, so it is
    nobody's identity.
    """
    return hashlib.sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()


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
