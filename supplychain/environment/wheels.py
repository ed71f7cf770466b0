"""Wheels: obtaining the ones a lock pins, checking them, and unpacking them without running anything.

Promises that no byte of a wheel is unpacked before its sha256 is one that the lock allows, that every file
unpacked has the hash that the wheel's own RECORD states, and that nothing is written outside the environment,
byte-compiled, or put over another package's file. pip only downloads (hash mode, no dependencies, no builds),
through the user's own configuration; with a wheelhouse nothing is asked of the network. Wheels already
obtained are kept, so a build that was stopped goes on where it was.
"""

from __future__ import annotations

import base64
import binascii
import csv
import errno
import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, cast

import installer
from installer.destinations import SchemeDictionaryDestination
from installer.exceptions import InstallerError
from installer.records import Hash, RecordEntry
from installer.sources import WheelContentElement, WheelFile
from installer.utils import Scheme
from packaging.utils import InvalidWheelFilename, canonicalize_version, parse_wheel_filename

from supplychain.environment.interpreter import Interpreter, file_sha256
from supplychain.environment.lock import Pin, normalize
from supplychain.environment.verify import ALLOWED_PTH, wheel_digest
from supplychain.errors import SecureTrainError

Progress = Callable[[str], None]
DOWNLOADS = 4  # pip calls at once; more does not help on one connection
BATCH = 8  # small packages in one call
# Packages of hundreds of megabytes.
_LARGE = re.compile(r"torch|triton|nvidia-|cuda-")
REPORT_EVERY = 5.0  # seconds
MAX_FILES = 200_000  # in one wheel
MAX_UNPACKED = 16 << 30  # bytes, of one wheel
_SAFE = re.compile(r"[^\x00-\x1f\x7f\\]+")


@dataclass(frozen=True)
class Wheel:
    """A wheel on disk whose sha256 the lock allows."""

    pin: Pin
    path: Path
    sha256: str


@dataclass(frozen=True)
class Installed:
    """An unpacked wheel: digests of its RECORD as shipped, and of the files that it lists (see
    `wheel_digest`).
    """

    wheel: Wheel
    info: str
    record: str
    files: str


# --- obtaining ----------------------------------------------------------------------------------------------


def obtain(
    pins: Sequence[Pin], python: Interpreter, cache: Path, wheelhouse: Path | None, progress: Progress
) -> list[Wheel]:
    """A checked wheel for every pin, in the pins' order; ST-E08 names what cannot be had, ST-E07 what
    differs.
    """
    found: dict[str, Wheel] = {}
    folder = wheelhouse or cache
    if wheelhouse is None:
        cache.mkdir(parents=True, exist_ok=True)
    candidates = _candidates(folder, python)
    for pin in pins:
        wheel = _choose(pin, candidates, strict=wheelhouse is not None)
        if wheel:
            found[pin.name] = wheel
    missing = [pin for pin in pins if pin.name not in found]
    if missing and wheelhouse:
        raise SecureTrainError(
            "ST-E08",
            f"the wheelhouse lacks {len(missing)} of {len(pins)} packages",
            where=str(wheelhouse),
            expected=", ".join(f"{pin.name}=={pin.version}" for pin in missing[:5]),
            found="no wheel for this Python and platform",
            next_step="add them: pip download --require-hashes --no-deps --only-binary :all: -r LOCK",
        )
    if missing:
        for wheel in _download(missing, python, cache, progress):
            found[wheel.pin.name] = wheel
    return [found[pin.name] for pin in pins]


def _candidates(folder: Path, python: Interpreter) -> dict[tuple[str, str], list[tuple[int, Path]]]:
    """The wheels that this interpreter accepts: (name, version) to (rank of the best tag, file)."""
    rank = {tag: index for index, tag in enumerate(python.tags)}
    found: dict[tuple[str, str], list[tuple[int, Path]]] = {}
    for path in sorted(folder.glob("*.whl")):
        try:
            name, version, _, tags = parse_wheel_filename(path.name)
        except InvalidWheelFilename:
            continue
        ranks = [rank[str(tag)] for tag in tags if str(tag) in rank]
        if ranks:
            found.setdefault((str(name), canonicalize_version(version)), []).append((min(ranks), path))
    return found


