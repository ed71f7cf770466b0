"""The manifest: what an artifact consists of, and the digest that is its identity.

`secure-train/manifest.json` lists path, size, mode, sha256 and the root of the block digests of each file, as
canonical JSON. The sha256 of those bytes is the artifact's identity: it binds names, sizes, modes and
contents. Parsing promises that every manifest it returns is canonical and names nothing outside the artifact.
Standard library only.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from supplychain.artifact import digest, tree
from supplychain.artifact.canonical import MAX_DOCUMENT, MAX_INTEGER, parse_json
from supplychain.errors import SecureTrainError

SCHEMA = "urn:secure-train:manifest:v1"
MANIFEST = f"{tree.RESERVED}/manifest.json"
BLOCKS = f"{tree.RESERVED}/blocks"
SIGNATURES = f"{tree.RESERVED}/signatures"

_STAGING = f".{tree.RESERVED}.partial"
_OLD = f".{tree.RESERVED}.old"

_HEX = re.compile(r"[0-9a-f]{64}")
_KIND = re.compile(r"[a-z][a-z0-9-]{0,39}")
_TAIL = re.compile(rb'\],"kind":"([a-z0-9-]{1,40})","schema":"[^"]*"\}\Z')
_LINE = re.compile(
    rb'\{"blocks":(?:null|"([0-9a-f]{64})"),"mode":"(0644|0755)","path":("(?:[^"\\]|\\.)*"),'
    rb'"sha256":"([0-9a-f]{64})","size":([0-9]{1,16})\}'
)
_COMMA = ord(",")
_text = json.encoder.encode_basestring  # a JSON string with the escapes of RFC 8785
_MODES = {"0644": 0o644, "0755": 0o755}


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One file: POSIX path relative to the artifact, size in bytes, mode 0o644 or 0o755, sha256 and block
    root in hex.
    """

    path: str
    size: int
    mode: int
    sha256: str
    blocks: str | None

    @property
    def has_block_file(self) -> bool:
        """A file of one block needs no stored list: its root can be checked from the block itself."""
        return self.blocks is not None and self.size > digest.BLOCK_SIZE

    def as_dict(self) -> dict[str, str | int | None]:
        return {
            "path": self.path,
            "size": self.size,
            "mode": f"{self.mode:04o}",
            "sha256": self.sha256,
            "blocks": self.blocks,
        }


@dataclass(frozen=True)
class Manifest:
    """A checked manifest; `files` is sorted by the UTF-8 bytes of the path."""

    kind: str
    files: tuple[FileEntry, ...]

    @cached_property
    def data(self) -> bytes:
        """The canonical bytes, as stored and signed. Written entry by entry: the general way takes ten times
        as long, and the memory of every entry once more.
        """
        head, tail = _frame(self.kind)
        return (head + ",".join(map(_line, self.files)) + tail).encode()

    @cached_property
    def digest(self) -> str:
        """The artifact's identity: sha256 of the canonical bytes, in hex."""
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def _by_path(self) -> dict[str, FileEntry]:
        return {file.path: file for file in self.files}

    @property
    def total_bytes(self) -> int:
        return sum(file.size for file in self.files)

    def entry(self, path: str) -> FileEntry:
        """The entry of `path`; ST-A04 if the artifact has no such file."""
        try:
            return self._by_path[path]
        except KeyError:
            raise SecureTrainError(
                "ST-A04",
                f"the signed {self.kind} has no file {path!r}",
                next_step="check that this is the right artifact",
            ) from None

    def has(self, path: str) -> bool:
        return path in self._by_path

    @staticmethod
    def parse(data: bytes, *, where: str = MANIFEST) -> Manifest:
        """Parse foreign bytes; ST-A02 unless they are exactly what `data` of an honest manifest would be."""
        try:
            manifest = _canonical(data) or _strictly(data, where)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SecureTrainError("ST-A02", f"the manifest is malformed: {error}", where=where) from None
        if not manifest.files:
            raise SecureTrainError("ST-A02", "the manifest names no file", where=where)
        paths = [file.path for file in manifest.files]
        clash = tree.collision(paths)
        if clash:
            raise SecureTrainError(
                "ST-A02",
                f"the manifest names {clash[0]!r} and {clash[1]!r}, which may be one file",
                where=where,
            )
        if any(before.encode() >= after.encode() for before, after in itertools.pairwise(paths)):
            raise SecureTrainError(
                "ST-A02", "the manifest's files are not in order, or one stands twice", where=where
            )
        if manifest.data != data:  # also catches unknown keys, another schema and another block size
            raise SecureTrainError(
                "ST-A02",
                "the manifest is not in its canonical form, or of another version",
                where=where,
                expected=SCHEMA,
            )
        return manifest


