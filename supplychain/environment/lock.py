"""The lock: which wheels an environment consists of, by name, version and sha256.

Owns the strict parser of hash-pinned requirements files. Promises that a parsed lock holds nothing but
`name==version [; marker]` lines, each with at least one sha256 hash; everything else that pip would obey
(another file, an index, an address, a path, a range, an option) is refused with file and line, because it
would let somebody who is not the lock decide what is installed. Parsing needs the standard library only;
markers are evaluated with `packaging`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from supplychain.errors import SecureTrainError

MAX_BYTES = 8 << 20
MAX_LINE = 4096
MAX_PACKAGES = 5000
MAX_HASHES = 2000  # of one package; the largest releases have a few hundred files

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,98}[A-Za-z0-9])?")
# PEP 440, as far as a pin needs it: a public version and perhaps a local one. No wildcards, no spaces.
_VERSION = re.compile(
    r"(?:[0-9]{1,9}!)?[0-9]{1,20}(?:\.[0-9]{1,20}){0,20}"
    r"(?:[._-]?(?:a|b|c|rc|alpha|beta|pre|preview)[._-]?[0-9]{0,20})?"
    r"(?:[._-]?(?:post|rev|r)[._-]?[0-9]{0,20})?(?:[._-]?dev[._-]?[0-9]{0,20})?"
    r"(?:\+[A-Za-z0-9]+(?:[._-][A-Za-z0-9]+){0,20})?",
    re.IGNORECASE,
)
_MARKER = re.compile(r"[A-Za-z0-9_.'\"<>=!~() +-]{1,2000}")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def normalize(name: str) -> str:
    """The one spelling of a package's name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


@dataclass(frozen=True)
class Pin:
    """One line of the lock: a release, the files of it that are allowed, and where it applies.

    `name` is normalised, `hashes` are sha256 in hex and sorted, `marker` is the text after `;` or None,
    `line` counts from 1.
    """

    name: str
    version: str
    hashes: tuple[str, ...]
    marker: str | None
    line: int

    def applies(self, environment: Mapping[str, str]) -> bool:
        """Whether this line is for the interpreter that `environment` (PEP 508 variables) describes."""
        if self.marker is None:
            return True
        from packaging.markers import Marker  # not needed to parse, and absent where verify.py runs alone

        return Marker(self.marker).evaluate({**environment, "extra": ""})


@dataclass(frozen=True)
class Lock:
    """A parsed lock. `digest` is the sha256 of the file's bytes, in hex: the lock's identity."""

    pins: tuple[Pin, ...]
    digest: str

    def applicable(self, environment: Mapping[str, str]) -> tuple[Pin, ...]:
        """The pins for one interpreter, at most one a name; ST-E01 where the lock contradicts itself."""
        found: dict[str, Pin] = {}
        for pin in self.pins:
            if not pin.applies(environment):
                continue
            other = found.setdefault(pin.name, pin)
            if other is not pin:
                raise SecureTrainError(
                    "ST-E01",
                    f"the lock pins {pin.name} twice for this Python and platform",
                    where=f"lines {other.line} and {pin.line}",
                    expected="one version",
                    found=f"{other.version} and {pin.version}",
                    next_step="make the lock again with requirements/lock.py",
                )
        return tuple(found.values())

    @cached_property
    def by_name(self) -> dict[str, tuple[Pin, ...]]:
        names: dict[str, list[Pin]] = {}
        for pin in self.pins:
            names.setdefault(pin.name, []).append(pin)
        return {name: tuple(pins) for name, pins in names.items()}


def parse_lock(data: bytes, *, where: str = "lock") -> Lock:
    """Parse a hash-pinned requirements file; ST-E01 with file and line for anything that is not a pin."""
    if len(data) > MAX_BYTES:
        raise _refuse(where, 0, "the lock is too large", f"at most {MAX_BYTES} bytes", f"{len(data)} bytes")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise _refuse(where, line, "the lock is not UTF-8", "UTF-8 text", f"byte {error.start}") from None
    pins: list[Pin] = []
    seen: set[tuple[str, str, str | None]] = set()
    for number, words in _logical_lines(text, where):
        pin = _pin(words, where, number)
        key = (pin.name, pin.version, pin.marker)
        if key in seen:
            raise _refuse(
                where, number, f"{pin.name} stands twice", "one line a pin", f"{pin.name}=={pin.version}"
            )
        seen.add(key)
        pins.append(pin)
        if len(pins) > MAX_PACKAGES:
            raise _refuse(where, number, "the lock has too many packages", f"at most {MAX_PACKAGES}", "more")
    if not pins:
        raise _refuse(where, 0, "the lock pins nothing", "at least one pinned package", "none")
    _check_versions(pins, where)
    return Lock(tuple(pins), hashlib.sha256(data).hexdigest())


