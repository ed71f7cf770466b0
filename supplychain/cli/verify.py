"""`secure-train verify`."""

from __future__ import annotations

from pathlib import Path

import click

from supplychain.artifact.digest import Progress
from supplychain.cli import options
from supplychain.cli.output import Console, show_tree
from supplychain.plan import FILE
from supplychain.trust import roots
from supplychain.trust.roots import Identity, Instance, Signatory
from supplychain.verdict import Checker, Node, verify_foreign, verify_into


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
@click.option(
    "--identity",
    metavar="SAN",
    help="Trust this identity instead of a policy; with --issuer and --trusted-root.",
)
@click.option("--issuer", metavar="URL", help="Who names the identity.")
@click.option(
    "--trusted-root",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The trusted_root.json of the Sigstore instance; nothing is fetched, and no cache is read.",
)
@click.option(
    "--signature",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Check the one folder by this signature of another tool (OpenSSF Model Signing), such as model.sig.",
)
@click.option("--paranoid", is_flag=True, help="Compare the sha256 of large files as well as their blocks.")
@options.json_option
def command(
    paths: tuple[Path, ...],
    policy: Path | None,
    pin: str | None,
    keys: tuple[str, ...],
    identity: str | None,
    issuer: str | None,
    trusted_root: Path | None,
    signature: Path | None,
    paranoid: bool,
    as_json: bool,
) -> int:
    """Check runs and signed artifacts: signatures, identities and every byte; a run to its last input.

    Needs no network and executes nothing of what it checks. What is not here any more is shown as not
    checked.
    """
    console = Console(as_json)
    named: list[Signatory] = [roots.key_store().public(name) for name in keys]
    if (identity, issuer, trusted_root) != (None, None, None):
        named.append(_identity(identity, issuer, trusted_root))
    with console.progress("hashing") as progress:
        checker = _checker(policy, pin, named, progress, paranoid)
        if signature is not None:
            if len(paths) != 1:
                raise click.UsageError("--signature belongs to one folder.")
            trees = [verify_foreign(paths[0].absolute(), signature.absolute(), checker)]
        else:
            trees = [_verified(path.absolute(), checker) for path in paths]
    for tree in trees:
        show_tree(console, tree)
    code = max((tree.exit_code for tree in trees), key=lambda value: (value == 3, value == 4, value))
    console.answer("verify", code, results=[tree.as_dict() for tree in trees])
    return code


def _verified(path: Path, checker: Checker) -> Node:
    """A run or a signed artifact. Only a run needs what knows the whole gate, and the time to load it."""
    if not (path / FILE).is_file():
        return verify_into(Node(str(path)), path, None, checker)
    from supplychain import lineage

    return lineage.verify_run(path, checker)


def _checker(
    path: Path | None, pin: str | None, named: list[Signatory], progress: Progress, paranoid: bool
) -> Checker:
    if named:
        return Checker.by_signatories(named, progress, paranoid=paranoid)
    from supplychain import policy  # late: it brings pydantic, and a named signer needs no policy

    found = policy.load(options.policy_path(path), trusted=roots.policy_keys().list(), pinned=pin)
    return Checker.by_policy(found, progress, paranoid=paranoid)


def _identity(subject: str | None, issuer: str | None, root: Path | None) -> Identity:
    if subject is None or issuer is None or root is None:
        raise click.UsageError("--identity, --issuer and --trusted-root belong together.")
    data = options.read(root, "the trusted root")
    return Identity(subject, issuer, subject, Instance(root.name, data))
