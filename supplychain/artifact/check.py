"""Comparing a whole folder with its manifest: every difference, not only the first.

Used where a folder must be exactly the signed one: `secure-train verify`, the gate, the environment check.
`hash_files=False` compares names, sizes and modes only, which takes seconds for terabytes; contents are then
hashed as they are read. There is no way to ignore a file. Standard library only.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from supplychain.artifact import digest, tree
from supplychain.artifact.manifest import BLOCKS, MANIFEST, SIGNATURES, FileEntry, Manifest
from supplychain.artifact.reads import VerifiedFile, _changed, _wrong_size, missing
from supplychain.errors import SecureTrainError

BUNDLE_SUFFIX = ".sigstore.json"


def differences(
    root: Path, manifest: Manifest, *, hash_files: bool = True, progress: digest.Progress | None = None
) -> list[SecureTrainError]:
    """All differences between the folder and the manifest, sorted by path; empty if there is none. Hashes on
    all cores.
    """
    try:
        present = {file.path: file for file in tree.walk(root)}
    except SecureTrainError as error:
        if error.code != "ST-U06":
            raise
        # Something that no artifact may hold was not there when it was signed.
        return [
            SecureTrainError(
                "ST-A05",
                error.what,
                where=error.where,
                expected="the signed files only",
                found="a file that cannot be signed",
                next_step="remove it",
            )
        ]
    found = _unexpected(root, manifest, present)
    to_hash: list[FileEntry] = []
    for entry in manifest.files:
        file = present.get(entry.path)
        if file is None:
            found.append(missing(root, entry))
        elif file.size != entry.size:
            found.append(_wrong_size(root, entry, file.size))
        else:
            if file.mode != entry.mode:
                found.append(
                    SecureTrainError(
                        "ST-A07",
                        "a file's mode changed since it was signed",
                        where=str(root / entry.path),
                        expected=f"{entry.mode:04o}",
                        found=f"{file.mode:04o}",
                        next_step=f"chmod {entry.mode:04o} {root / entry.path}",
                    )
                )
            to_hash.append(entry)
    if hash_files:
        found.extend(_hash_all(root, to_hash, progress))
    return sorted(found, key=lambda error: error.where or "")


def _unexpected(root: Path, manifest: Manifest, present: dict[str, tree.TreeFile]) -> list[SecureTrainError]:
    """Files that nothing explains. Beside the signed ones: the manifest, the block digests it implies, and
    signature bundles.
    """
    explained = (
        {file.path for file in manifest.files}
        | {MANIFEST}
        | {f"{BLOCKS}/{file.path}" for file in manifest.files if file.has_block_file}
    )
    extra = [path for path in present if path not in explained and not _is_bundle(path)]
    return [
        SecureTrainError(
            "ST-A05",
            "a file is not covered by the signature",
            where=str(root / path),
            expected="no such file",
            found=f"{present[path].size} bytes",
            next_step="move it away, or sign the artifact again if it belongs there",
        )
        for path in extra
    ]


def _is_bundle(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return folder == SIGNATURES and name.endswith(BUNDLE_SUFFIX)


def _hash_all(
    root: Path, entries: list[FileEntry], progress: digest.Progress | None
) -> list[SecureTrainError]:
    lock = threading.Lock()

    def report(count: int) -> None:
        if progress:
            with lock:
                progress(count)

    def one(entry: FileEntry) -> SecureTrainError | None:
        try:
            descriptor = tree.open_file(root, entry.path)
        except FileNotFoundError:
            return missing(root, entry)
        except SecureTrainError as error:
            return error
        try:
            size, sha256, _ = digest.hash_descriptor(descriptor, blocks=False, progress=report)
        finally:
            os.close(descriptor)
        if size != entry.size:
            return _wrong_size(root, entry, size)
        if sha256 != entry.sha256:
            return _changed(root, entry, f"sha256:{entry.sha256}", f"sha256:{sha256}")
        return _check_blocks(root, entry)

    with ThreadPoolExecutor(digest.threads()) as pool:
        return [error for error in pool.map(one, sorted(entries, key=lambda entry: -entry.size)) if error]


def _check_blocks(root: Path, entry: FileEntry) -> SecureTrainError | None:
    """The stored block digests must have the signed root, else later reads of an intact file would fail."""
    if not entry.has_block_file:
        return None
    try:
        with VerifiedFile(root, entry) as file:
            file.leaves(0, 1)
    except SecureTrainError as error:
        return error
    return None
