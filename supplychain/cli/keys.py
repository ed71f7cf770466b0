"""`secure-train keys new|list|trust`."""

from __future__ import annotations

from pathlib import Path

import click

from supplychain.artifact import write_durably
from supplychain.cli.options import json_option
from supplychain.cli.output import Console
from supplychain.errors import SecureTrainError
from supplychain.trust import roots
from supplychain.trust.keys import ALGORITHMS, VerifyingKey, parse_public


@click.group()
def command() -> None:
    """Make, list and trust keys. They lie in your configuration folder, or in SECURE_TRAIN_CONFIG."""


@command.command()
@click.argument("name")
@click.option(
    "--type", "algorithm", default="ecdsa-p256", show_default=True, help=f"One of {', '.join(ALGORITHMS)}."
)
@click.option("--trust", is_flag=True, help="Also trust it on this host to sign policies.")
@json_option
def new(name: str, algorithm: str, trust: bool, as_json: bool) -> int:
    """Make a key pair NAME."""
    console = Console(as_json)
    store = roots.key_store()
    key = store.new(name, algorithm).public
    console.text(
        f"{name}: {algorithm}, sha256:{key.identifier}\n  private {store.folder / name}.key (only you may "
        f"read it; back it up)\n  public  {store.folder / name}.pub"
    )
    if trust:
        _trust(key)
        console.text("  trusted on this host to sign policies")
    console.answer("keys new", 0, name=name, algorithm=algorithm, identifier=key.identifier, trusted=trust)
    return 0


@command.command("list")
@json_option
def list_(as_json: bool) -> int:
    """List your keys and those that this host trusts for policies."""
    console = Console(as_json)
    store, trusted = roots.key_store(), roots.policy_keys()
    own = {key.identifier: key for key in store.list()}
    believed = {key.identifier: key for key in trusted.list()}
    rows = [
        {
            "name": key.name,
            "algorithm": key.algorithm,
            "identifier": identifier,
            "signs": identifier in own and store.has_private(key.name),
            "policies": identifier in believed,
        }
        for identifier, key in (believed | own).items()
    ]
    for row in rows:
        uses = [
            text
            for flag, text in ((row["signs"], "can sign"), (row["policies"], "trusted for policies"))
            if flag
        ]
        note = ", ".join(uses) or "public key only"
        console.text(f"{row['name']}  {row['algorithm']}  sha256:{row['identifier']}  {note}")
    if not rows:
        console.text(f"no keys in {store.folder}; make one: secure-train keys new NAME")
    console.answer("keys list", 0, keys=rows)
    return 0


@command.command()
@click.argument("file", type=click.Path(path_type=Path))
@json_option
def trust(file: Path, as_json: bool) -> int:
    """Trust the public key in FILE to sign policies on this host. Check with its owner that the digest is
    his.
    """
    console = Console(as_json)
    try:
        pem = file.read_bytes()
    except OSError as error:
        raise SecureTrainError(
            "ST-U01", f"the key cannot be read: {error.strerror}", where=str(file)
        ) from None
    key = parse_public(file.stem, pem, where=str(file))
    _trust(key)
    console.text(f"{key.name}: sha256:{key.identifier} may sign policies for this host")
    console.answer("keys trust", 0, name=key.name, identifier=key.identifier)
    return 0


def _trust(key: VerifyingKey) -> None:
    folder = roots.policy_keys().folder
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_durably(folder / f"{key.name}.pub", key.pem)
    except OSError as error:
        raise SecureTrainError(
            "ST-U04", f"the folder for trusted keys cannot be written: {error.strerror}", where=str(folder)
        ) from None
