"""The bill of materials of an environment: every distribution, what is inside it, and what needs what.

Made from an inventory that was read as files. Promises:

- each component has the sha256 of the wheel it came from, a licence, a producer and a version, or a property
  `secure-train:unknown` that names what is not known: nothing is invented, and nothing is left out silently;
- edges are those whose markers and extras hold here (`sbom.graph`), and everything is reached from the root;
- embedded bills of materials and native libraries are nested in the distribution that brings them;
- `secure-train:verified` says whether what it was read from had passed verification;
- no path, host or user of the machine is in it: the same wheels give the same bytes in any folder.

The document is plain dictionaries, because cyclonedx-python-lib needs ten times longer for the same and
cannot say all of it; the library reads it and writes the XML (`sbom.xml`), and the tests compare the two.
"""

from __future__ import annotations

import datetime as dt
import email.utils
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from packageurl import PackageURL

from sbom import document
from sbom.document import PREFIX, Document
from sbom.embedded import Embedded, Part, read_embedded
from sbom.graph import Graph, resolve
from sbom.inventory import Installed, Library, clean, normalize
from sbom.licenses import licence_of
from sbom.validate import purl_problem

ROOT = "environment"
INTERPRETER = "interpreter"
_URLS = {  # labels of Project-URL, in small letters only
    "homepage": "website", "home": "website", "source": "vcs", "sourcecode": "vcs", "repository": "vcs",
    "github": "vcs", "documentation": "documentation", "docs": "documentation", "issues": "issue-tracker",
    "tracker": "issue-tracker", "bugtracker": "issue-tracker", "issuetracker": "issue-tracker",
    "changelog": "release-notes", "releasenotes": "release-notes", "changes": "release-notes",
}  # fmt: skip
_URL = re.compile(r"https?://[A-Za-z0-9.\-]+(?::\d+)?(?:/[\w\-.~!$&'()*+,;=:@%/?#]*)?", re.ASCII)
_EMAIL = re.compile(r"[^@\s<>]+@[A-Za-z0-9.\-]+\.[A-Za-z]{2,}", re.ASCII)


@dataclass(frozen=True)
class Wheel:
    """The archive that a distribution came from, as far as known; `files` digests what it brought. `allowed`:
    the archives of which a lock allows any.
    """

    sha256: str
    filename: str = ""
    files: str = ""
    allowed: Sequence[str] = ()


@dataclass(frozen=True)
class Setting:
    """What surrounds the distributions.

    `verified`: "true" if every file was compared with the signed manifest, "read" if those that were read
    were, "false" otherwise. `wheels` by metadata folder; `missing` names what a lock pins and nothing
    installed is. `phase` is the phase of the software's life in which this was made.
    """

    verified: str = "false"
    wheels: Mapping[str, Wheel] = field(default_factory=dict)
    markers: Mapping[str, str] = field(default_factory=dict)
    lock: str = ""
    profile: str = ""
    python: str = ""
    platform: str = ""
    python_sha256: str = ""
    authors: Sequence[str] = ()
    phase: str = "post-build"
    missing: Sequence[str] = ()


def environment_bom(
    installed: Sequence[Installed],
    setting: Setting,
    *,
    time: dt.datetime,
    tool_version: str,
    spec: str = "1.6",
) -> Document:
    """The BOM of `installed`, as CycloneDX `spec`, made at `time` by this version of secure-train."""
    builder = _Builder(installed, setting, resolve(installed, setting.markers))
    return document.finish(builder.document(tool_version), spec, time)


