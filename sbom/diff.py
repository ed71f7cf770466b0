"""What changed between two bills of materials, and which changes are an alarm.

Components are matched by what they are (purl without version, else type and name). A release does not
change, so other bytes under an unchanged version, or a hash that is no longer known, is an alarm;
everything else is news.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from packageurl import PackageURL

from sbom.document import Document, components, unknowns


@dataclass(frozen=True)
class Change:
    """One difference. `kind`: added, removed, version, hash, license, edges, or unknown (a fact was lost)."""

    kind: str
    component: str
    before: str
    after: str
    alarm: bool = False

    def as_dict(self) -> dict[str, str | bool]:
        return dict(self.__dict__)


def diff(before: Document, after: Document) -> list[Change]:
    """The changes from `before` to `after`, alarms first."""
    old, new = _by_identity(before), _by_identity(after)
    edges_before, edges_after = _edges(before), _edges(after)
    changes: list[Change] = []
    for key in sorted(old.keys() | new.keys()):
        changes += _compare(key, old.get(key, {}), new.get(key, {}))
        if key in old and key in new:
            lost, found = edges_before.get(key, set()), edges_after.get(key, set())
            if lost != found:
                changes.append(Change("edges", key, _words(lost - found), _words(found - lost)))
    return sorted(changes, key=lambda change: (not change.alarm, change.component, change.kind))


def _compare(key: str, old: dict[str, Document], new: dict[str, Document]) -> Iterator[Change]:
    """One thing in all its versions, before and after."""
    gone, come = sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())
    if gone and come:
        yield Change("version", key, ", ".join(gone), ", ".join(come))
    elif come:
        yield Change("added", key, "", ", ".join(come))
    elif gone:
        yield Change("removed", key, ", ".join(gone), "")
    for version in sorted(old.keys() & new.keys()):
        yield from _facts(f"{key}@{version}" if version else key, old[version], new[version])


def _facts(name: str, old: Document, new: Document) -> Iterator[Change]:
    hashes = [{item["alg"]: item["content"] for item in side.get("hashes", [])} for side in (old, new)]
    for kind in sorted(hashes[0]):
        after = hashes[1].get(kind)
        if after != hashes[0][kind]:
            # The root is identified by its content, so its version changes with it and it never comes here.
            change = f"{kind}:{after}" if after else "unknown"
            yield Change("hash", name, f"{kind}:{hashes[0][kind]}", change, alarm=True)
    licences = [_licence(side) for side in (old, new)]
    if licences[0] != licences[1]:
        yield Change("license", name, licences[0], licences[1])
    lost = sorted(unknowns(new) - unknowns(old) - {"hash", "license"})
    if lost:
        yield Change("unknown", name, "known", f"{', '.join(lost)} unknown")


def _licence(component: Document) -> str:
    found = []
    for item in component.get("licenses", []):
        license_ = item.get("license", {})
        found.append(item.get("expression") or license_.get("id") or license_.get("name") or "")
    return " AND ".join(sorted(found)) or "unknown"


def identity(component: Document) -> str:
    """What a component is, whatever its version and bytes."""
    if text := component.get("purl"):
        try:
            purl = PackageURL.from_string(text)
        except ValueError:
            pass
        else:
            return PackageURL(purl.type, purl.namespace, purl.name, None, None, purl.subpath).to_string()
    return f"{component.get('type')}:{component.get('name')}"


def _by_identity(document: Document) -> dict[str, dict[str, Document]]:
    found: dict[str, dict[str, Document]] = {}
    for item in components(document):
        found.setdefault(identity(item), {}).setdefault(str(item.get("version", "")), item)
    return found


def _edges(document: Document) -> dict[str, set[str]]:
    names = {item["bom-ref"]: identity(item) for item in components(document) if "bom-ref" in item}
    found: dict[str, set[str]] = {}
    for item in document.get("dependencies", []):
        if item["ref"] in names:
            targets = {names[ref] for ref in item.get("dependsOn", []) if ref in names}
            found.setdefault(names[item["ref"]], set()).update(targets)
    return found


def _words(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"
