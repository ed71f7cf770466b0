"""Where an inventory gets its bytes from: a folder of files, read as files.

Nothing is imported or started. A tree that was verified hands out bytes that it compared with a signed
manifest (the gate has one); `DiskTree` hands out what lies there, and says so.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from sbom.errors import SbomError

MAX_FILE = 64 << 20  # bytes that are read at once


class Tree(Protocol):
    """Paths are relative to the tree's root, with `/`."""

    def paths(self) -> Iterable[str]: ...

    def read(self, path: str) -> bytes:
        """The whole of a small file."""
        ...

    def sha256(self, path: str) -> str:
        """The digest of a file in hex; empty if it cannot be known."""
        ...


class DiskTree:
    """A folder as it lies there, read without anybody vouching for it; `below` is the part of it that
    matters. Links in it are not followed.
    """

    def __init__(self, root: Path, below: str = "") -> None:
        self.root = root
        self._below = below
        self._paths: list[str] | None = None

    def paths(self) -> list[str]:
        if self._paths is None:
            self._paths = sorted(self._walk())
        return self._paths

    def _walk(self) -> Iterable[str]:
        for folder, folders, names in os.walk(self.root / self._below):
            folders[:] = [name for name in folders if name != "__pycache__"]
            below = os.path.relpath(folder, self.root).replace(os.sep, "/")
            for name in names:
                yield name if below == "." else f"{below}/{name}"

    def read(self, path: str) -> bytes:
        target = self.root / path
        try:
            descriptor = os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise SbomError("ST-M01", "this is no regular file", where=str(target))
                data = file.read(MAX_FILE + 1)
        except OSError as error:
            raise SbomError(
                "ST-M01", f"the file cannot be read: {error.strerror}", where=str(target)
            ) from None
        if len(data) > MAX_FILE:
            raise SbomError(
                "ST-M01", "the file is too large", where=str(target), expected=f"{MAX_FILE} bytes"
            )
        return data

    def sha256(self, path: str) -> str:
        try:
            with open(self.root / path, "rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError:
            return ""
