"""Signing a folder again: only what changed since the same signer signed it last is hashed.

What vouches for a file that is not read: the manifest that this signer signed, whose signature is checked
first, and the file's stamp (device, inode, size, times), which this host took before it hashed the file and
keeps among the user's keys. A stamp that is younger than a moment before the hashing is not kept, since a
change within the clock's grain would not show. An administrator of the machine can forge stamps; `--paranoid`
hashes all.
"""

from __future__ import annotations

import time
from pathlib import Path

from supplychain.artifact import FileEntry, Manifest, canonical_json, parse_json, tree, write_durably
from supplychain.artifact.digest import Progress
from supplychain.errors import SecureTrainError
from supplychain.trust import roots
from supplychain.trust.roots import Trust
from supplychain.trust.signers import Signer, sign_artifact
from supplychain.trust.verify import verify_artifact

SCHEMA = "urn:secure-train:stamps:v1"
GRAIN = 2_000_000_000  # ns: coarser than the clock of any file system that is in use
ROLE = "signer"

Stamps = dict[str, tuple[int, ...]]


def sign_again(
    root: Path, kind: str, signer: Signer, *, paranoid: bool = False, progress: Progress | None = None
) -> tuple[Manifest, int]:
    """Sign `root`, and remember its stamps for the next time. Also: how many files were not read again."""
    begun = time.time_ns()
    paths = [file.path for file in tree.walk(root, without=(tree.RESERVED,))]
    stamps = tree.stamps(root, paths)
    known = {} if paranoid else _known(root, signer, stamps)
    manifest = sign_artifact(root, kind, signer, known=known, progress=progress)
    settled = {path: stamp for path, stamp in stamps.items() if max(stamp[-2:]) < begun - GRAIN}
    _keep(manifest.digest, settled)
    same = sum(1 for entry in manifest.files if known.get(entry.path) == entry)
    return manifest, same


def _known(root: Path, signer: Signer, stamps: Stamps) -> dict[str, FileEntry]:
    """Entries of the last manifest whose files still have the stamps that were kept with it."""
    try:
        last = verify_artifact(root, Trust.of(ROLE, signer.public), ROLE).manifest
    except SecureTrainError:
        return {}  # never signed, or not by this signer: then nothing is known
    kept = _kept(last.digest)
    return {
        entry.path: entry
        for entry in last.files
        if entry.path in kept and kept[entry.path] == stamps.get(entry.path)
    }


def _path(digest: str) -> Path:
    return roots.config_folder() / "stamps" / f"{digest}.json"


def _keep(digest: str, stamps: Stamps) -> None:
    files = {path: [str(value) for value in stamp] for path, stamp in stamps.items()}
    path = _path(digest)
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_durably(path, canonical_json({"schema": SCHEMA, "files": files}))
    except OSError as error:
        raise SecureTrainError(
            "ST-U04", f"the stamps cannot be kept: {error.strerror}", where=str(path)
        ) from None


def _kept(digest: str) -> Stamps:
    """The stamps that were kept with a manifest; none if they are not there or not readable."""
    path = _path(digest)
    try:
        document = parse_json(path.read_bytes(), what="the stamps", where=str(path))
        if document["schema"] != SCHEMA:
            return {}
        return {name: tuple(map(int, stamp)) for name, stamp in document["files"].items()}
    except (OSError, SecureTrainError, KeyError, TypeError, ValueError, AttributeError):
        return {}