def _logical_lines(text: str, where: str) -> list[tuple[int, str]]:
    """Lines joined at a trailing backslash, without comments and blank lines, each with its first number.

    Lines end at a newline only: what other separators (form feed, U+2028) would hide from a reader is a
    control character, and refused.
    """
    out: list[tuple[int, str]] = []
    joined: list[str] = []
    start = 0
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.removesuffix("\r")
        if len(line) > MAX_LINE:
            raise _refuse(
                where, number, "a line is too long", f"at most {MAX_LINE} characters", f"{len(line)}"
            )
        if not line.isascii() and not line.lstrip().startswith("#"):
            raise _refuse(where, number, "a line is not ASCII", "ASCII", repr(line[:60]))
        if any(ord(char) < 32 or ord(char) == 127 for char in line):
            raise _refuse(
                where, number, "a line holds a control character", "printable text", repr(line[:60])
            )
        if not joined:
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            start = number
        if line.endswith("\\"):
            joined.append(line[:-1])
            if len(joined) > MAX_HASHES + 1:
                raise _refuse(where, number, "an entry is too long", f"at most {MAX_HASHES} hashes", "more")
            continue
        out.append((start, " ".join([*joined, line])))
        joined = []
    if joined:
        raise _refuse(
            where, start, "the lock ends inside an entry", "a line after the backslash", "end of file"
        )
    return out


def _pin(line: str, where: str, number: int) -> Pin:
    body, *options = re.split(r"\s(?=--)", line)
    requirement, semicolon, marker_text = body.partition(";")
    requirement = requirement.strip()
    name, equals, version = (part.strip() for part in requirement.partition("=="))
    if not equals or not _NAME.fullmatch(name) or not _VERSION.fullmatch(version):
        raise _refuse(
            where,
            number,
            "this is not a pinned package",
            "name==version --hash=sha256:...",
            repr(requirement[:80]),
        )
    marker = " ".join(marker_text.split()) if semicolon else None
    if marker is not None:
        _check_marker(marker, where, number)
    hashes: set[str] = set()
    for option in options:
        match = _HASH.fullmatch(option.strip())
        if match is None:
            raise _refuse(
                where,
                number,
                f"{name} has an option that a lock may not have",
                "--hash=sha256:<64 hex digits>",
                repr(option.strip()[:80]),
            )
        hashes.add(match[1])
    if not hashes:
        raise _refuse(where, number, f"{name} has no hash", "--hash=sha256:...", "none")
    return Pin(normalize(name), version, tuple(sorted(hashes)), marker, number)


def _check_marker(marker: str, where: str, number: int) -> None:
    if not _MARKER.fullmatch(marker):
        raise _refuse(where, number, "the marker is malformed", "a PEP 508 marker", repr(marker[:80]))
    try:
        from packaging.markers import InvalidMarker, Marker
    except ModuleNotFoundError:  # verify.py alone: it compares markers as text, and evaluates none
        return
    try:
        Marker(marker)
    except (InvalidMarker, RecursionError):
        raise _refuse(
            where, number, "the marker is malformed", "a PEP 508 marker", repr(marker[:80])
        ) from None


def _check_versions(pins: list[Pin], where: str) -> None:
    """Two pins of a name need markers: without one, both would apply everywhere."""
    first: dict[str, Pin] = {}
    for pin in pins:
        other = first.setdefault(pin.name, pin)
        if other is not pin and (other.marker is None or pin.marker is None):
            raise _refuse(
                where,
                pin.line,
                f"{pin.name} is pinned twice",
                "one version, or a marker on each",
                f"{other.version} (line {other.line}) and {pin.version}",
            )


def _refuse(where: str, line: int, what: str, expected: str, found: str) -> SecureTrainError:
    return SecureTrainError(
        "ST-E01",
        what,
        where=f"{where}:{line}" if line else where,
        expected=expected,
        found=found,
        next_step="make the lock with requirements/lock.py, or `uv pip compile --generate-hashes`",
    )
