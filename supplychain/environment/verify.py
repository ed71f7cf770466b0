"""Is an environment on disk exactly what was built from its lock? Answered from outside, as files.

Promises that nothing in the environment is imported or started: a malicious `.pth` file runs before any check
inside it could. The chain is lock -> wheel -> RECORD -> disk, and the signed manifest says that the disk is
complete. In detail:

V1  every file has the size, mode and sha256 of the manifest, and none is missing
ST-E03 V2  there is no other file: no start-up file, no bytecode, no link, nothing that no wheel explains
ST-E04 V3  the wheels are exactly those that the lock pins for this interpreter
ST-E02 V4  each installed RECORD lists the wheel's files with their hashes, and each file has one owner
ST-E04 V5  start-up files (`.pth`) that packages bring are known by name and digest; being owned is not enough
ST-E04 V6  the environment reads no packages from outside (system site packages)
ST-E10 V7  the interpreter under it, its library and its standard library are those recorded
ST-E09

All findings are reported, never only the first. Standard library, `supplychain.artifact` and
`supplychain.errors` only, so that it runs with any Python as `python -I -S -B .../supplychain/environment
--prefix ENV --manifest HEX`.
"""

from __future__ import annotations

import argparse
import base64
import binascii
import csv
import hashlib
import json
import os
import stat
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from supplychain.artifact import MANIFEST, SIGNATURES, FileEntry, Manifest, VerifiedArtifact, parse_json
from supplychain.environment.interpreter import base_files, hash_files
from supplychain.environment.lock import Lock, Pin, parse_lock
from supplychain.errors import SecureTrainError

SCHEMA = "urn:secure-train:environment:v1"
ENVIRONMENT = "environment.json"
INTERPRETER = "interpreter.json"
MAX_DOCUMENT = 16 << 20
MAX_RECORD = 64 << 20

# Start-up files that packages may bring: file name and sha256. Python executes their `import` lines at every
# start, which is why a malicious release of 2026 used one, listed in its RECORD with a correct hash.
ALLOWED_PTH = frozenset(
    {
        # setuptools: replaces distutils when asked to by an environment variable
        ("distutils-precedence.pth", "2638ce9e2500e572a5e0de7faed6661eb569d1b696fcba07b0dd223da5f5d224"),
    }
)
_EDITABLE_PTH = "_editable_impl_secure_train.pth"  # what our build backend puts into an editable wheel
_STARTUP = ("sitecustomize.py", "usercustomize.py")
# Rows that an installer adds to a RECORD; everything else must have come from the wheel.
_INSTALLER_ROWS = ("INSTALLER", "REQUESTED", "direct_url.json", "RECORD")
_REBUILD = "secure-train env build makes a clean environment; find out first who changed this one"

Progress = Callable[[int], None]


@dataclass(frozen=True)
class Distribution:
    """One package as installed; digests in hex: of the wheel, its RECORD, and its files (`wheel_digest`).

    `info` is the name of its `.dist-info` folder.
    """

    name: str
    version: str
    wheel: str
    sha256: str
    record: str
    files: str
    info: str


@dataclass(frozen=True)
class EnvironmentFacts:
    """What was found. Only `findings` tells whether it may be used: empty means that every check passed.

    `lock` is the sha256 of the lock that it was built from, `code` the identity of our own code in it (the
    sha256 of its wheel, or the checkout of an editable install), `sealed` False for an editable environment,
    `bytes` and `files` what was hashed, `seconds` how long it took.
    """

    prefix: Path
    manifest: str
    findings: tuple[SecureTrainError, ...]
    lock: str = ""
    profile: str = ""
    python: str = ""
    platform: str = ""
    code: Mapping[str, str] = field(default_factory=dict)
    sealed: bool = False
    packages: tuple[Distribution, ...] = ()
    files: int = 0
    bytes: int = 0
    seconds: float = 0.0

    @property
    def distributions(self) -> int:
        return len(self.packages)

    @property
    def interpreter(self) -> Path:
        """The program that starts Python in this environment."""
        return self.prefix / "bin" / "python"

    def require(self) -> EnvironmentFacts:
        """These facts, or the first finding as an error that also says how many there are."""
        if not self.findings:
            return self
        first = self.findings[0]
        more = len(self.findings) - 1
        raise SecureTrainError(
            first.code,
            first.what + (f" (and {more} more findings)" if more else ""),
            where=first.where,
            expected=first.expected,
            found=first.found,
            next_step=first.next_step,
        )


