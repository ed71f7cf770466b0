"""Walking a folder safely: what an artifact may contain, and how its files are opened.

Owns the rules for names and file types, and what an error of the operating system means. Every folder and
file is opened relative to its parent's descriptor without following links, so that nothing outside the root
can be read, whatever is swapped meanwhile. Standard library only.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import unicodedata
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from supplychain.artifact.digest import read_exactly
from supplychain.errors import SecureTrainError

RESERVED = "secure-train"  # holds the manifest, the block digests and the signatures
MAX_PART = 255  # bytes of one name: what common file systems take
MAX_PATH = 2048  # bytes; with any sane folder before it, it stays below what the system takes
MAX_DEPTH = 64  # parts; each is an open descriptor while a tree is walked
# Short paths of letters, digits and a few signs, none of whose parts is `.` or `..`.
_PART = r"(?!\.{1,2}(?:/|\Z))[A-Za-z0-9._+=@,~-]{1,100}"
_PLAIN = re.compile(rf"{_PART}(?:/{_PART}){{0,15}}")
_UNSEEN = ("Cc", "Cf", "Zl", "Zp")  # Unicode categories: control, format, line and paragraph separators


@dataclass(frozen=True, slots=True)
class TreeFile:
    """A regular file found in a folder. `mode` is 0o755 if anybody may execute it, else 0o644."""

    path: str
    size: int
    mode: int


def path_problem(path: str) -> str | None:
    """Why `path` may not stand in an artifact, or None. Pure: used for names on disk and for names in foreign
    manifests.
    """
    if _PLAIN.fullmatch(path):  # nearly every path: nothing in it can be wrong
        return None
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
    if not path.isprintable() and any(unicodedata.category(char) in _UNSEEN for char in path):
        return "the name holds a control or formatting character"
    parts = path.split("/")
    if len(parts) > MAX_DEPTH:
        return f"the folders are nested deeper than {MAX_DEPTH}"
    for part in parts:
        if part in ("", ".", ".."):
            return "the name is absolute, or has an empty, `.` or `..` part"
        if len(part.encode("utf-8")) > MAX_PART:
            return "a part of the name is longer than 255 bytes"
    return None


def collision(paths: Iterable[str]) -> tuple[str, str] | None:
    """Two different names that some file systems cannot tell apart, or that need one name to be both file and
    folder.
    """
    names: dict[str, str] = {}  # as a caseless system sees them -> as they are spelled, folders with a slash
    folders: set[str] = set()
    for path in paths:
        other = names.setdefault(_caseless(path), path)
        if other != path:
            return other, path
        parent = path.rpartition("/")[0]
        while parent and parent not in folders:
            folders.add(parent)
            other = names.setdefault(_caseless(parent), parent + "/")
            if other != parent + "/":
                return other, parent + "/"
            parent = parent.rpartition("/")[0]
    return None


def _caseless(name: str) -> str:
    """What a caseless file system compares (Unicode, canonical caseless matching)."""
    if name.isascii():
        return name.lower()
    return unicodedata.normalize("NFD", unicodedata.normalize("NFD", name).casefold())


def _unsafe(root: Path, path: str, problem: str) -> SecureTrainError:
    return SecureTrainError(
        "ST-U06",
        f"{problem}, so the folder cannot be an artifact",
        where=f"{root}/{path}",
        next_step="remove or rename it, or copy the folder without it",
    )


def unreadable(root: Path, path: str, error: OSError) -> SecureTrainError:
    return SecureTrainError(
        "ST-A10",
        f"a file or folder cannot be read: {error.strerror}",
        where=f"{root}/{path}" if path else str(root),
        next_step="check its permissions and the health of the storage",
    )


def walk(root: Path, *, without: Collection[str] = ()) -> list[TreeFile]:
    """All regular files under `root`, sorted by path; the first problem that `survey` finds is raised."""
    files, problems = survey(root, without=without)
    if problems:
        raise problems[0]
    return files


def survey(root: Path, *, without: Collection[str] = ()) -> tuple[list[TreeFile], list[SecureTrainError]]:
    """All regular files under `root`, sorted by path, and everything that keeps it from being an artifact.

    Links, devices, empty folders and bad names are ST-U06, what cannot be read is ST-A10. `without` names
    entries of `root` itself that are passed over.
    """
    found = _Survey(root, without)
    with open_folder(root) as descriptor:
        found.folder(descriptor, "")
    found.files.sort(key=lambda file: file.path.encode())
    clash = collision(file.path for file in found.files)
    if clash:
        problem = f"{clash[0]!r} and {clash[1]!r} can be one name on another file system"
        found.problems.append(_unsafe(root, clash[1], problem))
    return found.files, found.problems


class _Survey:
    """The state of one walk. Depth is bounded by `path_problem`."""

    def __init__(self, root: Path, without: Collection[str]) -> None:
        self.root = root
        self.without = without
        self.files: list[TreeFile] = []
        self.problems: list[SecureTrainError] = []

    def folder(self, descriptor: int, prefix: str) -> None:
        with os.scandir(descriptor) as scan:
            entries = sorted(scan, key=lambda entry: os.fsencode(entry.name))
        if not entries and prefix:
            self._refuse(prefix.rstrip("/"), "the folder is empty, and a manifest cannot say so")
        for entry in entries:
            if not prefix and entry.name in self.without:
                continue
            path = prefix + entry.name
            problem = path_problem(path)
            if problem:
                self._refuse(path, problem)
                continue
            try:
                self._entry(descriptor, entry, path)
            except OSError as error:
                self.problems.append(unreadable(self.root, path, error))

    def _entry(self, descriptor: int, entry: os.DirEntry[str], path: str) -> None:
        if entry.is_dir(follow_symlinks=False):
            child = os.open(entry.name, _FOLDER | os.O_NOFOLLOW, dir_fd=descriptor)
            try:
                self.folder(child, path + "/")
            finally:
                os.close(child)
        elif entry.is_file(follow_symlinks=False):
            status = os.stat(entry.name, dir_fd=descriptor, follow_symlinks=False)
            if status.st_mode & (stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX):
                self._refuse(path, "the file has a set-uid, set-gid or sticky bit")
            self.files.append(TreeFile(path, status.st_size, 0o755 if status.st_mode & 0o111 else 0o644))
        else:
            self._refuse(path, "it is a link" if entry.is_symlink() else "it is neither a file nor a folder")

    def _refuse(self, path: str, problem: str) -> None:
        self.problems.append(_unsafe(self.root, path, problem))


_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO that replaced the file must not hang.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@contextmanager
def open_folder(root: Path, path: str = "") -> Iterator[int]:
    """A descriptor of the folder `path` under `root`. The root itself may be reached through links: it is
    where the user pointed; no part of `path` may be one. FileNotFoundError if there is no such `path`.
    """
    opened: list[int] = []
    try:
        try:
            opened.append(os.open(root, _FOLDER))
        except FileNotFoundError:
            raise _no_folder(root, "the folder does not exist") from None
        except NotADirectoryError:
            raise _no_folder(root, "this is a file, and a folder is needed") from None
        except OSError as error:
            raise unreadable(root, "", error) from None
        for part in path.split("/") if path else ():
            try:
                opened.append(os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=opened[-1]))
            except OSError as error:
                raise _not_opened(root, path, error) from None
        yield opened[-1]
    finally:
        for descriptor in reversed(opened):
            os.close(descriptor)


def _no_folder(root: Path, what: str) -> SecureTrainError:
    return SecureTrainError("ST-U01", what, where=str(root), next_step="check the path")


class Reader:
    """Opens files under a root, as `open_file` does, and keeps the last folder open for its next file."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._stack = ExitStack()
        self._folder: str | None = None
        self._descriptor = -1

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def open(self, path: str) -> int:
        """A read-only descriptor of the regular file `path`; no component may be a link. FileNotFoundError if
        absent.
        """
        folder, _, name = path.rpartition("/")
        if folder != self._folder:
            self._stack.close()
            self._folder = None
            self._descriptor = self._stack.enter_context(open_folder(self._root, folder))
            self._folder = folder
        try:
            file = os.open(name, _FILE, dir_fd=self._descriptor)
        except OSError as error:
            raise _not_opened(self._root, path, error) from None
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise _unsafe(self._root, path, "it is not a regular file")
        return file

    @contextmanager
    def reading(self, path: str) -> Iterator[int]:
        """`open` for a `with` block in which an error of the storage becomes ST-A10."""
        descriptor = self.open(path)
        try:
            yield descriptor
        except OSError as error:
            raise unreadable(self._root, path, error) from None
        finally:
            os.close(descriptor)


