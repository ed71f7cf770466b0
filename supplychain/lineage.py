"""Re-checking what a folder claims, offline and to the last input: a run with its whole graph, or any signed
artifact.

The result is a tree for people and programs: what was verified, who signed it, what could not be checked
because it is not here. Nothing in the folder is believed before a signature of the policy's roles vouches for
it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from supplychain import chain, launch, run, runbom, statement
from supplychain.artifact import tree
from supplychain.chain import Link
from supplychain.errors import SecureTrainError
from supplychain.plan import FILE, Input, Plan
from supplychain.policy import Policy
from supplychain.trust import bundle
from supplychain.trust.verify import verify_statement
from supplychain.verdict import Checker, Node, attempt, fail, verify_foreign, verify_into

__all__ = ["Checker", "Node", "verify_folder", "verify_foreign", "verify_run"]


def verify_folder(path: Path, checker: Checker) -> Node:
    """A run or a signed artifact, whichever the folder is. ST-A09 in the tree if it is neither."""
    if (path / FILE).is_file():
        return verify_run(path, checker)
    return verify_into(Node(str(path)), path, None, checker)


def verify_run(path: Path, checker: Checker) -> Node:
    """Decisions, inputs, every checkpoint of the chain, provenance and result."""
    root = Node(f"run {path.name}")
    if checker.policy is None:
        return fail(
            root,
            SecureTrainError(
                "ST-P02",
                "a run is verified under a policy",
                where=str(path),
                next_step="name it with --policy",
            ),
        )
    policy = checker.policy
    plan = attempt(root, lambda: Plan.read(path))
    if plan is None:
        return root
    root.title = f"run {plan.run_id}"
    root.add(Node(f"policy {policy.id}", note=f"vouched for by {policy.vouched_by}"))
    node = root.add(Node("decisions"))
    segments = attempt(node, lambda: run.verified_segments(path, plan, policy))
    if segments is None:
        return root
    for segment in segments:
        node.add(_segment(segment, policy))
    decisions = [segment.decision for segment in segments]
    inputs = root.add(Node("inputs"))
    for item in plan.inputs:
        if item.kind != "checkpoint":  # the checkpoint that was resumed from stands in the chain
            inputs.add(_input(item, checker))
    inputs.add(_environment(plan, checker))
    links = _checkpoints(root, path, plan, decisions, checker)
    step = links[-1].step if links else 0
    root.note = (
        f"complete, {step} steps" if step == plan.steps else f"NOT COMPLETE: step {step} of {plan.steps}"
    )
    _provenance(root, path, plan, links, policy)
    return root


def _segment(segment: run.Segment, policy: Policy) -> Node:
    """What one launch was allowed to do, held against the policy at hand: an earlier one may be laxer."""
    plan, rules = segment.plan, policy.document
    wanted, reads = rules.run.isolation, plan.document["reads"]
    checks = [
        ("ST-P06", rules.environment.require_sealed and not plan.environment["sealed"], "sealed", "editable"),
        ("ST-P07", reads not in rules.run.reads, ", ".join(rules.run.reads), reads),
        (
            "ST-P08",
            wanted == "required" and plan.launch["isolation"] != wanted,
            wanted,
            plan.launch["isolation"],
        ),
    ]
    node = Node(f"segment {plan.segment}")
    node.note = (
        f"{plan.document['code']['kind']} code in environment sha256:{plan.environment['manifest'][:16]}..."
    )
    if plan.document["policy"]["sha256"] != policy.digest:
        node.note += f", decided under the policy {plan.document['policy']['id']!r} as it was then"
    for code, broken, expected, found in checks:
        if broken:
            what = f"segment {plan.segment} of the run was laxer than this policy"
            fail(node, SecureTrainError(code, what, expected=expected, found=str(found)))
    return node


def _checkpoints(root: Node, path: Path, plan: Plan, decisions: list[str], checker: Checker) -> list[Link]:
    node = root.add(Node("checkpoints"))
    links = attempt(node, lambda: chain.load(path, plan.run_id, checker.trust, run.ROLE, decisions)) or []
    if links:
        node.note = f"chain of {len(links)}, head sha256:{links[-1].head[:16]}..."
    for link in links:
        folder = path / chain.CHECKPOINTS / link.name
        verify_into(node.add(Node(link.name)), folder, "checkpoint", checker, link.manifest)
    known = {link.step for link in links}
    for step, folder in chain.checkpoint_folders(path):
        if step not in known:
            fail(
                node.add(Node(folder.name)),
                SecureTrainError(
                    "ST-A09",
                    "the checkpoint is not in the signed chain",
                    where=str(folder),
                    next_step=f"secure-train run --resume {path}",
                ),
            )
    for stranger in chain.strangers(path):
        problem = "something that is no checkpoint lies among them"
        error = SecureTrainError(
            "ST-A05", problem, where=str(stranger), next_step="find out where it came from, and remove it"
        )
        fail(node.add(Node(stranger.name)), error)
    return links


def _provenance(root: Node, path: Path, plan: Plan, links: list[Link], policy: Policy) -> None:
    file = path / launch.PROVENANCE
    node = root.add(Node("provenance"))
    if not file.exists():
        if links and links[-1].step == plan.steps and launch.phase(path) in ("done", None):
            fail(
                node,
                SecureTrainError(
                    "ST-R03",
                    "the provenance of a completed run is missing",
                    where=str(file),
                    next_step="restore the folder of statements",
                ),
            )
        else:
            node.state, node.note = "not checked", "there is none: the run is not complete"
        return

    def check() -> str:
        if not links:
            raise SecureTrainError(
                "ST-R03", "there is a provenance, and no checkpoint in the chain", where=str(file)
            )
        verified = verify_statement(
            tree.read_named(file, limit=bundle.MAX_BUNDLE, what="the provenance", code="ST-R03"),
            policy.trust,
            run.ROLE,
            statement.PROVENANCE,
            subject=links[-1].manifest,
            where=str(file),
        )
        _compare_provenance(verified.statement, plan, links[-1], file)
        _boms(root, path, verified.statement)
        return f"SLSA v1, {statement.BUILD_TYPE}, signed by {verified.signer.name}"

    node.note = attempt(node, check) or ""


def _compare_provenance(document: dict[str, Any], plan: Plan, last: Link, file: Path) -> None:
    """ST-R06 unless the provenance tells of this plan and of this chain."""
    try:
        definition = document["predicate"]["buildDefinition"]
        head = definition["internalParameters"]["chain"]["head"]["sha256"]
        materials = {item["name"]: item["digest"]["sha256"] for item in definition["resolvedDependencies"]}
        build_type = definition["buildType"]
    except (KeyError, TypeError):
        raise SecureTrainError("ST-S03", "the provenance is malformed", where=str(file)) from None
    expected = {
        "plan": plan.digest,
        "policy": plan.document["policy"]["sha256"],
        "environment": plan.environment["manifest"],
        "decision": last.decision,
    }
    expected |= {f"{item.kind}:{item.name}": item.manifest for item in plan.inputs}
    wrong = [name for name, digest in expected.items() if materials.get(name) != digest]
    if head != last.head or wrong or build_type != statement.BUILD_TYPE:
        what = f"the material {wrong[0]!r}" if wrong else "the head of the chain or the build type"
        raise SecureTrainError(
            "ST-R06",
            f"the provenance does not describe this run: {what} differs",
            where=str(file),
            next_step="restore the run's folder",
        )


def _boms(root: Node, path: Path, provenance: dict[str, Any]) -> None:
    """The bills of materials that the provenance refers to, by digest."""
    node = root.add(Node("bills of materials"))
    listed = [
        (str(item.get("name")), str(item.get("digest", {}).get("sha256")))
        for item in provenance["predicate"].get("runDetails", {}).get("byproducts", [])
        if str(item.get("name")).startswith(f"{runbom.FOLDER}/")
    ]
    if not listed:
        node.state, node.note = "not checked", "the provenance refers to none"
    for name, digest in listed:
        found = runbom.digest_of(path / name)
        if found != digest:
            fail(
                node,
                SecureTrainError(
                    "ST-R06",
                    "a bill of materials is not the one that the provenance refers to",
                    where=str(path / name),
                    expected=f"sha256:{digest}",
                    found=f"sha256:{found}" if found else "no such file",
                    next_step="restore the run's folder",
                ),
            )
        else:
            node.note += f"{', ' if node.note else ''}{name.removeprefix(runbom.FOLDER + '/')}"


def _input(item: Input, checker: Checker) -> Node:
    node = Node(f"{item.kind} {item.name}")
    path = Path(item.path)
    if not path.is_dir():
        node.state, node.note = (
            "not checked",
            f"not here any more ({path}); signed manifest sha256:{item.manifest[:16]}...",
        )
        return node
    return verify_into(node, path, item.kind, checker, item.manifest)


def _environment(plan: Plan, checker: Checker) -> Node:
    prefix = Path(plan.environment["prefix"])
    node = Node(f"environment {prefix.name}")
    if not prefix.is_dir():
        node.state, node.note = "not checked", f"not here any more ({prefix})"
        return node
    return verify_into(node, prefix, "environment", checker, plan.environment["manifest"])
