"""Datasets in object stores: an artifact whose files are read through a verified cache of whole chunks.

    store = obstore.store.from_url("s3://bucket/web")
    data = Dataset(RemoteArtifact.open(store, manifest_sha256, Cache(folder, limit=200 << 30)))

Promises the same as a local artifact: no byte is returned that was not hashed in a private buffer against the
signed manifest. A chunk (16 MiB) is named by the digests of its blocks, so a cache can be shared, and a store
that changes cannot change what a name means. A chunk that arrives or lies there wrong is fetched once more;
if it is wrong again the run stops and names it. `obstore` is an extra; whatever has its functions will do.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from supplychain.artifact import BLOCK_SIZE, BLOCKS, MANIFEST, FileEntry, Manifest, SecureTrainError
from supplychain.artifact.digest import LEAF_SIZE, block_root, leaf, leaves_of
from supplychain.artifact.reads import changed, missing, missing_blocks
from trainer.data.cache import Cache
from trainer.data.files import Verify
from trainer.data.sources import extra

CHUNK = 256 * BLOCK_SIZE
MANIFEST_LIMIT = 256 << 20  # bytes


class Store:
    """Reads of an object store, below a prefix; each of its errors as one of ours."""

    def __init__(self, store: Any, prefix: str = "") -> None:
        self._store, self._prefix = store, prefix.strip("/")
        self._obstore = extra("obstore")

    def where(self, path: str) -> str:
        return f"{self._prefix}/{path}" if self._prefix else path

    def size(self, path: str) -> int:
        return int(self._ask(path, lambda: self._obstore.head(self._store, self.where(path))["size"]))

    def read(self, path: str, start: int, length: int) -> bytes:
        """FileNotFoundError if there is no such object; fewer bytes where it is shorter."""
        if not length:
            return b""
        return bytes(
            self._ask(
                path,
                lambda: self._obstore.get_range(self._store, self.where(path), start=start, length=length),
            )
        )

    def _ask(self, path: str, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except FileNotFoundError:
            raise
        except Exception as error:  # the library has a class for each store's every mood
            if "NotFound" in type(error).__name__:
                raise FileNotFoundError(path) from None
            raise SecureTrainError(
                "ST-D18",
                "the object store does not answer, or refuses",
                where=self.where(path),
                found=f"{type(error).__name__}: {error!s:.200}",
                next_step="check the address, the credentials and the network, and resume",
            ) from None


class RemoteArtifact:
    """An artifact in a store whose manifest has the expected digest; see files.Artifact."""

    def __init__(self, store: Store, manifest: Manifest, cache: Cache) -> None:
        self.root = Path(store.where(""))
        self.manifest = manifest
        self._store, self._cache = store, cache

    @classmethod
    def open(cls, store: Any, manifest_digest: str, cache: Cache, *, prefix: str = "") -> RemoteArtifact:
        """ST-A01 unless the manifest has the sha256 `manifest_digest` (hex)."""
        reader = Store(store, prefix)
        where = reader.where(MANIFEST)
        try:
            size = reader.size(MANIFEST)
            if size > MANIFEST_LIMIT:
                raise SecureTrainError("ST-A02", "the manifest is too large", where=where, found=str(size))
            data = reader.read(MANIFEST, 0, size)
        except FileNotFoundError:
            raise SecureTrainError("ST-A09", "the folder has no manifest", where=where) from None
        found = hashlib.sha256(data).hexdigest()
        if found != manifest_digest:
            raise SecureTrainError(
                "ST-A01",
                "the artifact is another one than was verified",
                where=where,
                expected=f"sha256:{manifest_digest}",
                found=f"sha256:{found}",
                next_step="restore the artifact, or verify and plan the new one",
            )
        return cls(reader, Manifest.parse(data, where=where), cache)

    def open_file(self, path: str, *, verify: Verify = "always") -> RemoteFile:
        """`verify` is always "always": what was downloaded is not trusted for having been right once."""
        return RemoteFile(self._store, self.root, self.manifest.entry(path), self._cache)

    def read_bytes(self, path: str) -> bytes:
        """The whole of a small file, checked."""
        entry = self.manifest.entry(path)
        for attempt in (1, 2):
            data = _fetched(self._store, self.root, entry, 0, entry.size)
            found = hashlib.sha256(data).hexdigest()
            if found == entry.sha256:
                return data
            if attempt == 2:
                raise changed(self.root, entry, f"sha256:{entry.sha256}", f"sha256:{found}")
        raise AssertionError("unreachable")

    def fetch(self, path: str, offset: int, length: int) -> None:
        """Have these bytes here soon; what is wrong with them is said when they are read."""
        self.open_file(path).fetch(offset, length)


class RemoteFile:
    """One file of a remote artifact. Thread-safe; holds no connection and no descriptor."""

    def __init__(self, store: Store, root: Path, entry: FileEntry, cache: Cache) -> None:
        if entry.blocks is None:
            raise SecureTrainError(
                "ST-A02", f"{entry.path} was signed without block digests", where=str(root / entry.path)
            )
        self.path, self.size = entry.path, entry.size
        self._store, self._root, self._entry, self._cache = store, root, entry, cache
        self._table: bytes | None = None

    def close(self) -> None:
        pass

    def read(self, offset: int, length: int) -> memoryview:
        """As VerifiedFile.read."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise ValueError(f"{self.path}: bytes {offset} to {offset + length} of {self.size}")
        if length == 0:
            return memoryview(b"")
        start = offset // BLOCK_SIZE * BLOCK_SIZE
        end = min(-(-(offset + length) // BLOCK_SIZE) * BLOCK_SIZE, self.size)
        data = bytearray()
        while start + len(data) < end:
            begin = start + len(data)
            data += self._in_chunk(begin, min(end, begin // CHUNK * CHUNK + CHUNK) - begin)
        return memoryview(data).toreadonly()[offset - start : offset - start + length]

    def fetch(self, offset: int, length: int) -> None:
        for chunk in range(offset // CHUNK, -(-(offset + length) // CHUNK)):
            os.close(self._cache.read(self._name(chunk), lambda chunk=chunk: self._download(chunk)))  # type: ignore[misc]  # default argument

    def _in_chunk(self, start: int, length: int) -> bytes:
        """Whole blocks from one chunk, verified as they are read from the cache."""
        chunk = start // CHUNK
        name = self._name(chunk)
        for attempt in (1, 2):
            descriptor = self._cache.read(name, lambda: self._download(chunk))
            try:
                data = os.pread(descriptor, length, start - chunk * CHUNK)
            finally:
                os.close(descriptor)
            wrong = self._wrong_block(data, start)
            if wrong is None and len(data) == length:
                return data
            self._cache.drop(name)  # it rotted here: fetch it once more
            if attempt == 2:
                raise self._changed(wrong if wrong is not None else start // BLOCK_SIZE, data, start)
        raise AssertionError("unreachable")

    def _download(self, chunk: int) -> bytes:
        """A chunk that is right, or ST-A03: one more try, then no more."""
        start = chunk * CHUNK
        length = min(CHUNK, self.size - start)
        for attempt in (1, 2):
            data = _fetched(self._store, self._root, self._entry, start, length)
            wrong = self._wrong_block(data, start)
            if wrong is None:
                return data
            if attempt == 2:
                raise self._changed(wrong, data, start)
        raise AssertionError("unreachable")

    def _wrong_block(self, data: bytes, start: int) -> int | None:
        """The first block in `data` (which begins at byte `start`) that is not what was signed."""
        table, view = self._leaves(), memoryview(data)
        for index in range(start // BLOCK_SIZE, -(-(start + len(data)) // BLOCK_SIZE)):
            block = view[index * BLOCK_SIZE - start : (index + 1) * BLOCK_SIZE - start]
            if leaf(block) != table[index * LEAF_SIZE : (index + 1) * LEAF_SIZE]:
                return index
        return None

    def _changed(self, index: int, data: bytes, start: int) -> SecureTrainError:
        block = data[index * BLOCK_SIZE - start : (index + 1) * BLOCK_SIZE - start]
        expected = self._leaves()[index * LEAF_SIZE : (index + 1) * LEAF_SIZE]
        return changed(
            self._root,
            self._entry,
            f"block digest {expected.hex()}",
            f"block digest {leaf(block).hex()}, twice",
            f", block {index} (bytes {index * BLOCK_SIZE} to {index * BLOCK_SIZE + len(block) - 1})",
        )

    def _name(self, chunk: int) -> str:
        """The chunk's name in the cache: a digest of the digests of its blocks."""
        blocks = CHUNK // BLOCK_SIZE * LEAF_SIZE
        return hashlib.sha256(
            b"chunk\x00" + self._leaves()[chunk * blocks : (chunk + 1) * blocks]
        ).hexdigest()

    def _leaves(self) -> bytes:
        if self._table is None:
            self._table = self._load_leaves()
        return self._table

    def _load_leaves(self) -> bytes:
        entry = self._entry
        for attempt in (1, 2):
            if entry.has_block_file:
                size = -(-entry.size // BLOCK_SIZE) * LEAF_SIZE
                try:
                    leaves = self._store.read(f"{BLOCKS}/{entry.path}", 0, size)
                except FileNotFoundError:
                    raise missing_blocks(self._root, entry) from None
            else:  # one block: its digest alone makes the root
                leaves = leaves_of(_fetched(self._store, self._root, entry, 0, entry.size))
            found = block_root(entry.size, leaves)
            if found == entry.blocks:
                return leaves
            if attempt == 2:
                code = "ST-A08" if entry.has_block_file else "ST-A03"
                raise SecureTrainError(
                    code,
                    "the block digests of a file differ from the manifest",
                    where=str(self._root / entry.path),
                    expected=f"root {entry.blocks}",
                    found=f"root {found}",
                )
        raise AssertionError("unreachable")


def _fetched(store: Store, root: Path, entry: FileEntry, start: int, length: int) -> bytes:
    try:
        return store.read(entry.path, start, length)
    except FileNotFoundError:
        raise missing(root, entry) from None
