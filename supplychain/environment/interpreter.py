"""The base interpreter under an environment: what it is, and whether its files are as recorded.

A virtual environment borrows its interpreter's library and standard library, so "every file is as signed"
must reach there too. Owns the question to an interpreter (asked once, when an environment is built: isolated,
without `site`) and the list of its files. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from supplychain.errors import SecureTrainError

MINIMUM = (3, 11)
# Parts of a standard library that no program imports at run time, or that belong to somebody else.
SKIPPED = frozenset(
    {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "ensurepip"}
)
_CHUNK = 1 << 20

# Runs inside the interpreter in question, with -I -S: no .pth, no site, no current directory. The folder that
# holds our own `packaging` is appended so that tags and markers are computed by that interpreter and not
# guessed.
_PROBE = """
import json, os, platform, sys, sysconfig
sys.path.append(sys.argv[1])
from packaging.markers import default_environment
from packaging.tags import sys_tags
base = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
library = sysconfig.get_config_var("INSTSONAME") or ""
folder = sysconfig.get_config_var("LIBDIR") or ""
shared = os.path.join(folder, library)
print(json.dumps({
    "executable": base,
    "version": platform.python_version(),
    "implementation": sys.implementation.name,
    "platform": sysconfig.get_platform(),
    "stdlib": os.path.realpath(sysconfig.get_path("stdlib", vars={"base": sys.base_prefix, "installed_base": sys.base_prefix})),
    "shared": os.path.realpath(shared) if ".so" in library and os.path.isfile(shared) else None,
    "markers": dict(default_environment()),
    "tags": [str(tag) for tag in sys_tags()],
}))
"""  # noqa: E501


@dataclass(frozen=True)
class Interpreter:
    """What an interpreter said of itself. `tags` are the wheel tags that it accepts, best first."""

    executable: Path
    version: str
    implementation: str
    platform: str
    stdlib: Path
    shared: Path | None
    markers: dict[str, str]
    tags: tuple[str, ...]


def probe(python: Path) -> Interpreter:
    """Ask an interpreter what it is. It is started isolated, and must be one that the user trusts (a base
    Python).
    """
    import packaging

    beside = str(Path(packaging.__file__).resolve().parent.parent)
    command = [str(python), "-I", "-S", "-B", "-c", _PROBE, beside]
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
        said = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise SecureTrainError(
            "ST-E06",
            "the interpreter could not be started",
            where=str(python),
            found=str(error),
            next_step="name a Python 3.11 or newer",
        ) from None
    found = Interpreter(
        executable=Path(said["executable"]),
        version=said["version"],
        implementation=said["implementation"],
        platform=said["platform"],
        stdlib=Path(said["stdlib"]),
        shared=Path(said["shared"]) if said["shared"] else None,
        markers=said["markers"],
        tags=tuple(said["tags"]),
    )
    if tuple(int(part) for part in said["markers"]["python_version"].split(".")) < MINIMUM:
        raise SecureTrainError(
            "ST-E06",
            "the interpreter is too old",
            where=str(python),
            expected="Python 3.11 or newer",
            found=f"Python {found.version}",
            next_step="name a newer one",
        )
    return found


def file_sha256(path: Path) -> str:
    """sha256 of a file, in hex. Links are followed: it is what Python would load."""
    outer = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_CHUNK):
            outer.update(block)
    return outer.hexdigest()


def base_files(executable: Path, shared: Path | None, stdlib: Path) -> list[Path]:
    """The interpreter's own files: the program, its shared library, and the standard library."""
    found = [executable, *([shared] if shared else []), *_walk(stdlib)]
    zipped = stdlib.with_name(
        f"{stdlib.name.replace('.', '')}.zip"
    )  # stands before the standard library on sys.path
    found += [zipped] if zipped.exists() else []
    return sorted(set(found), key=str)


def _walk(folder: Path) -> Iterator[Path]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            if entry.name not in SKIPPED and not entry.name.startswith("config-"):
                yield from _walk(Path(entry.path))
        elif entry.is_file() or entry.is_dir():  # modules too: links to folders, bytecode outside __pycache__
            yield Path(entry.path)


def hash_files(
    paths: list[Path], *, threads: int, progress: Callable[[int], None] | None = None
) -> dict[str, str]:
    """Path to sha256, hashed on several threads; a file that vanished or cannot be read is left out."""

    def one(path: Path) -> tuple[str, str] | None:
        try:
            digest = f"folder {path.resolve()}" if path.is_dir() else file_sha256(path)
            if progress:
                progress(path.stat().st_size)
        except OSError:
            return None
        return str(path), digest

    with ThreadPoolExecutor(threads) as pool:
        return dict(item for item in pool.map(one, paths) if item)