def find_environment(explicit: Path | None = None) -> Path:
    """The training environment: the one named, else SECURE_TRAIN_ENV, else `training` beside the gate's."""
    named = explicit or (Path(value) if (value := os.environ.get("SECURE_TRAIN_ENV")) else None)
    candidate = named or Path(sys.prefix).parent / "training"
    if not (candidate / ENVIRONMENT).is_file():
        raise SecureTrainError(
            "ST-E05",
            "there is no training environment here" if named else "no training environment was found",
            where=str(candidate),
            expected=f"a folder with {ENVIRONMENT}",
            next_step="python3 bootstrap.py build, or secure-train env build, or name one with --env",
        )
    return candidate.resolve()


def verify_environment(
    prefix: Path, manifest_digest: str, lock_bytes: bytes | None = None, *, progress: Progress | None = None
) -> EnvironmentFacts:
    """Check everything (V1 to V7) and report all findings; nothing of the environment is executed.

    `manifest_digest` must come from a signature or a plan. `lock_bytes` is the lock that the caller expects;
    without it the environment is compared with the lock digest it was built from only. `progress` gets
    numbers of bytes.
    """
    started = time.monotonic()
    prefix = prefix.resolve()
    try:
        manifest = VerifiedArtifact.open(prefix, manifest_digest).manifest
        if manifest.kind != "environment":
            raise SecureTrainError(
                "ST-P04",
                "the artifact is no environment",
                where=str(prefix),
                expected="kind environment",
                found=f"kind {manifest.kind}",
            )
    except SecureTrainError as error:
        return EnvironmentFacts(prefix, manifest_digest, (error,))
    check = _Check(prefix, manifest)
    check.tree(progress)
    document = check.document()
    facts = EnvironmentFacts(prefix, manifest_digest, ())
    if document is not None:
        if lock_bytes is not None:
            check.lock(document, lock_bytes)
        check.records(document)
        check.startup(document)
        check.outside()
        check.interpreter(progress)
        facts = _facts(prefix, manifest_digest, document)
    order = sorted(
        check.findings, key=lambda finding: (finding.code not in ("ST-E03", "ST-E04"), finding.where or "")
    )
    return EnvironmentFacts(
        **{
            **facts.__dict__,
            "findings": tuple(order),
            "files": len(manifest.files),
            "bytes": manifest.total_bytes,
            "seconds": time.monotonic() - started,
        }
    )


def _facts(prefix: Path, manifest_digest: str, document: dict[str, Any]) -> EnvironmentFacts:
    return EnvironmentFacts(
        prefix,
        manifest_digest,
        (),
        lock=document["lock"],
        profile=document["profile"],
        python=document["python"]["version"],
        platform=document["python"]["platform"],
        code=document["code"],
        sealed="editable" not in document["code"] and bool(document["code"]),
        packages=tuple(Distribution(**item) for item in document["distributions"]),
    )


def wheel_digest(entries: Iterable[tuple[str, str]]) -> str:
    """One digest of what a wheel puts into an environment: (path from the environment's root, sha256 in hex).

    Scripts are left out (installing rewrites their first line), as are the rows that an installer adds. The
    same value comes out of a wheel's RECORD and of the installed one.
    """
    outer = hashlib.sha256()
    for path, sha256 in sorted(entries):
        folder, _, leaf = path.rpartition("/")
        if path.startswith("bin/") or (folder.endswith(".dist-info") and leaf in _INSTALLER_ROWS):
            continue
        outer.update(f"{sha256}  {path}\n".encode())
    return outer.hexdigest()


