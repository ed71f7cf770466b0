"""Edges: those that hold here, all of them, and no others; the truth is computed with pip's own code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sbom.graph import resolve
from supplychain import boms
from tests.conftest import BUILT
from tests.sbom.support import bom, install, inventory

# Runs in an interpreter that has pip: what pip's resolver would follow, for the distributions of one folder.
PIP = """
import json, sys
from pip._internal.metadata import get_environment
from pip._vendor.packaging.utils import canonicalize_name
dists = {d.canonical_name: d for d in get_environment([sys.argv[1]]).iter_all_distributions()}
extras = {name: set() for name in dists}
edges = set()
while True:
    before = len(edges), sum(map(len, extras.values()))
    for name, dist in dists.items():
        for requirement in dist.iter_dependencies(sorted(extras[name])):
            target = canonicalize_name(requirement.name)
            if target in dists:
                if target != name:
                    edges.add((name, target))
                extras[target] |= {canonicalize_name(extra) for extra in requirement.extras}
    if before == (len(edges), sum(map(len, extras.values()))):
        break
print(json.dumps(sorted(edges)))
"""


def places() -> list[Path]:
    found = [Path(sys.prefix)]
    if BUILT is not None:
        found += [
            Path(BUILT) / name for name in ("gate", "training", "tools") if (Path(BUILT) / name).is_dir()
        ]
    return found


@pytest.mark.parametrize("place", places(), ids=lambda path: path.name)
def test_no_edge_is_false_and_none_is_missing(place: Path) -> None:
    """Against pip's own reading of the metadata, on real environments."""
    found = boms.unverified_inventory(place.resolve())
    ours = {
        (key, target) for key, targets in resolve(found.installed, {}).edges.items() for target in targets
    }
    (site,) = place.glob("lib/python3.*/site-packages")
    done = subprocess.run(
        [sys.executable, "-I", "-c", PIP, str(site)], capture_output=True, text=True, check=True, timeout=120
    )
    assert ours == {tuple(edge) for edge in json.loads(done.stdout)}
    assert len(found.installed) < 5 or ours


def test_a_marker_that_does_not_hold_gives_no_edge(tmp_path: Path) -> None:
    install(tmp_path, "colorama")
    install(tmp_path, "click", headers=['Requires-Dist: colorama; platform_system == "Windows"'])
    assert resolve(inventory(tmp_path), {"platform_system": "Linux"}).edges["click"] == set()
    assert resolve(inventory(tmp_path), {"platform_system": "Windows"}).edges["click"] == {"colorama"}


def test_an_extra_counts_only_where_it_is_asked_for(tmp_path: Path) -> None:
    install(tmp_path, "torch")
    install(tmp_path, "hub", headers=['Requires-Dist: torch; extra == "torch"', "Provides-Extra: torch"])
    assert resolve(inventory(tmp_path), {}).edges["hub"] == set()
    install(tmp_path, "user", headers=["Requires-Dist: hub[Torch]"])
    assert resolve(inventory(tmp_path), {}).edges["hub"] == {"torch"}


def test_extras_spread_also_through_the_package_itself(tmp_path: Path) -> None:
    install(tmp_path, "a")
    install(tmp_path, "b")
    headers = ['Requires-Dist: pack[one]; extra == "all"', 'Requires-Dist: a; extra == "one"']
    install(tmp_path, "pack", headers=headers)
    install(tmp_path, "user", headers=["Requires-Dist: pack[all]"])
    graph = resolve(inventory(tmp_path), {})
    assert graph.edges["pack"] == {"a"}
    assert graph.roots == ["b", "user"]


def test_what_is_not_satisfied_is_said_and_not_drawn(tmp_path: Path) -> None:
    install(tmp_path, "old", "1.0")
    install(tmp_path, "user", headers=["Requires-Dist: old>=2", "Requires-Dist: absent"])
    graph = resolve(inventory(tmp_path), {})
    assert graph.unmet["user"] == ["old>=2", "absent"]
    assert graph.edges["user"] == {"old"}
    assert {"aggregate": "incomplete", "dependencies": ["user@1.0"]} in bom(tmp_path)["compositions"]


def test_a_circle_is_reached_from_the_root(tmp_path: Path) -> None:
    install(tmp_path, "a", headers=["Requires-Dist: b"])
    install(tmp_path, "b", headers=["Requires-Dist: a"])
    assert resolve(inventory(tmp_path), {}).roots == ["a"]


@pytest.mark.parametrize(
    "line", ["not a requirement !!", 'x; nonsense == "1"', "x; python_version == 3", "[]"]
)
def test_a_requirement_that_cannot_be_read_is_a_problem(tmp_path: Path, line: str) -> None:
    install(tmp_path, "odd", headers=[f"Requires-Dist: {line}"])
    (item,) = inventory(tmp_path)
    assert item.problems