def _choose(
    pin: Pin, candidates: dict[tuple[str, str], list[tuple[int, Path]]], *, strict: bool
) -> Wheel | None:
    """The best wheel of a pin. A wrong hash is refused in a wheelhouse; in our cache it is a torn file."""
    for _, path in sorted(candidates.get((pin.name, canonicalize_version(pin.version)), [])):
        sha256 = file_sha256(path)
        if sha256 in pin.hashes:
            return Wheel(pin, path, sha256)
        if strict:
            raise _differs(pin, path, sha256)
        path.unlink(missing_ok=True)
    return None


def _differs(pin: Pin, path: Path, sha256: str) -> SecureTrainError:
    return SecureTrainError(
        "ST-E07",
        f"the wheel of {pin.name} is not one that the lock allows",
        where=str(path),
        expected=f"sha256:{pin.hashes[0]}"
        + (f" or {len(pin.hashes) - 1} others" if len(pin.hashes) > 1 else ""),
        found=f"sha256:{sha256}",
        next_step="do not install it; obtain the package again from a source that you trust",
    )


def _download(pins: Sequence[Pin], python: Interpreter, cache: Path, progress: Progress) -> list[Wheel]:
    """Fetch wheels by a few pip calls at once.

    Large packages get a call each, so that one that is here stays here when another is stopped; small ones
    share calls, because starting pip costs more than fetching them.
    """
    started = time.monotonic()
    wheels: list[Wheel] = []
    _remove_leftovers(cache)
    small = [pin for pin in pins if not _LARGE.match(pin.name)]
    batches = [[pin] for pin in pins if _LARGE.match(pin.name)]
    batches += [small[start : start + BATCH] for start in range(0, len(small), BATCH)]
    with tempfile.TemporaryDirectory(dir=cache, prefix=f".partial-{os.getpid()}-") as partial:
        folder = Path(partial)
        stop = threading.Event()
        with ThreadPoolExecutor(DOWNLOADS) as pool:
            waiting: set[Future[list[Wheel]]] = {
                pool.submit(_download_batch, batch, python, folder / batch[0].name, cache, stop)
                for batch in batches
            }
            try:
                while waiting:
                    done, waiting = wait(waiting, timeout=REPORT_EVERY)
                    for job in done:
                        wheels += job.result()
                    if waiting:
                        progress(_report(len(wheels), len(pins), wheels, folder, started))
            except BaseException:
                stop.set()
                for job in waiting:
                    job.cancel()
                raise
    megabytes = sum(wheel.path.stat().st_size for wheel in wheels) / 1e6
    progress(f"obtained {len(wheels)} wheels, {megabytes:.0f} MB in {time.monotonic() - started:.0f} s")
    return wheels


def _remove_leftovers(cache: Path) -> None:
    """Partial downloads of processes that are gone."""
    for folder in cache.glob(".partial-*-*"):
        number = folder.name.split("-")[1]
        try:
            os.kill(int(number), 0)
        except (ProcessLookupError, ValueError, OverflowError):
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # it lives, and belongs to another user
            continue


def _report(done: int, total: int, wheels: Sequence[Wheel], folder: Path, started: float) -> str:
    size = sum(wheel.path.stat().st_size for wheel in wheels)
    for path in folder.rglob("*"):
        try:
            size += path.stat().st_size if path.is_file() else 0
        except OSError:  # moved meanwhile
            continue
    seconds = max(time.monotonic() - started, 0.001)
    return f"obtaining wheels: {done} of {total}, {size / 1e6:.0f} MB, {size / 1e6 / seconds:.0f} MB/s"


