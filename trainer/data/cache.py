"""A folder of downloaded chunks, named by their content, shared by all processes of a host.

Promises that a name never holds part of a chunk (written aside, made durable, renamed), that a chunk is
downloaded once however many ask at the same time (one lock a name), that the folder stays below its size (the
chunks used least recently go), and that nothing is deleted but what was downloaded: only files with names of
its form, in a folder that it made. It does not promise that a chunk is still what it was: who reads verifies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from supplychain.artifact import SecureTrainError

MARK = "secure-train-chunks"
_NAME = re.compile(r"[0-9a-f]{64}")


class Cache:
    """Chunks in `folder`, at most `limit` bytes of them beside the one that was just fetched."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self._limit = folder, limit
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        mark = folder / MARK
        if not mark.exists() and any(entry.name != MARK for entry in folder.iterdir()):
            raise SecureTrainError(
                "ST-U05",
                "the folder for downloaded chunks holds something else",
                where=str(folder),
                expected="a folder that is new or empty",
                next_step="name another folder; this one is left alone",
            )
        mark.touch()

    def read(self, name: str, fetch: Callable[[], bytes]) -> int:
        """An open descriptor of the chunk `name` (64 hex digits), fetched if it is not here. The caller
        closes it; whether the bytes are right is for the caller too.
        """
        path = self._path(name)
        with contextlib.suppress(FileNotFoundError):
            return self._open(path)
        path.parent.mkdir(exist_ok=True)
        with self._locked(path.parent / f"{name}.lock"):
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                return self._open(path)
            self._write(path, fetch())
            descriptor = self._open(path)
        self._shrink(keep=path)
        return descriptor

    def drop(self, name: str) -> None:
        """Forget a chunk that turned out to be wrong."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.folder / name[:2] / name

    def _open(self, path: Path) -> int:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        os.utime(descriptor)  # used now
        return descriptor

    def _write(self, path: Path, data: bytes) -> None:
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            with open(partial, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            partial.rename(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def _shrink(self, keep: Path) -> None:
        """Remove what was not used for longest. Whoever still reads it has it open, and loses nothing."""
        with self._locked(self.folder / f"{MARK}.lock"):
            chunks = []
            for path in self.folder.glob("[0-9a-f][0-9a-f]/*"):
                if _NAME.fullmatch(path.name) and path.name.startswith(path.parent.name):
                    with contextlib.suppress(FileNotFoundError):
                        status = path.lstat()
                        chunks.append((status.st_mtime_ns, path, status.st_size))
            total = sum(size for _, _, size in chunks)
            for _, path, size in sorted(chunks):
                if total <= self._limit:
                    break
                if path != keep:
                    path.unlink(missing_ok=True)
                    total -= size
