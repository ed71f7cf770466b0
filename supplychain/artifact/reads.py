"""Verified reads: bytes of an artifact that were hashed at the moment they are used.

An artifact is opened with the digest of its manifest, which a signature or a plan vouches for. Data is read
into a private buffer, hashed there, compared, and only then handed out, so that there is no gap between check
and use: nothing is mapped, no path is opened twice, and a file that changes afterwards cannot change what was
returned. Standard library only; thread-safe.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal

from supplychain.artifact import digest, tree
from supplychain.artifact.canonical import MAX_DOCUMENT
from supplychain.artifact.digest import BLOCK_SIZE, LEAF_SIZE
from supplychain.artifact.manifest import BLOCKS, MANIFEST, FileEntry, Manifest
from supplychain.errors import SecureTrainError

Verify = Literal["always", "once", "off"]
WHOLE = 8 << 20  # bytes of a list of leaf digests that is kept whole: that of a file of 16 GB
SEGMENT = 65536  # bytes of such a list that are compared together
KEPT = 64  # segments of a long list that are kept
SMALL_FILE = 64 << 20  # bytes that `read_bytes` takes into memory unless told otherwise


def read_manifest(root: Path) -> bytes:
    """The stored manifest's bytes, read once; ST-A09 if the folder has none."""
    try:
        return tree.read_file(root, MANIFEST, limit=MAX_DOCUMENT, code="ST-A02")
    except FileNotFoundError:
        raise SecureTrainError(
            "ST-A09", "the folder has no manifest", where=str(root), next_step=f"secure-train sign {root}"
        ) from None


class VerifiedArtifact:
    """An artifact on disk whose manifest has the expected digest. Files are checked as they are read."""

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self.root = root
        self.manifest = manifest

    @classmethod
    def open(cls, root: Path, manifest_digest: str) -> VerifiedArtifact:
        """Open `root`; ST-A01 unless its manifest has the sha256 `manifest_digest` (hex)."""
        data = read_manifest(root)
        found = hashlib.sha256(data).hexdigest()
        if found != manifest_digest:
            raise SecureTrainError(
                "ST-A01",
                "the artifact is another one than was verified",
                where=str(root / MANIFEST),
                expected=f"sha256:{manifest_digest}",
                found=f"sha256:{found}",
                next_step="restore the artifact, or verify and plan the new one",
            )
        return cls(root, Manifest.parse(data, where=str(root / MANIFEST)))

    def open_file(self, path: str, *, verify: Verify = "always") -> VerifiedFile:
        return VerifiedFile(self.root, self.manifest.entry(path), verify)

    def read_bytes(self, path: str, *, limit: int = SMALL_FILE) -> bytes:
        """The whole of a small file, its sha256 checked on the buffer that is returned."""
        entry = self.manifest.entry(path)
        if entry.size > limit:
            raise SecureTrainError(
                "ST-U02",
                f"{path} is larger than the {limit} bytes that are read at once",
                where=str(self.root / path),
            )
        descriptor = _open(self.root, entry)
        try:
            data = digest.read_exactly(descriptor, 0, entry.size)
        except OSError as error:
            raise tree.unreadable(self.root, path, error) from None
        finally:
            os.close(descriptor)
        found = hashlib.sha256(data).hexdigest()
        if found != entry.sha256:
            raise changed(self.root, entry, f"sha256:{entry.sha256}", f"sha256:{found}")
        return data