def _download_batch(
    pins: Sequence[Pin], python: Interpreter, folder: Path, cache: Path, stop: threading.Event
) -> list[Wheel]:
    """One pip call. If it fails for several packages, each is tried alone: what can be had is kept, and what
    cannot is named exactly.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    requirement = folder / "lock.txt"
    requirement.write_text(
        "".join(
            f"{pin.name}=={pin.version} {' '.join(f'--hash=sha256:{digest}' for digest in pin.hashes)}\n"
            for pin in pins
        )
    )
    command = [sys.executable, "-I", "-m", "pip"]
    if Path(os.path.realpath(sys.executable)) != python.executable:
        command += ["--python", str(python.executable)]
    command += ["download", "--quiet", "--progress-bar", "off", "--disable-pip-version-check", "--no-input"]
    command += ["--require-hashes", "--no-deps", "--only-binary", ":all:", "-d", str(folder)]
    output, code = _run([*command, "-r", str(requirement)], folder, stop)
    candidates = _candidates(folder, python)
    if code != 0 and len(pins) > 1 and not stop.is_set():
        return [wheel for pin in pins for wheel in _download_batch([pin], python, folder, cache, stop)]
    wheels: list[Wheel] = []
    for pin in pins:
        # pip checked the hashes as well; what we record, we hash ourselves.
        wheel = _choose(pin, candidates, strict=True) if code == 0 else None
        if wheel is None:
            raise _explain(pin, output)
        os.replace(wheel.path, cache / wheel.path.name)
        wheels.append(Wheel(pin, cache / wheel.path.name, wheel.sha256))
    shutil.rmtree(folder, ignore_errors=True)
    return wheels


def _run(command: list[str], folder: Path, stop: threading.Event) -> tuple[str, int]:
    """Run pip with its temporary files where the wheels go: a small /tmp must not limit a large download."""
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "PIP_USER": "0"}
    with tempfile.TemporaryFile("w+", dir=folder, errors="replace") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
        )
        while True:
            try:
                code = process.wait(timeout=0.2)
                break
            except subprocess.TimeoutExpired:
                if stop.is_set():
                    process.terminate()
        log.seek(0)
        return log.read(), code


def _explain(pin: Pin, output: str) -> SecureTrainError:
    """pip's failure as one error of ours."""
    name = f"{pin.name}=={pin.version}"
    if "No space left on device" in output:
        return SecureTrainError(
            "ST-U04", "the disk is full", found=f"no room for {name}", next_step="free some space, and go on"
        )
    if "DO NOT MATCH THE HASHES" in output:
        got = re.search(r"Got\s+([0-9a-f]{64})", output)
        return SecureTrainError(
            "ST-E07",
            f"the index served another file for {name} than the lock pins",
            expected=f"sha256:{pin.hashes[0]}"
            + (" or another that the lock lists" if len(pin.hashes) > 1 else ""),
            found=f"sha256:{got[1]}" if got else "another digest",
            next_step="do not install it; compare the index with another one",
        )
    lines = [line for line in output.splitlines() if line.startswith("ERROR")] or output.splitlines()[-2:]
    if "ResolutionImpossible" in output or "No matching distribution" in output:
        lines = ["no wheel for this Python and platform on the configured index, or a constraint forbids it"]
    return SecureTrainError(
        "ST-E08",
        f"{name} could not be obtained",
        found=" ".join(" ".join(lines).split())[:400] or "pip said nothing",
        next_step="check the network and `pip config list`, or give a folder of wheels with --wheelhouse",
    )


# --- unpacking ----------------------------------------------------------------------------------------------


class _CheckedStream(io.RawIOBase):
    """Hashes what is read through it."""

    def __init__(self, inner: IO[bytes]) -> None:
        super().__init__()
        self.inner = inner
        self.hash = hashlib.sha256()
        self.size = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self.inner.read(size)
        self.hash.update(data)
        self.size += len(data)
        return data


class _CheckedWheel(WheelFile):
    """A wheel whose files are compared with its RECORD as they are read: nothing is inflated twice."""

    def get_contents(self) -> Iterator[WheelContentElement]:
        for record, stream, executable in super().get_contents():
            checked = _CheckedStream(stream)
            yield record, cast(BinaryIO, checked), executable
            path, stated, size = record
            if path == f"{self.dist_info_dir}/RECORD":
                continue
            while checked.read(1 << 20):  # a consumer that stopped early
                pass
            if stated != f"sha256={_base64(checked.hash.digest())}" or size != str(checked.size):
                raise _Bad(f"{path} does not have the hash that its RECORD states")


