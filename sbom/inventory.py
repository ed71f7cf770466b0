"""What is installed, read from the files that installers leave: one `Installed` for each distribution.

Promises that nothing is imported, that each `.dist-info` (and each old `.egg-info`) is in the list exactly
once, also when two claim one name, and that hostile or broken metadata gives a distribution with fewer
facts and a
`problem` in words, never an exception. Texts are cleaned of characters that neither XML nor a terminal can
bear.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from packaging.requirements import InvalidRequirement, Requirement

from sbom.errors import SbomError
from sbom.tree import Tree

MAX_TEXT = 4096  # characters of one field that go into a BOM
_NORMAL = re.compile(r"[-_.]+")
_LIBRARY = re.compile(r"^(lib[\w+.\-]*?)((?:-[0-9a-f]{8})*)\.so((?:\.\d+)*)$")
_UNPRINTABLE = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]+"
)
_SBOM_SUFFIXES = (".json", ".xml", ".spdx")


def normalize(name: str) -> str:
    """The one spelling of a distribution's name (PEP 503)."""
    return _NORMAL.sub("-", name).lower()


def clean(text: str, limit: int = MAX_TEXT) -> str:
    """One line without control characters, of bounded length."""
    found = " ".join(_UNPRINTABLE.sub(" ", text[: 4 * limit]).split())
    return found if len(found) <= limit else found[: limit - 3] + "..."


@dataclass(frozen=True)
class Library:
    """A shared library that a distribution brings and that is no Python module: its name without the marks of
    wheel repair, the version of its binary interface if the file name has one, its path and digest.
    """

    name: str
    soname: str
    path: str
    sha256: str


@dataclass(frozen=True)
class Installed:
    """One distribution. `info` is its metadata folder, `fields` its METADATA by lower-case name."""

    name: str
    version: str
    info: str
    fields: Mapping[str, Sequence[str]] = field(default_factory=dict)
    requires: tuple[Requirement, ...] = ()
    editable: bool = False
    archive: str = ""  # sha256 that direct_url.json states
    commit: str = ""
    sboms: tuple[tuple[str, bytes], ...] = ()
    libraries: tuple[Library, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        return normalize(self.name)

    def first(self, name: str) -> str:
        values = self.fields.get(name, ())
        return values[0] if values else ""


def read_inventory(tree: Tree, site: str) -> list[Installed]:
    """Everything installed in `site` (relative to the tree's root), in the order of names."""
    prefix = f"{site}/" if site else ""
    folders: dict[str, list[str]] = {}
    libraries: list[str] = []
    for path in tree.paths():
        if not path.startswith(prefix):
            continue
        inside = path[len(prefix) :]
        top, _, rest = inside.partition("/")
        if top.endswith((".dist-info", ".egg-info")):
            folders.setdefault(top, []).append(rest)
        elif ".so" in inside and _LIBRARY.match(inside.rpartition("/")[2]):
            libraries.append(inside)
    found = [_installed(tree, prefix, top, names, libraries) for top, names in sorted(folders.items())]
    return sorted(found, key=lambda item: (item.key, item.version, item.info))


def _installed(tree: Tree, prefix: str, info: str, names: list[str], libraries: list[str]) -> Installed:
    problems: list[str] = []
    file = next((name for name in ("METADATA", "PKG-INFO", "") if name in names), None)
    data = b"" if file is None else _read(tree, f"{prefix}{info}/{file}".rstrip("/"), problems)
    fields = parse_metadata(data, problems)
    if file is None:
        problems.append("it has no METADATA")
    stem = info.removesuffix(".dist-info").removesuffix(".egg-info")
    name, _, version = stem.partition("-")
    name = clean((fields.get("name") or [name])[0], 200) or clean(name, 200) or "unknown"
    version = clean((fields.get("version") or [version.partition("-py")[0]])[0], 200)
    direct = (
        _direct_url(tree, f"{prefix}{info}/direct_url.json", problems) if "direct_url.json" in names else {}
    )
    sboms = [item for item in sorted(names) if item.startswith("sboms/") and item.endswith(_SBOM_SUFFIXES)]
    owned = _owned(tree, f"{prefix}{info}/RECORD", libraries, problems) if "RECORD" in names else []
    return Installed(
        name,
        version,
        info,
        fields,
        tuple(_requirements(fields, problems)),
        editable=direct.get("editable") == "true",
        archive=direct.get("sha256", ""),
        commit=direct.get("commit", ""),
        sboms=tuple((item, _read(tree, f"{prefix}{info}/{item}", problems)) for item in sboms),
        libraries=tuple(_library(tree, prefix, path) for path in owned),
        problems=tuple(problems),
    )


def _read(tree: Tree, path: str, problems: list[str]) -> bytes:
    try:
        return tree.read(path)
    except SbomError as error:
        problems.append(f"{path.rpartition('/')[2]}: {error.what}")
        return b""


def parse_metadata(data: bytes, problems: list[str]) -> dict[str, list[str]]:
    """The headers of a METADATA file. Only they: the description below the empty line is not needed."""
    head = re.split(rb"\r?\n\r?\n", data, maxsplit=1)[0]
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError:
        text = head.decode("latin-1")
        problems.append("its METADATA is not UTF-8")
    fields: dict[str, list[str]] = {}
    last: list[str] | None = None
    for line in text.split("\n"):
        if line[:1] in (" ", "\t"):
            if last and len(last[-1]) < 4 * MAX_TEXT:  # a licence's whole text stands here, folded
                last[-1] += "\n" + line.strip()
            continue
        name, colon, value = line.partition(":")
        if colon:
            last = fields.setdefault(name.strip().lower(), [])
            last.append(value.strip()[: 4 * MAX_TEXT])
    return fields


def _requirements(fields: Mapping[str, Sequence[str]], problems: list[str]) -> list[Requirement]:
    found: list[Requirement] = []
    for line in fields.get("requires-dist", ()):
        try:
            found.append(Requirement(line))
        except InvalidRequirement:
            problems.append(f"a requirement cannot be read: {clean(line, 100)}")
    return found


def _direct_url(tree: Tree, path: str, problems: list[str]) -> dict[str, str]:
    """What direct_url.json tells of the origin; its URL names a place on one machine and is left out."""
    try:
        said = json.loads(_read(tree, path, problems) or b"{}")
        editable = bool(said.get("dir_info", {}).get("editable", False))
        digest = str(said.get("archive_info", {}).get("hashes", {}).get("sha256", ""))
        commit = str(said.get("vcs_info", {}).get("commit_id", ""))
    except (ValueError, AttributeError, RecursionError):
        problems.append("its direct_url.json cannot be read")
        return {}
    return {
        "editable": "true" if editable else "false",
        "sha256": digest if re.fullmatch(r"[0-9a-f]{64}", digest) else "",
        "commit": clean(commit, 100),
    }


def _owned(tree: Tree, record: str, libraries: list[str], problems: list[str]) -> list[str]:
    """Those of `libraries` that a RECORD lists."""
    if not libraries:
        return []
    listed = {
        line.partition(",")[0].strip('"')
        for line in _read(tree, record, problems).decode("utf-8", "replace").splitlines()
        if ".so" in line
    }
    return [path for path in libraries if path in listed]


def _library(tree: Tree, prefix: str, path: str) -> Library:
    match = _LIBRARY.match(path.rpartition("/")[2])
    assert match is not None  # `read_inventory` has looked
    return Library(match[1], match[3].lstrip("."), clean(prefix + path), tree.sha256(prefix + path))