def _line(file: FileEntry) -> str:
    """An entry in canonical JSON: its keys stand in order, and what is not a path needs no escapes."""
    blocks = f'"{file.blocks}"' if file.blocks is not None else "null"
    return (
        f'{{"blocks":{blocks},"mode":"{file.mode:04o}","path":{_text(file.path)},'
        f'"sha256":"{file.sha256}","size":{file.size}}}'
    )


def _canonical(data: bytes) -> Manifest | None:
    """The manifest of which these bytes are exactly the canonical form, or None.

    It reads the one form that `data` writes, entry after entry without a gap, and refuses every other
    spelling of the same value. The general parser takes three times as long, and twice the memory.
    """
    kind = claimed_kind(data)
    if kind is None or len(data) > MAX_DOCUMENT:
        return None
    head, tail = (part.encode() for part in _frame(_kind(kind)))
    if not (data.startswith(head) and data.endswith(tail)):
        return None
    position, end = len(head), len(data) - len(tail)
    files: list[FileEntry] = []
    for match in _LINE.finditer(data, position, end):
        blocks, mode, raw, sha256, size = match.groups()
        quoted = raw.decode("utf-8", "surrogateescape")
        path = json.loads(quoted) if "\\" in quoted else quoted[1:-1]
        if match.start() != position or _text(path) != quoted or (size[:1] == b"0" and size != b"0"):
            return None
        root = blocks.decode() if blocks else None
        files.append(FileEntry(_path(path), _size(path, int(size)), int(mode, 8), sha256.decode(), root))
        position = match.end() + 1
        if position <= end and data[position - 1] != _COMMA:
            return None
    if position != end + 1 or not files:
        return None
    manifest = Manifest(kind, tuple(files))
    manifest.__dict__["data"] = data  # what the cached property would write again
    return manifest


def _frame(kind: str) -> tuple[str, str]:
    """What stands before and after the entries."""
    head = f'{{"block_size":{digest.BLOCK_SIZE},"files":['
    return head, f'],"kind":{_text(kind)},"schema":{_text(SCHEMA)}}}'


def _strictly(data: bytes, where: str) -> Manifest:
    """For every other document: what is wrong with it."""
    document = parse_json(data, what="the manifest", where=where, code="ST-A02")
    return Manifest(_kind(document["kind"]), tuple(_entry(item) for item in document["files"]))


def claimed_kind(data: bytes) -> str | None:
    """The kind that these bytes state if they are a canonical manifest; nothing is checked."""
    found = _TAIL.search(data[-256:])
    return found[1].decode() if found else None


def _kind(value: str) -> str:
    if not _KIND.fullmatch(value):
        raise ValueError(f"{value!r:.60} is no kind")
    return value


def _entry(item: dict[str, str | int | None]) -> FileEntry:
    path, size, mode, sha256, blocks = (item[key] for key in ("path", "size", "mode", "sha256", "blocks"))
    if (
        not isinstance(path, str)
        or not isinstance(sha256, str)
        or not (blocks is None or isinstance(blocks, str))
    ):
        raise ValueError("a field has the wrong type")
    _path(path)
    if not isinstance(size, int) or isinstance(size, bool):
        raise ValueError(f"the size of {path!r:.200} is impossible")
    _size(path, size)
    if not isinstance(mode, str) or mode not in _MODES:
        raise ValueError(f"the mode of {path!r:.200} is neither 0644 nor 0755")
    if not _HEX.fullmatch(sha256) or (blocks is not None and not _HEX.fullmatch(blocks)):
        raise ValueError(f"a digest of {path!r:.200} is not 64 lower-case hexadecimal digits")
    return FileEntry(path, size, _MODES[mode], sha256, blocks)


def _path(path: str) -> str:
    problem = tree.path_problem(path)
    if problem or path.partition("/")[0].casefold() == tree.RESERVED:
        raise ValueError(f"the name {path!r:.200} is not allowed ({problem or 'it is reserved'})")
    return path


def _size(path: str, size: int) -> int:
    if not 0 <= size <= MAX_INTEGER:
        raise ValueError(f"the size of {path!r:.200} is impossible")
    return size


def build_manifest(
    root: Path,
    kind: str,
    *,
    blocks: bool = True,
    known: Mapping[str, FileEntry] | None = None,
    progress: digest.Progress | None = None,
) -> Manifest:
    """Hash every file under `root` and write `secure-train/manifest.json` and the block digests; returns the
    manifest.

    Signatures that stand there are removed: they cover another manifest. Each file is read once.
    `blocks=False` leaves block digests out, for artifacts that are always hashed whole (environments).
    `known` are entries of files that the caller vouches for: they are not read, if size and mode agree and
    their block digests lie there. Raises ST-U03 for a bad kind, ST-U06 for a tree that cannot be an artifact,
    ST-U04 if `root` cannot be written.
    """
    try:
        _kind(kind)
    except ValueError as error:
        expected = "lower-case letters, digits and -, such as dataset"
        raise SecureTrainError("ST-U03", str(error), expected=expected) from None
    staging = root / _STAGING  # beside the final folder: on the same file system
    files = _files_to_sign(root)
    try:
        for leftover in (staging, root / _OLD):  # of a run that was killed
            _remove(leftover)
        staging.mkdir(mode=0o755)
        try:
            manifest = Manifest(kind, tuple(_entries(root, staging, files, blocks, known or {}, progress)))
            _write(staging / "manifest.json", manifest.data)
            for folder, _, _ in os.walk(staging, topdown=False):
                sync_folder(Path(folder))
            _replace_folder(staging, root / tree.RESERVED)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError as error:  # of writing: those of reading are ST-A10 already
        raise SecureTrainError(
            "ST-U04", f"the folder cannot be written: {error.strerror}", where=str(error.filename or root)
        ) from None
    return manifest