class _Check:
    """The checks over one environment; each adds to `findings`."""

    def __init__(self, prefix: Path, manifest: Manifest) -> None:
        self.prefix = prefix
        self.manifest = manifest
        self.findings: list[SecureTrainError] = []
        self.entries = {entry.path: entry for entry in manifest.files}

    def add(
        self, code: str, what: str, path: str, *, expected: str | None = None, found: str | None = None
    ) -> None:
        self.findings.append(
            SecureTrainError(
                code,
                what,
                where=printable(str(self.prefix / path)),
                expected=expected,
                found=found,
                next_step=_REBUILD,
            )
        )

    # V1, V2 -------------------------------------------------------------------------------------------------

    def tree(self, progress: Progress | None) -> None:
        """Every file against the manifest, largest first, on all cores."""
        present: dict[str, os.stat_result] = {}
        self._walk("", str(self.prefix), present)
        for path in sorted(present.keys() - self.entries.keys()):
            if path != MANIFEST and not _is_bundle(path):
                self.add(
                    "ST-E04",
                    _unexplained(path),
                    path,
                    expected="no such file",
                    found="a file that no wheel explains",
                )
        to_hash: list[tuple[FileEntry, int]] = []
        for path, entry in self.entries.items():
            status = present.get(path)
            if status is None:
                self.add(
                    "ST-E03",
                    "a file of the environment is missing",
                    path,
                    expected=f"{entry.size} bytes",
                    found="none",
                )
            elif status.st_size != entry.size:
                self.add(
                    "ST-E03",
                    "an installed file changed its size",
                    path,
                    expected=f"{entry.size} bytes",
                    found=f"{status.st_size} bytes",
                )
            else:
                if (0o755 if status.st_mode & 0o111 else 0o644) != entry.mode or status.st_mode & 0o6000:
                    self.add(
                        "ST-E03",
                        "an installed file changed its mode",
                        path,
                        expected=f"{entry.mode:04o}",
                        found=f"{stat.S_IMODE(status.st_mode):04o}",
                    )
                to_hash.append((entry, status.st_size))
        for entry, found in _hash_all(self.prefix, [entry for entry, _ in to_hash], progress):
            self.add(
                "ST-E03",
                "an installed file changed",
                entry.path,
                expected=f"sha256:{entry.sha256}",
                found=found if found.startswith("cannot") else f"sha256:{found}",
            )

    def _walk(self, prefix: str, folder: str, present: dict[str, os.stat_result]) -> None:
        try:
            entries = list(os.scandir(folder))
        except OSError as error:
            self.add("ST-E04", "a folder cannot be read", prefix.rstrip("/"), found=str(error.strerror))
            return
        if not entries and prefix:
            self.add("ST-E04", "there is an empty folder", prefix.rstrip("/"), expected="no such folder")
        for entry in entries:
            path = prefix + entry.name
            if entry.is_symlink():
                leads = os.readlink(entry.path)
                self.add(
                    "ST-E04",
                    "there is a link, and links can lead anywhere",
                    path,
                    expected="a file",
                    found=f"-> {leads}",
                )
            elif entry.is_dir(follow_symlinks=False):
                self._walk(path + "/", entry.path, present)
            elif entry.is_file(follow_symlinks=False):
                present[path] = entry.stat(follow_symlinks=False)
            else:
                self.add("ST-E04", "there is something that is neither file nor folder", path)

    # environment.json ---------------------------------------------------------------------------------------

    def read(self, path: str, limit: int) -> bytes | None:
        """A file's bytes if they are as signed; a difference is already a finding."""
        entry = self.entries.get(path)
        if entry is None or entry.size > limit:
            self.add(
                "ST-E05",
                f"the environment has no usable {path}",
                path,
                expected="written by secure-train env build",
            )
            return None
        try:
            data = (self.prefix / path).read_bytes()
        except OSError:
            return None
        return data if hashlib.sha256(data).hexdigest() == entry.sha256 else None

    def document(self) -> dict[str, Any] | None:
        data = self.read(ENVIRONMENT, MAX_DOCUMENT)
        if data is None:
            return None
        try:
            return parse_environment(data, where=str(self.prefix / ENVIRONMENT))
        except SecureTrainError as error:
            self.findings.append(error)
            return None

    # V3 -----------------------------------------------------------------------------------------------------

    def lock(self, document: dict[str, Any], data: bytes) -> None:
        try:
            lock = parse_lock(data)
        except SecureTrainError as error:
            self.findings.append(error)
            return
        if lock.digest != document["lock"]:
            self.add(
                "ST-E02",
                "the environment was built from another lock",
                ENVIRONMENT,
                expected=f"sha256:{lock.digest}",
                found=f"sha256:{document['lock']}",
            )
        installed = {item["name"]: item for item in document["distributions"]}
        for pin in self._pins(lock, document):
            item = installed.pop(pin.name, None)
            name = f"{pin.name}=={pin.version}"
            if item is None:
                self.add(
                    "ST-E02",
                    f"{pin.name} is locked and not installed",
                    ENVIRONMENT,
                    expected=name,
                    found="nothing",
                )
            elif item["version"] != pin.version or item["sha256"] not in pin.hashes:
                self.add(
                    "ST-E02",
                    f"{pin.name} is another one than is locked",
                    ENVIRONMENT,
                    expected=f"{name} sha256:{pin.hashes[0]}",
                    found=f"{item['version']} sha256:{item['sha256']}",
                )
        for item in installed.values():
            if item["sha256"] != document["code"].get(
                "sha256"
            ):  # our own wheel is vouched for by its digest, not by a lock
                name = f"{item['name']}=={item['version']}"
                self.add(
                    "ST-E02",
                    f"{item['name']} is installed and not locked",
                    ENVIRONMENT,
                    expected="no such package",
                    found=name,
                )

    def _pins(self, lock: Lock, document: dict[str, Any]) -> Sequence[Pin]:
        """The pins for the environment's interpreter. Without `packaging` the signed list of skipped ones is
        used.
        """
        try:
            return lock.applicable(document["markers"])
        except ModuleNotFoundError:
            skipped = {(item["name"], item["version"]) for item in document["skipped"]}
            return [pin for pin in lock.pins if (pin.name, pin.version) not in skipped or pin.marker is None]
        except SecureTrainError as error:
            self.findings.append(error)
            return ()

    # V4 -----------------------------------------------------------------------------------------------------

    def records(self, document: dict[str, Any]) -> None:
        """Each package's RECORD against the manifest (and so the disk) and the digest from its wheel."""
        site = document["site"]
        owners: dict[str, str] = {}
        found = {
            path.split("/")[-2]: path
            for path in self.entries
            if path.startswith(f"{site}/")
            and path.endswith(".dist-info/RECORD")
            and path.count("/") == site.count("/") + 2
        }
        for item in document["distributions"]:
            path = found.pop(item["info"], None)
            if path is None:
                self.add("ST-E03", f"the RECORD of {item['name']} is missing", f"{site}/{item['info']}")
                continue
            rows = self._rows(path, site)
            for name in rows:
                owners.setdefault(name, item["name"])
            if wheel_digest((name, sha256) for name, sha256 in rows.items() if sha256) != item["files"]:
                self.add(
                    "ST-E03",
                    f"the files of {item['name']} are not those of its wheel",
                    path,
                    expected=f"the contents of {item['wheel']}",
                    found="a RECORD that says otherwise",
                )
        for path in found.values():
            self.add(
                "ST-E02",
                "a package is installed that the environment does not know of",
                path,
                expected="no such package",
            )
        ours = {ENVIRONMENT, INTERPRETER, "pyvenv.cfg", "bin/python", "bin/python3"}
        for path in sorted(self.entries.keys() - owners.keys() - ours):
            self.add(
                "ST-E04",
                _unexplained(path),
                path,
                expected="a file of a package",
                found="a file that no package owns",
            )

    def _rows(self, record: str, site: str) -> dict[str, str]:
        """Paths from the environment's root, with the sha256 that RECORD states (empty where it may state
        none).
        """
        data = self.read(record, MAX_RECORD)
        rows: dict[str, str] = {}
        if data is None:
            return rows
        try:
            listed = [row for row in csv.reader(data.decode("utf-8").splitlines()) if row]
        except (UnicodeDecodeError, csv.Error) as error:
            self.add("ST-E03", "a RECORD cannot be read", record, found=str(error)[:100])
            return rows
        for row in listed:
            path = os.path.normpath(f"{site}/{row[0]}") if "\0" not in row[0] else "/"
            if path.startswith(("/", "../")) or path == ".." or len(row) != 3:
                self.add(
                    "ST-E04",
                    "a RECORD claims a file outside the environment",
                    record,
                    found=printable(row[0][:200]),
                )
                continue
            sha256 = _hex(row[1])
            entry = self.entries.get(path)
            if entry is None or (sha256 != entry.sha256 and path != record):
                self.add(
                    "ST-E03",
                    "a file is not the one that its package's RECORD lists",
                    path,
                    expected=f"sha256:{sha256 or 'none'}",
                    found=f"sha256:{entry.sha256}" if entry else "no such file",
                )
            rows[path] = sha256
        return rows

    # V5 -----------------------------------------------------------------------------------------------------

    def startup(self, document: dict[str, Any]) -> None:
        editable = document["code"].get("editable")
        for path, entry in self.entries.items():
            leaf = path.rpartition("/")[2]
            if leaf.endswith(".pyc"):
                self.add(
                    "ST-E04",
                    "there is bytecode, which runs in place of its source",
                    path,
                    expected="no bytecode",
                )
            if not leaf.endswith(".pth") and leaf not in _STARTUP:
                continue
            if (leaf, entry.sha256) in ALLOWED_PTH:
                continue
            if (
                editable
                and leaf == _EDITABLE_PTH
                and (self.read(path, 4096) or b"").strip() == editable.encode()
            ):
                continue  # it leads to the checkout that environment.json names, and does nothing else
            self.add(
                "ST-E04",
                _unexplained(path),
                path,
                expected="a start-up file known by its digest",
                found=f"sha256:{entry.sha256}",
            )

    # V6 -----------------------------------------------------------------------------------------------------

    def outside(self) -> None:
        data = self.read("pyvenv.cfg", 65536)
        if data is None:
            return
        settings: dict[str, str] = {}
        for line in data.decode("utf-8", "replace").splitlines():
            key, equals, value = line.partition("=")
            if equals:
                settings[key.strip().lower()] = value.strip()
        if settings.get("include-system-site-packages", "true").lower() != "false":
            self.add(
                "ST-E10",
                "the environment also reads the system's packages",
                "pyvenv.cfg",
                expected="include-system-site-packages = false",
                found=settings.get("include-system-site-packages", "not set"),
            )

    # V7 -----------------------------------------------------------------------------------------------------

    def interpreter(self, progress: Progress | None) -> None:
        data = self.read(INTERPRETER, MAX_DOCUMENT)
        if data is None:
            return
        try:
            said = parse_json(data, what=INTERPRETER, where=str(self.prefix / INTERPRETER))
            recorded: dict[str, str] = {str(path): str(digest) for path, digest in said["files"].items()}
            shared = Path(said["shared"]) if said["shared"] else None
            paths = base_files(Path(said["executable"]), shared, Path(said["stdlib"]))
        except (SecureTrainError, KeyError, TypeError, AttributeError) as error:
            self.add("ST-E05", f"{INTERPRETER} cannot be used: {error}", INTERPRETER)
            return
        now = hash_files(paths, threads=_threads(), progress=progress)
        changed = sorted(path for path in recorded.keys() | now.keys() if recorded.get(path) != now.get(path))
        if changed:
            first = changed[0]
            state = (
                "changed" if first in recorded and first in now else "missing" if first in recorded else "new"
            )
            self.findings.append(
                SecureTrainError(
                    "ST-E09",
                    f"the Python under the environment is not as it was ({len(changed)} files differ)",
                    where=printable(first),
                    expected=f"sha256:{recorded[first]}" if first in recorded else "no such file",
                    found=f"{state}: sha256:{now[first]}" if first in now else "missing",
                    next_step="after an update of Python build the environment again: secure-train env build",
                )
            )