class _Builder:
    """Turns facts into components; gives out references that are unique in the document."""

    def __init__(self, installed: Sequence[Installed], setting: Setting, graph: Graph) -> None:
        self.installed, self.setting, self.graph = installed, setting, graph
        self.refs: dict[str, list[str]] = {}
        self.dependencies: dict[str, set[str]] = {ROOT: set()}
        self.incomplete: list[str] = []  # what holds more than is listed in it
        self.uncertain: list[str] = []  # what may need more than is drawn
        self._taken: set[str] = {ROOT, INTERPRETER}

    def document(self, tool_version: str) -> Document:
        named = [(item, self._unique(_versioned(item.key, item.version))) for item in self.installed]
        for item, ref in named:
            self.refs.setdefault(item.key, []).append(ref)
        components = [self._distribution(item, ref) for item, ref in named]
        if self.setting.python:
            components.append(self._interpreter())
        self._edges()
        return {
            "metadata": metadata(self._root(), self.setting.phase, self.setting.authors, tool_version),
            "components": components,
            "dependencies": [
                {"ref": ref, "dependsOn": sorted(targets)} if targets else {"ref": ref}
                for ref, targets in sorted(self.dependencies.items())
            ],
            "compositions": self._compositions(),
        }

    def _edges(self) -> None:
        for key, targets in self.graph.edges.items():
            for ref in self.refs[key]:
                found = {other for target in targets for other in self.refs[target]}
                self.dependencies.setdefault(ref, set()).update(found)
        self.dependencies[ROOT] |= {ref for key in self.graph.roots for ref in self.refs[key]}
        if self.setting.python:
            self.dependencies[ROOT].add(INTERPRETER)
            self.dependencies[INTERPRETER] = set()

    def _compositions(self) -> list[Document]:
        """What is complete and what is known not to be."""
        whole = sorted(ref for refs in self.refs.values() for ref in refs if ref not in self.uncertain)
        complete = self.setting.verified != "false" and not self.setting.missing
        found: list[Document] = [
            {"aggregate": "complete" if complete else "unknown", "dependencies": [ROOT, *whole]}
        ]
        if self.uncertain:
            found.append({"aggregate": "incomplete", "dependencies": sorted(self.uncertain)})
        if self.incomplete:
            found.append({"aggregate": "incomplete", "assemblies": sorted(self.incomplete)})
        return found

    def _unique(self, wanted: str) -> str:
        ref, number = wanted, 1
        while ref in self._taken:
            number += 1
            ref = f"{wanted}~{number}"
        self._taken.add(ref)
        return ref

    def _root(self) -> Document:
        setting = self.setting
        contents = self._contents()
        about = {
            "verified": setting.verified,
            "lock:sha256": setting.lock,
            "profile": setting.profile,
            "platform": setting.platform,
            "hash-of": "sorted lines: wheel, digest of its files, name==version",
        }
        return component(
            "application",
            ROOT,
            "python-environment",
            contents[:16],
            purl=PackageURL("generic", None, "python-environment", contents[:16]).to_string(),
            hashes=[("SHA-256", contents)],
            properties=[*about.items(), *(("missing", name) for name in setting.missing)],
            unknown=["license", "producer"],
        )

    def _contents(self) -> str:
        """What is installed, wherever it lies: the manifest also binds the path of the folder."""
        outer = hashlib.sha256()
        lines = []
        for item in self.installed:
            wheel = self._wheel(item)
            archive = wheel.sha256 or ",".join(wheel.allowed) or "-"
            lines.append(f"{archive} {wheel.files or '-'} {item.key}=={item.version}\n")
        for line in sorted(lines):
            outer.update(line.encode())
        return outer.hexdigest()

    def _wheel(self, item: Installed) -> Wheel:
        return self.setting.wheels.get(item.info, Wheel(item.archive))

    def _interpreter(self) -> Document:
        known = self.setting.python_sha256
        return component(
            "platform",
            INTERPRETER,
            "CPython",
            self.setting.python,
            purl=PackageURL("generic", None, "cpython", self.setting.python).to_string(),
            hashes=[("SHA-256", known)] if known else [],
            unknown=["license", "producer"],
        )

    def _distribution(self, item: Installed, ref: str) -> Document:
        wheel, licence = self._wheel(item), licence_of(item)
        embedded = [read_embedded(file, data) for file, data in item.sboms]
        problems = [*item.problems, *(one.problem for one in embedded if one.problem)]
        unmet = self.graph.unmet.get(item.key, [])
        if problems or unmet:
            self.uncertain.append(ref)
        if item.libraries or problems or item.editable:
            self.incomplete.append(ref)
        hashed = wheel.sha256 if not item.editable else ""  # a wheel's hash says nothing of a checkout
        about = {
            "verified": self.setting.verified if not item.editable else "false",
            "wheel": wheel.filename,
            "license-source": licence.source,
            "public-version": item.version.partition("+")[0] if "+" in item.version else "",
            "editable": "the code of a checkout is used in place" if item.editable else "",
            "commit": item.commit,
            "duplicate": "true" if len(self.refs[item.key]) > 1 else "",
        }
        nested = [part for one in embedded for part in self._embedded(one, item, ref)]
        nested += [self._library(library, ref) for library in item.libraries]
        return component(
            "library",
            ref,
            item.name,
            item.version,
            purl=PackageURL("pypi", None, item.key, item.version or None).to_string(),
            hashes=[("SHA-256", hashed)] if hashed else [],
            licence=licence.expression,
            licence_name=licence.name,
            authors=list(_authors(item)),
            properties=[
                *about.items(),
                *(("locked", digest) for digest in wheel.allowed),
                *(("problem", text) for text in problems),
                *(("unmet", text) for text in unmet),
            ],
            description=clean(item.first("summary"), 500),
            externalReferences=list(_references(item)),
            components=nested,
        )

    def _embedded(self, said: Embedded, item: Installed, ref: str) -> Iterator[Document]:
        """The parts of an embedded document, and its edges. A part can be the distribution itself."""
        names: dict[str, str] = {}
        for part in said.parts:
            if part.ref in names:
                continue
            if (
                part.ref == said.root
                and part.purl.startswith("pkg:pypi/")
                and normalize(part.name) == item.key
            ):
                names[part.ref] = ref
                continue
            names[part.ref] = self._unique(f"{ref}#{_versioned(part.name, part.version)}")
            yield component(
                part.type,
                names[part.ref],
                part.name,
                part.version,
                purl=_purl(part),
                hashes=part.hashes,
                licence=part.licence,
                authors=[{"name": name} for name in part.producers],
                properties=[("source", said.file)],
            )
        if said.root in names and names[said.root] != ref:
            self.dependencies.setdefault(ref, set()).add(names[said.root])
        for source, targets in said.edges.items():
            if source in names:
                found = {names[target] for target in targets if target in names} - {names[source]}
                self.dependencies.setdefault(names[source], set()).update(found)

    def _library(self, library: Library, ref: str) -> Document:
        """A native library: its name is what its file is called, its release is known to nobody here."""
        known = library.sha256
        checksum = {"checksum": f"sha256:{known}"} if known else None
        return component(
            "library",
            self._unique(f"{ref}#{library.path.rpartition('/')[2]}"),
            library.name,
            "",
            purl=PackageURL("generic", None, library.name, None, checksum).to_string(),
            hashes=[("SHA-256", known)] if known else [],
            properties=[("native", "true"), ("soname-version", library.soname)],
            evidence={
                "identity": [
                    {
                        "field": "name",
                        "concludedValue": library.name,
                        "methods": [{"technique": "filename", "confidence": 1, "value": library.path}],
                    }
                ],
                "occurrences": [{"location": library.path}],
            },
        )


