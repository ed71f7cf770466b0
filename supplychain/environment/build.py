"""Building a training environment: from a lock to a folder that can be signed and verified from outside.

Promises that the folder holds the files of the locked wheels and nothing else (no pip, no bytecode, no links,
no activation scripts), that it appears under its final, content-addressed name only when complete, that a
second call with the same inputs returns it at once, and that a build which was stopped goes on with the
wheels it had. Nothing that is installed is executed. The folder is an artifact of kind "environment"; signing
it is the caller's.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock
from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from supplychain.artifact import MANIFEST, build_manifest, canonical_json, write_durably
from supplychain.environment import wheels
from supplychain.environment.interpreter import Interpreter, base_files, file_sha256, hash_files, probe
from supplychain.environment.lock import Lock, Pin, normalize, parse_lock
from supplychain.environment.verify import ENVIRONMENT, INTERPRETER, SCHEMA
from supplychain.errors import SecureTrainError

BUILDER = "1"  # part of the content address: raise it when the same inputs give another tree
# What `venv` makes and a training environment does not need.
_UNWANTED = (
    "lib64",
    "include",
    ".gitignore",
    "bin/activate",
    "bin/activate.csh",
    "bin/activate.fish",
    "bin/Activate.ps1",
)

Progress = Callable[[str], None]


def build_environment(
    lock: Path,
    store: Path,
    *,
    python: Path | None = None,
    wheelhouse: Path | None = None,
    project_wheel: Path | None = None,
    editable: Path | None = None,
    profile: str = "",
    cache: Path | None = None,
    progress: Progress | None = None,
) -> Path:
    """Build the environment that `lock` describes below `store`, or return the one that is there; its path.

    `python` is the interpreter to build on (default: the one that runs this), `wheelhouse` a folder of wheels
    to take everything from, `project_wheel` our own wheel (its sha256 becomes the code identity), `editable`
    the checkout that an editable `project_wheel` leads to, `profile` a name for the lock, `cache` where
    obtained wheels are kept. Raises ST-E01 (lock), ST-E06 (Python), ST-E07 (a wheel differs), ST-E08 (a wheel
    cannot be had), ST-U04 (folder or disk).
    """
    report = progress or (lambda text: None)
    locked = _read_lock(lock)
    interpreter = probe(python or Path(sys.executable))
    pins = locked.applicable(interpreter.markers)
    own = _project_pin(project_wheel) if project_wheel else None
    address = _address(locked, interpreter, own, editable, profile)
    final = store.resolve() / f"env-{address[:16]}"
    if (final / MANIFEST).is_file():
        report(f"{final.name} is built already")
        return final
    with _folder(store), FileLock(store / f".{final.name}.lock"):
        if (final / MANIFEST).is_file():
            return final
        started = time.monotonic()
        report(f"building {final.name}: {len(pins)} packages, Python {interpreter.version}")
        obtained = wheels.obtain(pins, interpreter, cache or store / ".wheels", wheelhouse, report)
        if own and project_wheel:
            obtained.append(wheels.Wheel(own, project_wheel, own.hashes[0]))
        partial = store.resolve() / f".{final.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        try:
            _fill(partial, final, interpreter, locked, pins, obtained, own, editable, profile, report)
            _replace(partial, final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        report(f"{final.name} is built ({time.monotonic() - started:.0f} s)")
    return final


def _fill(
    root: Path,
    final: Path,
    interpreter: Interpreter,
    locked: Lock,
    pins: Sequence[Pin],
    obtained: Sequence[wheels.Wheel],
    own: Pin | None,
    editable: Path | None,
    profile: str,
    report: Progress,
) -> None:
    """Everything that goes into the folder, and its manifest last."""
    _make_venv(root, interpreter)
    version = ".".join(interpreter.version.split(".")[:2])
    site = f"lib/python{version}/site-packages"
    threads = max(2, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)
    installed = wheels.unpack(
        obtained, root, final, site, editable=bool(editable), threads=threads, progress=report
    )
    files = hash_files(
        base_files(interpreter.executable, interpreter.shared, interpreter.stdlib), threads=threads
    )
    write_durably(
        root / INTERPRETER,
        canonical_json(
            {
                "executable": str(interpreter.executable),
                "shared": str(interpreter.shared) if interpreter.shared else None,
                "stdlib": str(interpreter.stdlib),
                "files": files,
            }
        ),
    )
    code = {"wheel": own.name + "-" + own.version, "sha256": own.hashes[0]} if own else {}
    applied = {(pin.name, pin.version) for pin in pins}
    document: dict[str, Any] = {
        "schema": SCHEMA,
        "lock": locked.digest,
        "profile": profile,
        "site": site,
        "python": {
            "version": interpreter.version,
            "implementation": interpreter.implementation,
            "platform": interpreter.platform,
            "executable": str(interpreter.executable),
            "sha256": files[str(interpreter.executable)],
        },
        "markers": interpreter.markers,
        "code": code | ({"editable": str(editable.resolve())} if editable else {}),
        "distributions": [
            {
                "name": item.wheel.pin.name,
                "version": item.wheel.pin.version,
                "wheel": item.wheel.path.name,
                "sha256": item.wheel.sha256,
                "record": item.record,
                "files": item.files,
                "info": item.info,
            }
            for item in sorted(installed, key=lambda item: item.wheel.pin.name)
        ],
        "skipped": [
            {"name": pin.name, "version": pin.version}
            for pin in locked.pins
            if (pin.name, pin.version) not in applied
        ],
    }
    write_durably(root / ENVIRONMENT, canonical_json(document))
    _remove_empty_folders(root)
    build_manifest(root, "environment", blocks=False)


def _read_lock(lock: Path) -> Lock:
    try:
        data = lock.read_bytes()
    except OSError as error:
        raise SecureTrainError(
            "ST-U01",
            f"the lock cannot be read: {error.strerror}",
            where=str(lock),
            next_step="name a lock with --lock",
        ) from None
    return parse_lock(data, where=lock.name)


def _project_pin(wheel: Path) -> Pin:
    """Our own wheel as a pin: its digest is the code identity."""
    try:
        name, version, _, _ = parse_wheel_filename(wheel.name)
        return Pin(normalize(name), str(version), (file_sha256(wheel),), None, 0)
    except (OSError, InvalidWheelFilename) as error:
        raise SecureTrainError(
            "ST-U01",
            f"the project's wheel cannot be read: {error}",
            where=str(wheel),
            next_step="check --project-wheel",
        ) from None


def _address(
    locked: Lock, interpreter: Interpreter, own: Pin | None, editable: Path | None, profile: str
) -> str:
    """What the environment is a function of, as one digest."""
    return hashlib.sha256(
        canonical_json(
            {
                "builder": BUILDER,
                "lock": locked.digest,
                "profile": profile,
                "python": interpreter.version,
                "executable": str(interpreter.executable),
                "interpreter": file_sha256(interpreter.shared or interpreter.executable),
                "platform": interpreter.platform,
                "code": own.hashes[0] if own else None,
                "editable": str(editable.resolve()) if editable else None,
            }
        )
    ).hexdigest()


@contextlib.contextmanager
def _folder(store: Path) -> Iterator[None]:
    """The store exists and can be written; a disk that fills up on the way is one error."""
    try:
        store.mkdir(parents=True, exist_ok=True)
        if not os.access(store, os.W_OK):
            raise PermissionError(errno.EACCES, "permission denied")
        yield
    except OSError as error:
        if error.errno not in (
            errno.ENOSPC,
            errno.EDQUOT,
            errno.EACCES,
            errno.EROFS,
            errno.EPERM,
            errno.ENOTDIR,
            errno.EEXIST,
        ):
            raise
        raise SecureTrainError(
            "ST-U04",
            f"the environment cannot be written: {error.strerror or error}",
            where=str(error.filename or store),
            next_step="free some space, or name another folder with --store",
        ) from None


def _make_venv(root: Path, interpreter: Interpreter) -> None:
    """A virtual environment of copies: an artifact may hold no links, and its interpreter must be its own
    file.
    """
    command = [str(interpreter.executable), "-I", "-m", "venv", "--copies", "--without-pip", str(root)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode != 0:
        raise SecureTrainError(
            "ST-E06",
            "the interpreter cannot make a virtual environment",
            where=str(interpreter.executable),
            found=" ".join((done.stdout + done.stderr).split())[-300:],
            next_step="install its venv module (on Debian and Ubuntu: python3-venv), or name another Python",
        )
    for name in (*_UNWANTED, *(f"bin/{path.name}" for path in (root / "bin").glob("python3.*"))):
        path = root / name
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path)
    # Written anew: the one that `venv` writes tells the temporary name.
    (root / "pyvenv.cfg").write_text(
        f"home = {interpreter.executable.parent}\n"
        "include-system-site-packages = false\n"
        f"version = {interpreter.version}\n"
        f"executable = {interpreter.executable}\n"
    )


def _remove_empty_folders(root: Path) -> None:
    for folder, _, _ in os.walk(root, topdown=False):
        if folder != str(root) and not os.listdir(folder):
            os.rmdir(folder)


def _replace(partial: Path, final: Path) -> None:
    """Put the finished folder under its name; one that lacks a manifest there was never finished."""
    shutil.rmtree(final, ignore_errors=True)
    os.rename(partial, final)
    descriptor = os.open(final.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
