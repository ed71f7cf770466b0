"""True dependency edges: which installed distribution needs which, on this interpreter.

A requirement counts if its marker holds, and an extra counts only where some installed distribution asks for
it: a hub client does not need torch because one of its extras could. Extras spread along edges, so the edges
are a fix-point. Unmet requirements are kept apart, never drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from packaging.markers import UndefinedComparison, UndefinedEnvironmentName, default_environment
from packaging.requirements import Requirement
from packaging.version import InvalidVersion, Version

from sbom.inventory import Installed, normalize


@dataclass
class Graph:
    """`edges`: key -> keys that it needs; `unmet`: key -> requirements that nothing installed satisfies;
    `roots`: what nothing else brought in, and from where everything is reached.
    """

    edges: dict[str, set[str]] = field(default_factory=dict)
    unmet: dict[str, list[str]] = field(default_factory=dict)
    roots: list[str] = field(default_factory=list)


def resolve(installed: Iterable[Installed], markers: Mapping[str, str]) -> Graph:
    """The edges between `installed` for the interpreter that `markers` describes."""
    by_key: dict[str, list[Installed]] = {}
    for item in installed:
        by_key.setdefault(item.key, []).append(item)
    environment: dict[str, str] = {name: str(value) for name, value in default_environment().items()} | dict(
        markers
    )
    extras: dict[str, set[str]] = {key: set() for key in by_key}
    graph = Graph({key: set() for key in by_key})
    waiting = sorted(by_key)
    while waiting:
        key = waiting.pop()
        for item in by_key[key]:
            for requirement in item.requires:
                if not _applies(requirement, environment, extras[key]):
                    continue
                target = normalize(requirement.name)
                if not any(_satisfies(other, requirement) for other in by_key.get(target, ())):
                    words = str(requirement)
                    if words not in graph.unmet.setdefault(key, []):
                        graph.unmet[key].append(words)
                if target not in by_key or (target == key and not requirement.extras):
                    continue
                if target != key:
                    graph.edges[key].add(target)
                wanted = {normalize(extra) for extra in requirement.extras}
                if not wanted <= extras[target]:
                    extras[target] |= wanted
                    waiting.append(target)
    graph.roots = _roots(graph.edges)
    return graph


def _applies(requirement: Requirement, environment: dict[str, str], extras: set[str]) -> bool:
    """Whether the marker holds without an extra, or with one that is asked for."""
    if requirement.marker is None:
        return True
    try:
        return any(
            requirement.marker.evaluate({**environment, "extra": extra}) for extra in ("", *sorted(extras))
        )
    except (UndefinedComparison, UndefinedEnvironmentName, InvalidVersion):
        return False


def _satisfies(item: Installed, requirement: Requirement) -> bool:
    try:
        return requirement.specifier.contains(Version(item.version), prereleases=True)
    except InvalidVersion:
        return False


def _roots(edges: Mapping[str, set[str]]) -> list[str]:
    """What nothing needs; and of a circle that nothing outside needs, its first."""
    needed = {target for targets in edges.values() for target in targets}
    roots = sorted(edges.keys() - needed)
    reached = _reach(roots, edges)
    for key in sorted(edges):
        if key not in reached:
            roots.append(key)
            reached |= _reach([key], edges)
    return sorted(roots)


def _reach(start: Sequence[str], edges: Mapping[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    waiting = list(start)
    while waiting:
        key = waiting.pop()
        if key not in reached:
            reached.add(key)
            waiting.extend(edges.get(key, ()))
    return reached
