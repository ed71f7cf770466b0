"""`secure-train verify`."""

from __future__ import annotations

from pathlib import Path

import click

from supplychain import lineage, policy
from supplychain.artifact.digest import Progress
from supplychain.cli import options
from supplychain.cli.output import Console, show_tree
from supplychain.lineage import Checker
from supplychain.trust import roots
from supplychain.trust.keys import KeyStore


@click.command()
@click.argument("paths", nargs=-1, required=True, type=click.Path(path_type=Path))
@options.policy_option
@options.pin_option
@click.option(
    "--key",
    "keys",
    multiple=True,
    metavar="FILE.pub",
    help="Trust this public key instead of a policy; may be repeated.",
)
@options.json_option
def command(
    paths: tuple[Path, ...], policy: Path | None, pin: str | None, keys: tuple[str, ...], as_json: bool
) -> int:
    """Check runs and signed artifacts: signatures, identities and every byte; a run to its last input.

    Needs no network and executes nothing of what it checks. What is not here any more is shown as not
    checked.
    """
    console = Console(as_json)
    with console.progress("hashing") as progress:
        checker = _checker(policy, pin, keys, progress)
        trees = [lineage.verify_folder(path.absolute(), checker) for path in paths]
    for tree in trees:
        show_tree(console, tree)
    code = max((tree.exit_code for tree in trees), key=lambda value: (value == 3, value == 4, value))
    console.answer("verify", code, results=[tree.as_dict() for tree in trees])
    return code


def _checker(path: Path | None, pin: str | None, keys: tuple[str, ...], progress: Progress) -> Checker:
    if keys:
        store: KeyStore = roots.key_store()
        return Checker.by_keys([store.public(name) for name in keys], progress)
    file = options.policy_path(path)
    return Checker.by_policy(policy.load(file, trusted=roots.policy_keys().list(), pinned=pin), progress)