def parse_environment(data: bytes, *, where: str = ENVIRONMENT) -> dict[str, Any]:
    """Parse environment.json; ST-E05 unless it has every field with the right type."""
    said = parse_json(data, what=ENVIRONMENT, where=where, limit=MAX_DOCUMENT)
    try:
        good = (
            said["schema"] == SCHEMA
            and all(isinstance(said[key], str) for key in ("lock", "profile", "site"))
            and all(isinstance(said["python"][key], str) for key in ("version", "platform", "implementation"))
            and all(isinstance(value, str) for value in said["code"].values())
            and all(isinstance(value, str) for value in said["markers"].values())
            and all(set(item) == {"name", "version"} for item in said["skipped"])
            and not said["site"].startswith("/")
            and ".." not in said["site"].split("/")
        )
        for item in said["distributions"]:
            good = good and all(isinstance(value, str) for value in Distribution(**item).__dict__.values())
    except (KeyError, TypeError, AttributeError):
        good = False
    if not good:
        raise SecureTrainError(
            "ST-E05",
            f"{ENVIRONMENT} is of another version, or malformed",
            where=where,
            expected=SCHEMA,
            next_step="build the environment again: secure-train env build",
        )
    result: dict[str, Any] = said
    return result


def _is_bundle(path: str) -> bool:
    folder, _, leaf = path.rpartition("/")
    return folder == SIGNATURES and leaf.endswith(".sigstore.json")


