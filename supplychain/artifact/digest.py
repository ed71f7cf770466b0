"""Digests of files: the whole file's sha256 and the digests of its blocks, computed in one read.

A block digest binds one 64 KiB block, so that a reader can check just the bytes that it uses:

    leaf = sha256(0x00 || block)
    root = sha256(0x01 || "sha256" || 0x00 || u64 block size || u64 file size || leaf_0 || leaf_1 || ...)
    (big-endian integers)

The prefixes keep leaves and roots apart, the list binds positions, the size binds the end. Leaves are stored
as a flat list of 32 bytes each (0.05 % of the file). Standard library only; hashlib releases the interpreter
lock, so threads use all cores.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, TypeVar

Item = TypeVar("Item")
File = TypeVar("File", bound="Sized")
Result = TypeVar("Result")

BLOCK_SIZE = 65536
LEAF_SIZE = 32
CHUNK = 16 * BLOCK_SIZE  # bytes of one read: 1 MiB
QUEUE = 2  # chunks that may wait for their leaves: bounds memory to 4 MiB a thread
SMALL = 1 << 20  # bytes; below it, files of one folder are hashed by one thread
GROUP = 256  # small files that travel together: handing one over costs as much as hashing a few kilobytes
MAX_THREADS = 32  # hash 50 GB/s, more than any storage gives

Progress = Callable[[int], None]  # called with the number of bytes just hashed


def leaf(block: bytes | memoryview) -> bytes:
    digest = hashlib.sha256(b"\x00")
    digest.update(block)
    return digest.digest()


def leaves_of(data: bytes | memoryview) -> bytes:
    """The leaf digests of `data`, which starts at a block boundary, one after another."""
    view = memoryview(data)
    return b"".join(leaf(view[start : start + BLOCK_SIZE]) for start in range(0, len(view), BLOCK_SIZE))


def block_root(size: int, leaves: bytes) -> str:
    """The root (hex) over the leaf digests of a file of `size` bytes."""
    return block_root_of(size, [leaves])


def block_root_of(size: int, parts: Iterable[bytes]) -> str:
    """The same over leaf digests that come in parts, one after another."""
    header = b"\x01sha256\x00" + BLOCK_SIZE.to_bytes(8, "big") + size.to_bytes(8, "big")
    digest = hashlib.sha256(header)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def hash_descriptor(
    descriptor: int, *, blocks: bool, progress: Progress | None = None
) -> tuple[int, str, bytes]:
    """Read an open file once: (bytes read, sha256 hex, leaf digests or b"" without `blocks`).

    Leaves of one chunk are computed on a second thread while the first goes on with the whole-file digest, so
    that one big file is hashed by two cores.
    """
    whole = hashlib.sha256()
    size = 0
    pending: list[Future[bytes]] = []
    leaves: list[bytes] = []
    pool: ThreadPoolExecutor | None = None
    try:
        while True:
            chunk = read_exactly(descriptor, size, CHUNK)
            if not chunk:
                break
            if blocks:
                if len(chunk) == CHUNK:
                    pool = pool or ThreadPoolExecutor(1)
                    pending.append(pool.submit(leaves_of, chunk))
                    if len(pending) > QUEUE:
                        leaves.append(pending.pop(0).result())
                else:
                    leaves.extend(future.result() for future in pending)
                    pending.clear()
                    leaves.append(leaves_of(chunk))
            whole.update(chunk)
            size += len(chunk)
            if progress:
                progress(len(chunk))
            if len(chunk) < CHUNK:
                break
        leaves.extend(future.result() for future in pending)
    finally:
        if pool:
            pool.shutdown()
    return size, whole.hexdigest(), b"".join(leaves)


def read_exactly(descriptor: int, offset: int, length: int) -> bytes:
    """Up to `length` bytes at `offset`; fewer only at the end of the file. A private copy, never a mapping of
    the file.
    """
    data = os.pread(descriptor, length, offset)
    if len(data) == length or not data:
        return data
    parts = [data]
    while (have := sum(map(len, parts))) < length and (
        more := os.pread(descriptor, length - have, offset + have)
    ):
        parts.append(more)
    return b"".join(parts)


class Sized(Protocol):
    """Something with a path and a size in bytes: a file on disk or in a manifest."""

    @property
    def path(self) -> str: ...

    @property
    def size(self) -> int: ...


def in_groups(
    work: Callable[[Sequence[File], Progress], Sequence[Result]],
    files: Sequence[File],
    progress: Progress | None,
) -> list[Result]:
    """`work(group, report)` for groups of files, side by side; all results in no promised order.

    Big files go one by one, the largest first, so that none is left alone at the end; small ones by folder,
    so that a folder is opened once for many.
    """
    big = sorted((file for file in files if file.size >= SMALL), key=lambda file: -file.size)
    groups: list[Sequence[File]] = [[file] for file in big]
    folder: str | None = None
    for file in files:  # in the order of their paths
        if file.size >= SMALL:
            continue
        parent = file.path.rpartition("/")[0]
        if parent != folder or len(groups[-1]) >= GROUP:
            groups.append([])
            folder = parent
        groups[-1].append(file)  # type: ignore[attr-defined]  # the groups of small files are lists
    return [result for results in on_all_cores(work, groups, progress) for result in results]


def on_all_cores(
    work: Callable[[Item, Progress], Result], items: Sequence[Item], progress: Progress | None
) -> list[Result]:
    """`work(item, report)` for each item, side by side; the results in the order of the items.

    Whatever ends it early, Ctrl-C too, stops the other threads at their next chunk.
    """
    lock = threading.Lock()
    stopped = threading.Event()

    def report(count: int) -> None:
        if stopped.is_set():
            raise InterruptedError("another file ended the hashing")
        if progress:
            with lock:
                progress(count)

    with ThreadPoolExecutor(threads()) as pool:
        try:
            return [_result(future) for future in [pool.submit(work, item, report) for item in items]]
        except BaseException:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _result(future: Future[Result]) -> Result:
    """Wait in slices: a wait without end would miss a Ctrl-C that comes just before it begins."""
    while True:
        try:
            return future.result(timeout=0.5)
        except TimeoutError:
            if future.done():
                return future.result()


def threads() -> int:
    """How many threads hash side by side: the cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, MAX_THREADS)