def metadata(root: Document, phase: str, authors: Sequence[str], tool_version: str) -> Document:
    """The head of every BOM of ours: what it is about, who made it, with what, and when in the life of it."""
    found: Document = {
        "component": root,
        "lifecycles": [{"phase": phase}],
        "tools": {
            "components": [
                {
                    "type": "application",
                    "bom-ref": "tool:secure-train",
                    "name": "secure-train",
                    "version": tool_version,
                }
            ]
        },
    }
    if authors:
        found["authors"] = [{"name": name} for name in authors]
    else:
        found["properties"] = [{"name": document.UNKNOWN, "value": "author"}]
    return found


def component(
    kind: str,
    ref: str,
    name: str,
    version: str,
    *,
    purl: str = "",
    hashes: Iterable[tuple[str, str]] = (),
    licence: str = "",
    licence_name: str = "",
    authors: Sequence[Document] = (),
    properties: Iterable[tuple[str, str]] = (),
    unknown: Iterable[str] = (),
    **more: Any,
) -> Document:
    """One component. Hash, identifier, licence, producer, version: each is there or named as unknown."""
    found: Document = {"type": kind, "bom-ref": ref, "name": name}
    if version:
        found["version"] = version
    if purl:
        found["purl"] = purl
    if digests := [{"alg": alg, "content": content} for alg, content in hashes]:
        found["hashes"] = digests
    if licence:
        found["licenses"] = [{"expression": licence, "acknowledgement": "declared"}]
    elif licence_name:
        found["licenses"] = [{"license": {"name": licence_name, "acknowledgement": "declared"}}]
    if authors:
        found["authors"] = list(authors)
    facts = {"hash": digests, "identifier": purl, "license": licence, "producer": authors, "version": version}
    missing = sorted({name for name, known in facts.items() if not known} | set(unknown))
    said = [{"name": PREFIX + name, "value": clean(value)} for name, value in properties if value]
    if missing:
        said.append({"name": document.UNKNOWN, "value": ",".join(missing)})
    if said:
        found["properties"] = said
    return found | {key: value for key, value in more.items() if value}


def _versioned(name: str, version: str) -> str:
    return f"{name}@{version}" if version else name


def _purl(part: Part) -> str:
    """The purl that a document states, in its normal form; empty if it is of something else, or malformed."""
    if not part.purl or purl_problem(part.purl, part.name, part.version):
        return ""
    return PackageURL.from_string(part.purl).to_string()


def _authors(item: Installed) -> Iterator[Document]:
    """Who made it, as its metadata says: authors, else maintainers."""
    for kind in ("author", "maintainer"):
        people: dict[str, str] = {}
        for line in item.fields.get(f"{kind}-email", ()):
            for name, address in email.utils.getaddresses([clean(line)]):
                if name or address:
                    people.setdefault(clean(name, 200) or clean(address, 200), clean(address, 200))
        for line in item.fields.get(kind, ()):
            if (text := clean(line, 200)) and text.lower() != "unknown":
                people.setdefault(text, "")
        for name, address in people.items():
            yield {"name": name, "email": address} if _EMAIL.fullmatch(address) else {"name": name}
        if people:
            return


def _references(item: Installed) -> Iterator[Document]:
    said = [("homepage", item.first("home-page"))]
    for line in item.fields.get("project-url", ()):
        label, _, url = line.partition(",")
        said.append((label, url.strip()))
    seen: set[tuple[str, str]] = set()
    for label, url in said:
        kind = _URLS.get(re.sub(r"[^a-z]", "", label.lower()), "other")
        if len(url) <= 500 and _URL.fullmatch(url) and (kind, url) not in seen and len(seen) < 50:
            seen.add((kind, url))
            yield {"type": kind, "url": url}