def _unexplained(path: str) -> str:
    """What an unexpected file is, in the words that say why it matters."""
    leaf = path.rpartition("/")[2]
    if leaf.endswith(".pth"):
        return "there is a .pth file, which Python runs at every start"
    if leaf in _STARTUP:
        return f"there is a {leaf}, which Python imports at every start"
    if leaf.endswith(".pyc"):
        return "there is bytecode, which runs in place of its source"
    return "there is a file that came from no locked wheel"


def _hash_all(
    prefix: Path, entries: Sequence[FileEntry], progress: Progress | None
) -> list[tuple[FileEntry, str]]:
    """The entries whose bytes differ, with what was found. Small files are hashed in batches: a task each
    costs more.
    """
    order = sorted(entries, key=lambda entry: -entry.size)
    large = [entry for entry in order if entry.size >= 1 << 20]
    small = order[len(large) :]
    batches = [[entry] for entry in large] + [
        small[start : start + 256] for start in range(0, len(small), 256)
    ]
    root = str(prefix)

    def one(batch: list[FileEntry]) -> list[tuple[FileEntry, str]]:
        differing: list[tuple[FileEntry, str]] = []
        size = 0
        for entry in batch:
            found = _file_sha256(f"{root}/{entry.path}", entry.size)
            size += entry.size
            if found != entry.sha256:
                differing.append((entry, found))
        if progress:
            progress(size)
        return differing

    with ThreadPoolExecutor(_threads()) as pool:
        return [item for found in pool.map(one, batches) for item in found]


