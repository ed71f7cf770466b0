"""Comparing a whole folder with its manifest: every difference, not only the first.

Used where a folder must be exactly the signed one: `secure-train verify`, the gate, the environment check.
`hash_files=False` compares names, sizes and modes only, which takes seconds for terabytes; contents are then
hashed as they are read. There is no way to ignore a file. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from supplychain.artifact import digest, tree
from supplychain.artifact.digest import BLOCK_SIZE, CHUNK, Progress
from supplychain.artifact.manifest import BLOCKS, MANIFEST, SIGNATURES, FileEntry, Manifest
from supplychain.artifact.reads import VerifiedFile, changed, missing, missing_blocks, wrong_size
from supplychain.errors import SecureTrainError

BUNDLE_SUFFIX = ".sigstore.json"
BIG_FILE = 32 << 20  # bytes; below it, files are hashed side by side, one thread each


def differences(
    root: Path,
    manifest: Manifest,
    *,
    hash_files: bool = True,
    paranoid: bool = False,
    progress: digest.Progress | None = None,
) -> list[SecureTrainError]:
    """All differences between the folder and the manifest, sorted by path; empty if there is none. Hashes on
    all cores.

    A file's blocks vouch for it, and so does its sha256; honest signers state both of the same bytes, so one
    is enough. `paranoid` compares both, for signers who may have stated two different things.
    """
    files, problems = tree.survey(root)
    present = {file.path: file for file in files}
    found = [_not_signable(problem) for problem in problems]
    found.extend(_unexpected(root, manifest, present))
    to_hash: list[FileEntry] = []
    for entry in manifest.files:
        file = present.get(entry.path)
        if entry.has_block_file and f"{BLOCKS}/{entry.path}" not in present:
            found.append(missing_blocks(root, entry))
        if file is None:
            found.append(missing(root, entry))
        elif file.size != entry.size:
            found.append(wrong_size(root, entry, file.size))
        else:
            if file.mode != entry.mode:
                found.append(_wrong_mode(root, entry, file.mode))
            to_hash.append(entry)
    if hash_files:
        found.extend(_hash_all(root, to_hash, progress))
        if paranoid:
            found.extend(_hash_whole(root, [item for item in to_hash if item.has_block_file], progress))
    unique = {(error.code, error.where): error for error in found}
    return sorted(unique.values(), key=lambda error: (error.where or "", error.code))


def foreign_differences(
    root: Path, files: dict[str, str], signature: str | None, *, progress: Progress | None = None
) -> list[SecureTrainError]:
    """All differences between the folder and another tool's list (sha256 by path), every byte hashed. Beside
    the listed files only `signature`, the path of the list's own file, may lie there.
    """
    present, problems = tree.survey(root)
    found = [_not_signable(problem) for problem in problems]
    known = [file for file in present if file.path in files]
    extra = [file for file in present if file.path not in files and file.path != signature]
    found += [_extra(root, file) for file in extra]
    gone = sorted(set(files) - {file.path for file in known})
    found += [missing(root, FileEntry(path, 0, 0o644, files[path], None)) for path in gone]

    def hash_all(group: Sequence[tree.TreeFile], report: Progress) -> list[SecureTrainError]:
        errors: list[SecureTrainError] = []
        with tree.Reader(root) as reader:
            for file in group:
                entry = FileEntry(file.path, file.size, file.mode, files[file.path], None)
                errors += _check(root, reader, entry, lambda file: None, report)
        return errors

    found += digest.in_groups(hash_all, known, progress)
    return sorted(found, key=lambda error: (error.where or "", error.code))


def _not_signable(problem: SecureTrainError) -> SecureTrainError:
    """Something that no artifact may hold was not there when it was signed."""
    if problem.code != "ST-U06":
        return problem
    return SecureTrainError(
        "ST-A05",
        problem.what,
        where=problem.where,
        expected="the signed files only",
        found="something that cannot be signed",
        next_step="remove it, or restore the artifact from where it was published",
    )


def _wrong_mode(root: Path, entry: FileEntry, mode: int) -> SecureTrainError:
    return SecureTrainError(
        "ST-A07",
        "a file's mode changed since it was signed",
        where=str(root / entry.path),
        expected=f"{entry.mode:04o}",
        found=f"{mode:04o}",
        next_step=f"chmod {entry.mode:04o} {root / entry.path}",
    )


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
    return [_extra(root, present[path]) for path in extra]


def _extra(root: Path, file: tree.TreeFile) -> SecureTrainError:
    return SecureTrainError(
        "ST-A05",
        "a file is not covered by the signature",
        where=str(root / file.path),
        expected="no such file",
        found=f"{file.size} bytes",
        next_step="move it away, or sign the artifact again if it belongs there",
    )


def _is_bundle(path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return folder == SIGNATURES and name.endswith(BUNDLE_SUFFIX)


def _hash_all(root: Path, entries: list[FileEntry], progress: Progress | None) -> list[SecureTrainError]:
    """Small files side by side; big ones one after another, each by all cores on its blocks."""
    big = [entry for entry in entries if entry.has_block_file and entry.size >= BIG_FILE]
    small = [entry for entry in entries if not entry.has_block_file or entry.size < BIG_FILE]

    def whole(entries: Sequence[FileEntry], report: Progress) -> list[SecureTrainError]:
        with tree.Reader(root) as reader:
            return [
                error
                for entry in entries
                for error in _check(
                    root, reader, entry, lambda file: _read(file, 0, file.size, report), report
                )
            ]

    def in_stripes(file: VerifiedFile) -> None:
        width = -(-file.size // digest.threads() // BLOCK_SIZE) * BLOCK_SIZE
        starts = range(0, file.size, width)
        digest.on_all_cores(
            lambda start, report: _read(file, start, min(start + width, file.size), report), starts, progress
        )

    found = digest.in_groups(whole, small, progress)
    with tree.Reader(root) as reader:
        for entry in big:
            found.extend(_check(root, reader, entry, in_stripes, progress or (lambda count: None)))
    return found


def _hash_whole(root: Path, entries: list[FileEntry], progress: Progress | None) -> list[SecureTrainError]:
    """The other half of `paranoid`: the sha256 of each file whose blocks were compared."""

    def whole(entries: Sequence[FileEntry], report: Progress) -> list[SecureTrainError]:
        errors: list[SecureTrainError] = []
        with tree.Reader(root) as reader:
            for entry in entries:
                try:
                    with reader.reading(entry.path) as descriptor:
                        _, sha256, _ = digest.hash_descriptor(descriptor, blocks=False, progress=report)
                except FileNotFoundError:
                    continue  # named already
                if sha256 != entry.sha256:
                    errors.append(changed(root, entry, f"sha256:{entry.sha256}", f"sha256:{sha256}"))
        return errors

    return digest.in_groups(whole, entries, progress)


def _check(
    root: Path, reader: tree.Reader, entry: FileEntry, read: Callable[[VerifiedFile], None], report: Progress
) -> list[SecureTrainError]:
    """Hash one file: by its blocks if they are stored, so that later reads of them are known to succeed."""
    errors: list[SecureTrainError] = []
    try:
        if entry.has_block_file:
            with VerifiedFile(root, entry) as file:
                try:
                    file.leaves(0, 1)
                except SecureTrainError as error:
                    errors.append(error)  # the block digests are damaged; is the file, too?
                else:
                    read(file)
                    return errors
        with reader.reading(entry.path) as descriptor:
            size, sha256, _ = digest.hash_descriptor(descriptor, blocks=False, progress=report)
        if size != entry.size:
            errors.append(wrong_size(root, entry, size))
        elif sha256 != entry.sha256:
            errors.append(changed(root, entry, f"sha256:{entry.sha256}", f"sha256:{sha256}"))
    except FileNotFoundError:
        errors.append(missing(root, entry))
    except SecureTrainError as error:
        errors.append(error)
    return errors


def _read(file: VerifiedFile, start: int, end: int, report: Progress) -> None:
    for offset in range(start, end, CHUNK):
        length = min(CHUNK, end - offset)
        file.read(offset, length)
        report(length)