class VerifiedFile:
    """One open file of an artifact.

    `verify="always"` hashes the touched blocks on every read; `"once"` hashes a block on its first read by
    this object, which does not see a later change on disk; `"off"` does not hash. Sizes are always checked.
    """

    def __init__(self, root: Path, entry: FileEntry, verify: Verify = "always") -> None:
        if entry.blocks is None and verify != "off":
            raise SecureTrainError(
                "ST-A02",
                f"{entry.path} was signed without block digests, so parts of it cannot be checked",
                where=str(root / entry.path),
            )
        self.path = entry.path
        self.size = entry.size
        self._root = root
        self._entry = entry
        self._verify = verify
        self._lock = threading.Lock()
        self._table: _Leaves | None = None
        self._seen = bytearray((entry.size + BLOCK_SIZE - 1) // BLOCK_SIZE) if verify == "once" else None
        self._descriptor = _open(root, entry)

    def __enter__(self) -> VerifiedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1

    def read(self, offset: int, length: int) -> memoryview:
        """`length` bytes from `offset`, a read-only view of a private buffer. ST-A03 names the block that
        differs, ST-A06 a short file.
        """
        if offset < 0 or length < 0 or offset + length > self.size:
            raise ValueError(f"{self.path}: bytes {offset} to {offset + length} of {self.size}")
        if length == 0:
            return memoryview(b"")
        if self._verify == "off":
            return memoryview(self._pread(offset, length))
        first = offset // BLOCK_SIZE
        start = first * BLOCK_SIZE
        end = min(-(-(offset + length) // BLOCK_SIZE) * BLOCK_SIZE, self.size)
        data = self._pread(start, end - start)
        view = memoryview(data)
        last = first + -(-len(data) // BLOCK_SIZE)
        table = self._leaves().of(first, last)
        for index in range(first, last):
            if self._seen is not None and self._seen[index]:
                continue
            block = view[(index - first) * BLOCK_SIZE : (index - first + 1) * BLOCK_SIZE]
            expected = table[(index - first) * LEAF_SIZE : (index - first + 1) * LEAF_SIZE]
            found = digest.leaf(block)
            if found != expected:
                raise changed(
                    self._root,
                    self._entry,
                    f"block digest {expected.hex()}",
                    f"block digest {found.hex()}",
                    f", block {index} (bytes {index * BLOCK_SIZE} to {index * BLOCK_SIZE + len(block) - 1})",
                )
            if self._seen is not None:
                self._seen[index] = 1
        return view[offset - start : offset - start + length]

    def leaves(self, offset: int, length: int) -> bytes:
        """The stored leaf digests (32 bytes each, checked against the manifest's root) of the blocks that
        hold this range.
        """
        if length == 0:
            return b""
        return self._leaves().of(offset // BLOCK_SIZE, -(-(offset + length) // BLOCK_SIZE))

    def _pread(self, offset: int, length: int) -> bytes:
        if self._descriptor < 0:
            raise ValueError(f"{self.path} is closed")
        try:
            data = digest.read_exactly(self._descriptor, offset, length)
        except OSError as error:
            raise tree.unreadable(self._root, self.path, error) from None
        if len(data) != length:
            raise wrong_size(self._root, self._entry, offset + len(data))
        return data

    def _leaves(self) -> _Leaves:
        if self._table is None:
            with self._lock:
                if self._table is None:  # another thread may have been faster
                    self._table = self._load_leaves()
        return self._table

    def _load_leaves(self) -> _Leaves:
        entry = self._entry
        if entry.has_block_file:
            return _Leaves.stored(self._root, entry)
        # One block: its digest alone makes the root, so the file vouches for itself against the manifest.
        leaves = digest.leaves_of(self._pread(0, entry.size))
        found = digest.block_root(entry.size, leaves)
        if found != entry.blocks:
            raise changed(self._root, entry, f"block root {entry.blocks}", f"block root {found}")
        return _Leaves(leaves)


class _Leaves:
    """The leaf digests of a file, compared with the manifest's root before the first is handed out.

    Lists up to WHOLE bytes are kept in memory. Of longer ones only the digests of their segments are (32
    bytes for each 128 MB of the file), and a segment is read again and compared when it is needed.
    """

    def __init__(self, whole: bytes) -> None:
        self._whole = whole

    @classmethod
    def stored(cls, root: Path, entry: FileEntry) -> _Leaves:
        """Those in the entry's block file; ST-A08 if they are not the manifest's, ST-A04 if they are gone."""
        size = -(-entry.size // BLOCK_SIZE) * LEAF_SIZE
        if size > WHOLE:
            return _Segments(root, entry, size)
        try:
            leaves = tree.read_file(root, f"{BLOCKS}/{entry.path}", limit=size, code="ST-A08")
        except FileNotFoundError:
            raise missing_blocks(root, entry) from None
        found = digest.block_root(entry.size, leaves)
        if found != entry.blocks:
            raise _wrong_blocks(root, entry, found)
        return cls(leaves)

    def of(self, first: int, last: int) -> bytes:
        """The leaves of the blocks from `first` on, before `last`."""
        return self._whole[first * LEAF_SIZE : last * LEAF_SIZE]


class _Segments(_Leaves):
    """A long list. Thread-safe: segments are read into private buffers, the dictionary is only a cache."""

    def __init__(self, root: Path, entry: FileEntry, size: int) -> None:
        super().__init__(b"")
        self._root, self._entry, self._size = root, entry, size
        self._digests: list[bytes] = []
        self._recent: dict[int, bytes] = {}
        found = digest.block_root_of(entry.size, self._all())
        if found != entry.blocks:
            raise _wrong_blocks(root, entry, found)

    def _all(self) -> Iterator[bytes]:
        try:
            with tree.reading(self._root, f"{BLOCKS}/{self._entry.path}") as descriptor:
                for offset in range(0, self._size, SEGMENT):
                    part = digest.read_exactly(descriptor, offset, min(SEGMENT, self._size - offset))
                    self._digests.append(hashlib.sha256(part).digest())
                    yield part
        except FileNotFoundError:
            raise missing_blocks(self._root, self._entry) from None

    def of(self, first: int, last: int) -> bytes:
        start, end = first * LEAF_SIZE, min(last * LEAF_SIZE, self._size)
        parts = b"".join(map(self._segment, range(start // SEGMENT, -(-end // SEGMENT))))
        skipped = start // SEGMENT * SEGMENT
        return parts[start - skipped : end - skipped]

    def _segment(self, number: int) -> bytes:
        recent = self._recent.get(number)
        if recent is not None:
            return recent
        try:
            with tree.reading(self._root, f"{BLOCKS}/{self._entry.path}") as descriptor:
                offset = number * SEGMENT
                part = digest.read_exactly(descriptor, offset, min(SEGMENT, self._size - offset))
        except FileNotFoundError:
            raise missing_blocks(self._root, self._entry) from None
        found = hashlib.sha256(part).digest()
        if found != self._digests[number]:
            raise _wrong_blocks(self._root, self._entry, f"another segment {number} than before")
        if len(self._recent) >= KEPT:
            self._recent = {}
        self._recent[number] = part
        return part


def _wrong_blocks(root: Path, entry: FileEntry, found: str) -> SecureTrainError:
    return SecureTrainError(
        "ST-A08",
        "the block digests of a file differ from the manifest",
        where=str(root / BLOCKS / entry.path),
        expected=f"root {entry.blocks}",
        found=f"root {found}" if len(found) == 64 else found,
        next_step=_RESTORE,
    )


def _open(root: Path, entry: FileEntry) -> int:
    try:
        descriptor = tree.open_file(root, entry.path)
    except FileNotFoundError:
        raise missing(root, entry) from None
    size = os.fstat(descriptor).st_size
    if size != entry.size:
        os.close(descriptor)
        raise wrong_size(root, entry, size)
    return descriptor


def missing_blocks(root: Path, entry: FileEntry) -> SecureTrainError:
    return SecureTrainError(
        "ST-A04",
        "the block digests of a file are missing",
        where=str(root / BLOCKS / entry.path),
        next_step=_RESTORE,
    )


def missing(root: Path, entry: FileEntry) -> SecureTrainError:
    return SecureTrainError(
        "ST-A04",
        "a signed file is missing",
        where=str(root / entry.path),
        expected=f"{entry.size} bytes",
        found="no file",
        next_step=_RESTORE,
    )


def wrong_size(root: Path, entry: FileEntry, size: int) -> SecureTrainError:
    what = "a signed file was truncated" if size < entry.size else "a signed file grew"
    return SecureTrainError(
        "ST-A06",
        what,
        where=str(root / entry.path),
        expected=f"{entry.size} bytes",
        found=f"{size} bytes",
        next_step=_RESTORE,
    )


def changed(root: Path, entry: FileEntry, expected: str, found: str, place: str = "") -> SecureTrainError:
    return SecureTrainError(
        "ST-A03",
        "a file changed since it was signed",
        where=f"{root / entry.path}{place}",
        expected=expected,
        found=found,
        next_step=_RESTORE,
    )


_RESTORE = "restore the artifact from where it was published, or sign it again if the change was meant"