def _file_sha256(path: str, size: int) -> str:
    """sha256 of a file that is no link, read at most one byte past `size`; or why it cannot be read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    try:
        if size <= 1 << 20:
            return hashlib.sha256(os.read(descriptor, size + 1)).hexdigest()
        outer = hashlib.sha256()
        while block := os.read(descriptor, 1 << 20):
            outer.update(block)
        return outer.hexdigest()
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    finally:
        os.close(descriptor)


def _threads() -> int:
    return max(1, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)


def _hex(stated: str) -> str:
    """A RECORD's hash in hex; empty if there is none or it is not sha256."""
    kind, _, value = stated.partition("=")
    if kind != "sha256":
        return ""
    try:
        return base64.urlsafe_b64decode(value + "=" * (-len(value) % 4)).hex()
    except (binascii.Error, ValueError):
        return ""


def printable(text: str) -> str:
    """A name for a message: what a terminal might obey is written as an escape."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode()
        for char in text
    )


def main(argv: Sequence[str]) -> int:
    """`python -I -S -B .../supplychain/environment --prefix ENV --manifest HEX [--lock FILE]`; JSON on
    stdout.
    """
    parser = argparse.ArgumentParser(prog="environment", description="Verify an environment from outside.")
    parser.add_argument("--prefix", required=True, type=Path)
    parser.add_argument(
        "--manifest", required=True, help="sha256 of the manifest, from its signature or a plan"
    )
    parser.add_argument("--lock", type=Path)
    options = parser.parse_args(argv)
    facts = verify_environment(
        options.prefix, options.manifest, options.lock.read_bytes() if options.lock else None
    )
    answer = {
        "prefix": str(facts.prefix),
        "manifest": facts.manifest,
        "files": facts.files,
        "bytes": str(facts.bytes),
        "sealed": facts.sealed,
        "findings": [finding.as_dict() for finding in facts.findings],
    }
    print(json.dumps(answer, indent=1))
    return facts.findings[0].exit_code if facts.findings else 0
