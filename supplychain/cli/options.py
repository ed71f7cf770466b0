"""Options that several verbs share, and what they mean."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from supplychain.errors import SecureTrainError

if TYPE_CHECKING:  # verbs that sign nothing do without cryptography, half of their start
    from supplychain.trust.signers import PrivateKey, Signer

F = TypeVar("F", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
key_option = click.option(
    "--key",
    metavar="NAME|FILE|pkcs11:URI|sigstore[:FILE]",
    envvar="SECURE_TRAIN_KEY",
    help="Key to sign with, or `sigstore` to sign as the identity of a token [default: your only key]; see "
    "docs/trust.md.",
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


def signer(name: str | None) -> Signer:
    """The signer that --key names, or the user's only key.

    `sigstore` is the public instance, `sigstore:FILE` the one of a trust configuration. A key with a
    certificate beside it (NAME.crt) signs as the certificate's holder. Signatures by keys and certificates
    are timestamped by the authority that SECURE_TRAIN_TIMESTAMP names.
    """
    from supplychain.trust import roots
    from supplychain.trust.signers import CertificateSigner, LocalSigner

    if name is not None and (name == "sigstore" or name.startswith("sigstore:")):
        return _keyless(name.partition(":")[2])
    authority = os.environ.get("SECURE_TRAIN_TIMESTAMP") or None
    key = private_key(name)
    chain = (
        None
        if name and name.startswith("pkcs11:")
        else roots.key_store().certificate(name or key.public.name)
    )
    if chain is not None:
        return CertificateSigner(key, chain, authority, where=f"the certificate of {key.public.name}")
    return LocalSigner(key, authority)


def private_key(name: str | None) -> PrivateKey:
    """The key that --key names, in a file or a hardware module, or the user's only one."""
    from supplychain.trust import roots

    if name is not None and name.startswith("pkcs11:"):
        from supplychain.trust import hsm  # late: few have one

        return hsm.HardwareKey(name, _passphrase)
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
    return store.load(name, _passphrase)


def _keyless(config: str) -> Signer:
    from supplychain.trust import keyless  # late: signing by a key must not load sigstore

    file = os.environ.get("SECURE_TRAIN_IDENTITY_TOKEN")

    def token() -> str:
        return read(Path(file), "the identity token").decode("ascii", "replace") if file else _ambient()

    return keyless.KeylessSigner(token, read(Path(config), "the trust configuration") if config else None)


def _ambient() -> str:
    """The token that a CI service gives its jobs."""
    from sigstore.errors import Error
    from sigstore.oidc import detect_credential

    try:
        token = detect_credential()
    except (Error, OSError) as error:
        raise SecureTrainError("ST-S06", f"no identity token could be had: {type(error).__name__}") from None
    if token is None:
        raise SecureTrainError(
            "ST-S06",
            "there is no identity token to sign with",
            expected="a file that SECURE_TRAIN_IDENTITY_TOKEN names, or a CI service that gives tokens",
            next_step="get a token for the audience `sigstore` from your issuer",
        )
    return token


def read(path: Path, what: str) -> bytes:
    """A small file that an option or a variable names; ST-S06 if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(1 << 20)
    except OSError as error:
        raise SecureTrainError(
            "ST-S06", f"{what} cannot be read: {error.strerror}", where=str(path)
        ) from None


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
        return read(Path(file), "the passphrase file").rstrip(b"\n")
    return str(click.prompt("Passphrase of the key", hide_input=True, err=True)).encode()
