"""Walking a folder safely: what an artifact may contain, and how its files are opened.

Owns the rules for names and file types. Every folder and file is opened relative to its parent's descriptor
without following links, so that nothing outside the root can be read, whatever is swapped meanwhile. Standard
library only.
"""

from __future__ import annotations

import os
import stat
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from supplychain.errors import SecureTrainError

RESERVED = "secure-train"  # holds the manifest, the block digests and the signatures
MAX_PART = 255  # bytes of one name: what common file systems take
MAX_PATH = 4096


@dataclass(frozen=True)
class TreeFile:
    """A regular file found in a folder. `mode` is 0o755 if anybody may execute it, else 0o644."""

    path: str
    size: int
    mode: int


def path_problem(path: str) -> str | None:
    """Why `path` may not stand in an artifact, or None. Pure: used for names on disk and for names in foreign
    manifests.
    """
    try:
        raw = path.encode("utf-8")
    except UnicodeEncodeError:
        return "the name is not valid UTF-8"
    if not path or len(raw) > MAX_PATH:
        return "the name is empty or too long"
    if unicodedata.normalize("NFC", path) != path:
        return "the name is not in Unicode normal form C"
    if "\\" in path:
        return "the name holds a backslash"
    if any(unicodedata.category(char) in ("Cc", "Cf", "Zl", "Zp") for char in path):
        return "the name holds a control or formatting character"
    for part in path.split("/"):
        if part in ("", ".", ".."):
            return "the name is absolute, or has an empty, `.` or `..` part"
        if len(part.encode("utf-8")) > MAX_PART:
            return "a part of the name is longer than 255 bytes"
    return None


def collision(paths: list[str]) -> tuple[str, str] | None:
    """Two different names that some file systems cannot tell apart, or that need one name to be both file and
    folder.
    """
    seen: dict[str, str] = {}
    for path in paths:
        other = seen.setdefault(unicodedata.normalize("NFC", path.casefold()), path)
        if other != path:
            return other, path
    folders: dict[str, str] = {}
    for path in paths:
        parent = path
        while "/" in parent:
            parent = parent.rpartition("/")[0]
            key = unicodedata.normalize("NFC", parent.casefold())
            if key in seen:
                return seen[key], path
            other = folders.setdefault(key, parent)
            if other != parent:
                return other, parent
    return None


def _unsafe(root: Path, path: str, problem: str) -> SecureTrainError:
    return SecureTrainError(
        "ST-U06",
        f"{problem}, so the folder cannot be an artifact",
        where=f"{root}: {path.encode('utf-8', 'surrogateescape')!r}"
        if not path.isprintable()
        else f"{root}/{path}",
        next_step="remove or rename it, or copy the folder without it",
    )


def walk(root: Path) -> list[TreeFile]:
    """All regular files under `root`, sorted by path. Links, devices, empty folders and bad names are refused
    (ST-U06).
    """
    files: list[TreeFile] = []
    for name, descriptor in _scan(root):
        status = os.stat(name.rpartition("/")[2], dir_fd=descriptor, follow_symlinks=False)
        if status.st_mode & (stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX):
            raise _unsafe(root, name, "the file has a set-uid, set-gid or sticky bit")
        files.append(TreeFile(name, status.st_size, 0o755 if status.st_mode & 0o111 else 0o644))
    files.sort(key=lambda file: file.path.encode())
    clash = collision([file.path for file in files])
    if clash:
        raise _unsafe(
            root,
            clash[1],
            f"two names can be the same on another file system ({clash[0]!r} and {clash[1]!r})",
        )
    return files


def _scan(root: Path) -> Iterator[tuple[str, int]]:
    """Yield (relative path, descriptor of its folder) of each regular file. Depth is bounded by MAX_PATH."""
    with open_folder(root) as top:
        yield from _scan_folder(root, "", top)


def _scan_folder(root: Path, prefix: str, descriptor: int) -> Iterator[tuple[str, int]]:
    with os.scandir(descriptor) as entries:
        found = sorted(entries, key=lambda entry: os.fsencode(entry.name))
    if not found and prefix:
        raise _unsafe(root, prefix.rstrip("/"), "the folder is empty, and a manifest cannot say so")
    for entry in found:
        path = prefix + entry.name
        problem = path_problem(path)
        if problem:
            raise _unsafe(root, path, problem)
        if entry.is_dir(follow_symlinks=False):
            child = os.open(
                entry.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=descriptor
            )
            try:
                yield from _scan_folder(root, path + "/", child)
            finally:
                os.close(child)
        elif entry.is_file(follow_symlinks=False):
            yield path, descriptor
        else:
            raise _unsafe(
                root, path, "it is a link" if entry.is_symlink() else "it is neither a file nor a folder"
            )


@contextmanager
def open_folder(root: Path) -> Iterator[int]:
    """A descriptor of the folder `root`. The root itself may be reached through links: it is where the user
    pointed.
    """
    try:
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise SecureTrainError(
            "ST-U01", "the folder does not exist", where=str(root), next_step="check the path"
        ) from None
    except NotADirectoryError:
        raise SecureTrainError(
            "ST-U01", "this is a file, and a folder is needed", where=str(root), next_step="name the folder"
        ) from None
    except PermissionError:
        raise SecureTrainError(
            "ST-U01",
            "the folder cannot be read by this user",
            where=str(root),
            next_step="check its permissions",
        ) from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def open_file(root: Path, path: str) -> int:
    """A read-only descriptor of the regular file `path` under `root`; no component of `path` may be a link.
    FileNotFoundError if absent.
    """
    parts = path.split("/")
    with open_folder(root) as descriptor:
        opened: list[int] = []
        try:
            for part in parts[:-1]:
                descriptor = os.open(
                    part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=descriptor
                )
                opened.append(descriptor)
            # O_NONBLOCK: opening a FIFO that replaced the file must not hang.
            file = os.open(
                parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=descriptor
            )
        except NotADirectoryError:
            raise FileNotFoundError(path) from None
        except PermissionError:
            raise SecureTrainError(
                "ST-U01",
                "the file cannot be read by this user",
                where=f"{root}/{path}",
                next_step="check its permissions",
            ) from None
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise _unsafe(root, path, "it is a link, or cannot be opened") from None
        finally:
            for folder in opened:
                os.close(folder)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise _unsafe(root, path, "it is not a regular file")
    return file