class _Bad(Exception):
    """A wheel that is not what it says, in words."""


class Claims:
    """Which wheel owns which path; a path may be shared only by wheels that bring the same bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: dict[Path, str] = {}
        self._sha256: dict[Path, str] = {}
        self._shared: list[tuple[Path, str, str]] = []

    def take(self, path: Path, wheel: str) -> bool:
        with self._lock:
            return self._owner.setdefault(path, wheel) == wheel

    def written(self, path: Path, sha256: str) -> None:
        with self._lock:
            self._sha256[path] = sha256

    def shared(self, path: Path, sha256: str, wheel: str) -> None:
        with self._lock:
            self._shared.append((path, sha256, wheel))

    def check(self) -> None:
        for path, sha256, wheel in self._shared:
            if self._sha256.get(path) != sha256:
                raise SecureTrainError(
                    "ST-E07",
                    "two wheels bring different files of one name",
                    where=str(path),
                    expected=f"one owner ({self._owner[path]})",
                    found=f"also in {wheel}",
                    next_step="leave one of the two packages out of the lock",
                )


class _Destination(SchemeDictionaryDestination):
    """Writes below the environment only, never over another package's file."""

    claims: Claims
    wheel: str

    def write_to_fs(self, scheme: Scheme, path: str, stream: BinaryIO, is_executable: bool) -> RecordEntry:
        target = self._path_with_destdir(scheme, path)
        if not self.claims.take(target, self.wheel):
            content = stream.read()
            digest = hashlib.sha256(content).digest()
            self.claims.shared(target, digest.hex(), self.wheel)
            return RecordEntry(path, Hash("sha256", _base64(digest)), len(content))
        entry = super().write_to_fs(scheme, path, stream, is_executable)
        if entry.hash_ is not None:
            self.claims.written(target, _hex(entry.hash_.value))
        return entry


def unpack(
    wheels: Sequence[Wheel],
    root: Path,
    final: Path,
    site: str,
    *,
    editable: bool,
    threads: int,
    progress: Progress,
) -> list[Installed]:
    """Unpack into `root`, which will be renamed to `final`; `site` is site-packages relative to it."""
    claims = Claims()
    started = time.monotonic()
    order = sorted(
        wheels, key=lambda wheel: -wheel.path.stat().st_size
    )  # the largest alone at the end costs most
    with ThreadPoolExecutor(threads) as pool:
        jobs = {
            wheel.pin.name: pool.submit(_unpack_one, wheel, root, final, site, claims, editable)
            for wheel in order
        }
        last = started
        while pending := [job for job in jobs.values() if not job.done()]:
            wait(pending, timeout=1)
            if time.monotonic() - last > REPORT_EVERY:
                last = time.monotonic()
                progress(f"unpacking: {len(jobs) - len(pending)} of {len(jobs)} wheels")
        installed = [jobs[wheel.pin.name].result() for wheel in wheels]
    claims.check()
    progress(f"unpacked {len(wheels)} wheels in {time.monotonic() - started:.0f} s")
    return installed


