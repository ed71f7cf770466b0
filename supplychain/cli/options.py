"""Options that several verbs share, and what they mean."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from supplychain.errors import SecureTrainError
from supplychain.trust import roots
from supplychain.trust.keys import SigningKey
from supplychain.trust.signers import LocalSigner

F = TypeVar("F", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
key_option = click.option(
    "--key",
    metavar="NAME|FILE",
    envvar="SECURE_TRAIN_KEY",
    help="Key to sign with [default: your only key; see `keys list`].",
)
env_option = click.option(
    "--env",
    "environment",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Training environment [default: SECURE_TRAIN_ENV, or the one that bootstrap.py built].",
)
policy_option = click.option(
    "--policy",
    type=click.Path(path_type=Path),
    metavar="FILE",
    envvar="SECURE_TRAIN_POLICY",
    help="Policy that decides [default: SECURE_TRAIN_POLICY].",
)
pin_option = click.option(
    "--policy-sha256", "pin", metavar="HEX", help="Trust exactly this policy file, whoever signed it."
)


def signer(name: str | None) -> LocalSigner:
    """The signer that --key names, or the user's only key."""
    store = roots.key_store()
    if name is None:
        own = [key.name for key in store.list() if store.has_private(key.name)]
        if len(own) != 1:
            raise SecureTrainError(
                "ST-S06",
                "there is no key to sign with" if not own else "there are several keys to sign with",
                where=str(store.folder),
                expected="one key, or --key NAME",
                found=", ".join(own) or "none",
                next_step="secure-train keys new NAME" if not own else "name one with --key",
            )
        name = own[0]
    key: SigningKey = store.load(name, _passphrase)
    return LocalSigner(key)


def policy_path(path: Path | None) -> Path:
    if path is None:
        raise SecureTrainError(
            "ST-U03",
            "no policy was named",
            expected="--policy FILE, or SECURE_TRAIN_POLICY",
            next_step="secure-train policy new policy.toml --key NAME",
        )
    return path.absolute()


def _passphrase() -> bytes:
    """From the file that SECURE_TRAIN_PASSPHRASE_FILE names, or asked for."""
    file = os.environ.get("SECURE_TRAIN_PASSPHRASE_FILE")
    if file:
        try:
            return Path(file).read_bytes().rstrip(b"\n")
        except OSError as error:
            raise SecureTrainError(
                "ST-S06", f"the passphrase file cannot be read: {error.strerror}", where=file
            ) from None
    return str(click.prompt("Passphrase of the key", hide_input=True, err=True)).encode()
