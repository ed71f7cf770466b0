"""Open files of datasets: one pool for the whole process, and the two ways of reading through it.

An open shard of 1 GiB costs a descriptor and half a megabyte of block digests; a mixture has thousands of
shards. So the pool closes what was not used for longest, and never what somebody reads at that moment. A
verified file hashes what it returns; a mapped one (`verify="off"`) returns the page cache itself, which is
why nothing but "off" ever maps.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

from supplychain.artifact import FileEntry, Manifest, VerifiedArtifact
from supplychain.artifact.reads import missing, wrong_size
from supplychain.artifact.tree import open_file

Verify = Literal["always", "once", "off"]


class File(Protocol):
    """A file of an artifact, open for reading ranges."""

    @property
    def path(self) -> str: ...

    @property
    def size(self) -> int: ...

    def read(self, offset: int, length: int) -> memoryview: ...

    def close(self) -> None: ...


class Artifact(Protocol):
    """A folder whose manifest has a digest that somebody vouched for, here or far away."""

    @property
    def root(self) -> Path: ...

    @property
    def manifest(self) -> Manifest: ...

    def open_file(self, path: str, *, verify: Verify = "always") -> File: ...

    def read_bytes(self, path: str) -> bytes: ...


@runtime_checkable
class Remote(Protocol):
    """An artifact whose bytes are far away, and can be sent for."""

    def fetch(self, path: str, offset: int, length: int) -> None: ...


class MappedFile:
    """A local file as it lies there, unverified but for its size."""

    def __init__(self, root: Path, entry: FileEntry) -> None:
        self.path, self.size = entry.path, entry.size
        try:
            descriptor = open_file(root, entry.path)
        except FileNotFoundError:
            raise missing(root, entry) from None
        try:
            size = os.fstat(descriptor).st_size
            if size != entry.size:
                raise wrong_size(root, entry, size)
            # A map cannot be empty; a file may be.
            self._view = memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) if size else b"")
        finally:
            os.close(descriptor)

    def read(self, offset: int, length: int) -> memoryview:
        return self._view[offset : offset + length]

    def close(self) -> None:
        """Nothing to do: the map goes with the last view of it."""


class Pool:
    """At most `limit` open files, or as many as are being read."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[Files, str], File] = OrderedDict()
        self._readers: dict[tuple[Files, str], int] = {}

    def take(self, owner: Files, path: str) -> File:
        key = (owner, path)
        with self._lock:
            file = self._open.get(key)
            if file is None:
                self._close_idle(list(self._open), self._limit - 1)
                file = self._open[key] = owner.open(path)
                self._readers[key] = 0
            else:
                self._open.move_to_end(key)
            self._readers[key] += 1
            return file

    def give_back(self, owner: Files, path: str) -> None:
        with self._lock:
            self._readers[owner, path] -= 1

    def close(self, owner: Files) -> None:
        with self._lock:
            self._close_idle([key for key in self._open if key[0] is owner], 0)

    def _close_idle(self, keys: list[tuple[Files, str]], keep: int) -> None:
        idle = [key for key in keys if not self._readers[key]]
        for key in idle[: max(0, len(keys) - keep)]:
            self._open.pop(key).close()
            del self._readers[key]


POOL = Pool(256)


class Files:
    """The files of one artifact: verified ones through a pool, maps in a list of its own, since they need
    not be given back: a map goes with its last reader.
    """

    MAPS = 256

    def __init__(self, artifact: Artifact, verify: Verify, pool: Pool = POOL) -> None:
        self._artifact, self._verify, self._pool = artifact, verify, pool
        self._maps: dict[str, MappedFile] = {}
        self._mapped = verify == "off" and isinstance(artifact, VerifiedArtifact)

    def open(self, path: str) -> File:
        return self._artifact.open_file(path, verify=self._verify)

    def take(self, path: str) -> File:
        """An open file, which the caller gives back."""
        if self._mapped:
            return self._maps.get(path) or self._map(path)
        return self._pool.take(self, path)

    def give_back(self, path: str) -> None:
        if not self._mapped:
            self._pool.give_back(self, path)

    def close(self) -> None:
        self._maps.clear()
        self._pool.close(self)

    def _map(self, path: str) -> MappedFile:
        if len(self._maps) >= self.MAPS:
            self._maps.clear()
        file = self._maps[path] = MappedFile(self._artifact.root, self._artifact.manifest.entry(path))
        return file
