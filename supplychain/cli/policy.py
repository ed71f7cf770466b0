"""`secure-train policy new|sign|show`."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import click

from supplychain import policy
from supplychain.cli import options
from supplychain.cli.output import Console
from supplychain.trust import roots

_file = click.argument("file", type=click.Path(path_type=Path))


@click.group()
def command() -> None:
    """Make, sign and show policies: who may vouch for what, and until when."""


@command.command()
@_file
@click.option("--profile", default="development", show_default=True, help="Shipped policy to start from.")
@options.key_option
@options.json_option
def new(file: Path, profile: str, key: str | None, as_json: bool) -> int:
    """Write a policy to FILE that trusts your key in every role, and sign it."""
    console = Console(as_json)
    signer = options.signer(key)
    policy.new(file, profile, signer, now=dt.datetime.now(dt.UTC))
    console.text(
        f"{file}: {profile} policy, signed by {signer.public.name}; it trusts that key for data, "
        "environments and checkpoints"
    )
    console.answer("policy new", 0, file=str(file), profile=profile, signer=signer.public.identifier)
    return 0


@command.command()
@_file
@options.key_option
@options.json_option
def sign(file: Path, key: str | None, as_json: bool) -> int:
    """Sign the policy FILE as it stands. Read it first: your signature vouches for it."""
    console = Console(as_json)
    signer = options.signer(key)
    bundle = policy.sign(file, signer)
    console.text(f"{bundle}: signed by {signer.public.name}")
    console.answer("policy sign", 0, file=str(file), bundle=str(bundle), signer=signer.public.identifier)
    return 0


@command.command()
@_file
@options.pin_option
@options.json_option
def show(file: Path, pin: str | None, as_json: bool) -> int:
    """Show the policy FILE as this host understands it, after checking its signature and date."""
    console = Console(as_json)
    found = policy.load(file, trusted=roots.policy_keys().list(), pinned=pin)
    console.text(
        f"{found.id}: vouched for by {found.vouched_by}, valid until {found.document.expires}, "
        f"sha256:{found.digest}"
    )
    for name in found.trust.roles:
        console.text(f"  role {name}: {found.trust.describe(name)}")
    for kind, rule in found.document.artifacts.items():
        formats = f", formats {', '.join(rule.formats)}" if rule.formats else ""
        console.text(f"  {kind}: signed by {rule.signed_by}, coverage {rule.coverage}{formats}")
    console.text(
        f"  environment: {'sealed' if found.document.environment.require_sealed else 'sealed or editable'};"
        f" reads: {', '.join(found.document.run.reads)}"
    )
    console.answer("policy show", 0, sha256=found.digest, policy=found.document.model_dump(exclude={"keys"}))
    return 0