def _unpack_one(
    wheel: Wheel, root: Path, final: Path, site: str, claims: Claims, editable: bool
) -> Installed:
    schemes = {
        "purelib": str(root / site),
        "platlib": str(root / site),
        "headers": str(root / "include" / "site" / wheel.pin.name),
        "scripts": str(root / "bin"),
        "data": str(root),
    }
    destination = _Destination(schemes, str(final / "bin" / "python"), "posix")
    destination.claims, destination.wheel = claims, wheel.path.name
    try:
        with _CheckedWheel.open(wheel.path) as source:
            check_archive(source._zipfile)
            source.validate_record(validate_contents=False)
            record = source.read_dist_info("RECORD")
            _check_contents(wheel, source, record, editable)
            installer.install(source, destination, {"INSTALLER": b"secure-train\n"})
            info, data = source.dist_info_dir, source.data_dir
    except (
        _Bad,
        InstallerError,
        ValueError,
        KeyError,
        zipfile.BadZipFile,
        EOFError,
        NotImplementedError,
    ) as error:
        raise SecureTrainError(
            "ST-E07",
            f"the wheel of {wheel.pin.name} is malformed: {error}",
            where=str(wheel.path),
            next_step="report it to the package's maintainers; do not install it",
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise SecureTrainError(
            "ST-U04", "the disk is full", where=str(root), next_step="free some space, and go on"
        ) from None
    return Installed(wheel, info, *describe(record, data, site, wheel.pin.name))


def describe(record: str, data: str, site: str, name: str) -> tuple[str, str]:
    """What an environment notes of a wheel, out of its RECORD: that file's sha256, and `wheel_digest` of the
    files.
    """
    rows = (
        (_placed(path, data, site, name), _hex(stated.removeprefix("sha256=")))
        for path, stated, _ in record_rows(record)
    )
    files = wheel_digest((path, sha256) for path, sha256 in rows if path and sha256)
    return hashlib.sha256(record.encode()).hexdigest(), files


def _placed(path: str, data: str, site: str, name: str) -> str:
    """Where a wheel's file ends up, from the environment's root; empty for scripts, which are rewritten."""
    if not path.startswith(f"{data}/"):
        return f"{site}/{path}"
    scheme, _, rest = path.removeprefix(f"{data}/").partition("/")
    folders = {"purelib": f"{site}/", "platlib": f"{site}/", "data": "", "headers": f"include/site/{name}/"}
    return folders[scheme] + rest if scheme in folders else ""


def check_archive(archive: zipfile.ZipFile) -> None:
    """Names and sizes, before anything is inflated: no way out, nothing twice, no links, no bombs."""
    seen: set[str] = set()
    entries = archive.infolist()
    if len(entries) > MAX_FILES or sum(entry.file_size for entry in entries) > MAX_UNPACKED:
        raise _Bad("it has too many files, or is too large")
    for entry in entries:
        name = entry.filename
        parts = name.rstrip("/").split("/")
        if (
            not _SAFE.fullmatch(name)
            or name.startswith("/")
            or any(part in ("", ".", "..") for part in parts)
        ):
            raise _Bad(f"it holds the unsafe name {name!r:.100}")
        if name in seen:
            raise _Bad(f"it holds {name!r:.100} twice")
        if entry.external_attr >> 28 == 0o12:
            raise _Bad(f"it holds a link, {name!r:.100}")
        seen.add(name)


def _check_contents(wheel: Wheel, source: WheelFile, record: str, editable: bool) -> None:
    """Nothing that Python runs by itself: start-up files only if known by their digest, no bytecode."""
    name, version, _, _ = parse_wheel_filename(wheel.path.name)
    if normalize(name) != wheel.pin.name or canonicalize_version(version) != canonicalize_version(
        wheel.pin.version
    ):
        raise _Bad(f"its name says {name} {version}")
    for path, stated, _ in record_rows(record):
        leaf = path.rpartition("/")[2]
        if leaf.endswith(".pyc") or "__pycache__" in path.split("/"):
            raise _Bad(f"it holds bytecode, {path}, which would run in place of its source")
        if leaf.endswith(".pth") or leaf in ("sitecustomize.py", "usercustomize.py"):
            known = (leaf, _hex(stated.removeprefix("sha256="))) in ALLOWED_PTH
            if not known and not (editable and wheel.pin.name == "secure-train"):
                raise SecureTrainError(
                    "ST-E04",
                    f"the wheel of {wheel.pin.name} brings a file that Python would run at every start",
                    where=f"{wheel.path.name}: {path}",
                    expected="none, or one that is known by its digest",
                    found=stated,
                    next_step="find out what it does; malicious releases run this way without being imported",
                )


def record_rows(record: str) -> list[tuple[str, str, str]]:
    """The rows of a RECORD: path, hash as written, size as written."""
    rows = [row for row in csv.reader(record.splitlines()) if row]
    if any(len(row) != 3 for row in rows):
        raise _Bad("its RECORD has a malformed line")
    return [(row[0], row[1], row[2]) for row in rows]


def _base64(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).decode("ascii").rstrip("=")


def _hex(value: str) -> str:
    try:
        return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()
    except (binascii.Error, ValueError):
        return ""