def open_file(root: Path, path: str) -> int:
    """A read-only descriptor of the regular file `path` under `root`; no component of `path` may be a link.
    FileNotFoundError if absent.
    """
    with Reader(root) as reader:
        return reader.open(path)


def _not_opened(root: Path, path: str, error: OSError) -> Exception:
    if isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return FileNotFoundError(path)
    if error.errno == errno.ELOOP:
        return _unsafe(root, path, "it is a link, or lies behind one")
    if error.errno == errno.ENXIO:
        return _unsafe(root, path, "it is not a regular file")
    return unreadable(root, path, error)


def stamps(root: Path, paths: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Device, inode, size and the times (ns) of contents and of state, of each path that is a plain file.

    Nobody but an administrator can set the last of them: a file whose stamp is the same is, against everybody
    else, the same file.
    """
    found: dict[str, tuple[int, ...]] = {}
    with Reader(root) as reader:
        for path in paths:
            try:
                with reader.reading(path) as descriptor:
                    status = os.fstat(descriptor)
            except (FileNotFoundError, SecureTrainError):
                continue
            times = (status.st_mtime_ns, status.st_ctime_ns)
            found[path] = (status.st_dev, status.st_ino, status.st_size, *times)
    return found


def names(root: Path, path: str) -> list[str]:
    """What the folder `path` under `root` holds, sorted; nothing if there is no such folder."""
    try:
        with open_folder(root, path) as descriptor:
            return sorted(os.listdir(descriptor))
    except FileNotFoundError:
        return []


@contextmanager
def reading(root: Path, path: str) -> Iterator[int]:
    """`open_file` for a `with` block in which an error of the storage becomes ST-A10."""
    with Reader(root) as reader, reader.reading(path) as descriptor:
        yield descriptor


def read_file(root: Path, path: str, *, limit: int, code: str) -> bytes:
    """The whole of `path`, read once; an error with `code` if it is larger than `limit`, FileNotFoundError if
    absent.
    """
    with reading(root, path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > limit:
            raise SecureTrainError(code, f"the file is larger than {limit} bytes", where=f"{root}/{path}")
        return read_exactly(descriptor, 0, size)


def read_named(path: Path, *, limit: int, what: str, code: str = "ST-U01") -> bytes:
    """A small file that the user named; links are followed, because he may. An error with `code` if it is
    absent, too large or no file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a FIFO must not hang us
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SecureTrainError(
            code, f"{what} cannot be read: {reason}", where=str(path), next_step="check the path"
        ) from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > limit:
            problem = (
                f"{what} is larger than {limit} bytes"
                if stat.S_ISREG(status.st_mode)
                else f"{what} is no regular file"
            )
            raise SecureTrainError(code, problem, where=str(path))
        return read_exactly(descriptor, 0, status.st_size)
    finally:
        os.close(descriptor)