def _remove(path: Path) -> None:
    """Whatever stands at `path`. A link is removed, not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _files_to_sign(root: Path) -> list[tree.TreeFile]:
    # An earlier manifest and what a killed run left are replaced, whatever state they are in.
    files = tree.walk(root, without=(tree.RESERVED, _STAGING, _OLD))
    for file in files:
        if file.path.split("/")[0].casefold() == tree.RESERVED:
            raise SecureTrainError(
                "ST-U06", f"the name {tree.RESERVED!r} is reserved", where=str(root / file.path)
            )
    if not files:
        raise SecureTrainError(
            "ST-U06", "the folder holds no files, so there is nothing to sign", where=str(root)
        )
    return files


def _replace_folder(staging: Path, final: Path) -> None:
    """Put `staging` in place of `final`. A kill in between leaves an unsigned artifact, never a half-signed
    one.
    """
    old = final.with_name(_OLD)
    with contextlib.suppress(FileNotFoundError):
        final.rename(old)
    staging.rename(final)
    sync_folder(final.parent)
    _remove(old)


def _entries(
    root: Path,
    staging: Path,
    files: Sequence[tree.TreeFile],
    blocks: bool,
    known: Mapping[str, FileEntry],
    progress: digest.Progress | None,
) -> list[FileEntry]:
    """The entries of all files, sorted: known ones as they are, the others hashed."""
    entries, unknown = [], []
    for file in files:
        entry = known.get(file.path)
        if entry is not None and _is_still(root, staging, file, entry, blocks):
            entries.append(entry)
        else:
            unknown.append(file)
    entries += _hash_all(root, staging, unknown, blocks, progress)
    return sorted(entries, key=lambda entry: entry.path.encode())


def _is_still(root: Path, staging: Path, file: tree.TreeFile, entry: FileEntry, blocks: bool) -> bool:
    """Whether a known entry fits the file, and its block digests, which are copied, have the right root."""
    if (entry.size, entry.mode) != (file.size, file.mode) or (entry.blocks is None) == blocks:
        return False
    if not entry.has_block_file:
        return True
    length = -(-entry.size // digest.BLOCK_SIZE) * digest.LEAF_SIZE
    try:
        leaves = tree.read_file(root, f"{BLOCKS}/{file.path}", limit=length, code="ST-A08")
    except (FileNotFoundError, SecureTrainError):
        return False
    if digest.block_root(entry.size, leaves) != entry.blocks:
        return False
    table = staging / "blocks" / file.path
    table.parent.mkdir(parents=True, exist_ok=True)
    _write(table, leaves)
    return True


def _hash_all(
    root: Path, staging: Path, files: Sequence[tree.TreeFile], blocks: bool, progress: digest.Progress | None
) -> list[FileEntry]:
    def group(files: Sequence[tree.TreeFile], report: digest.Progress) -> list[FileEntry]:
        with tree.Reader(root) as reader:
            return [one(reader, file, report) for file in files]

    def one(reader: tree.Reader, file: tree.TreeFile, report: digest.Progress) -> FileEntry:
        try:
            with reader.reading(file.path) as descriptor:
                size, sha256, leaves = digest.hash_descriptor(descriptor, blocks=blocks, progress=report)
        except FileNotFoundError:
            raise SecureTrainError(
                "ST-A04",
                "a file vanished while the folder was hashed",
                where=str(root / file.path),
                next_step="let nothing write to the folder, then sign again",
            ) from None
        entry = FileEntry(
            file.path, size, file.mode, sha256, digest.block_root(size, leaves) if blocks else None
        )
        if entry.has_block_file:
            table = staging / "blocks" / file.path
            table.parent.mkdir(parents=True, exist_ok=True)
            _write(table, leaves)
        return entry

    return digest.in_groups(group, files, progress)


def _write(path: Path, data: bytes) -> None:
    """Write a new file, down to the disk. It is never written through a link that somebody put there."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_durably(path: Path, data: bytes) -> None:
    """Write `path` so that it is either whole or absent after a crash: temporary name, fsync, rename, fsync
    of the folder.
    """
    temporary = path.with_name(f".{path.name}.partial")
    temporary.unlink(missing_ok=True)
    _write(temporary, data)
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
