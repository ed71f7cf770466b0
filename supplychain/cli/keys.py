"""`secure-train keys new|list|trust|revoke`; and for trust metadata `keys root|renew|rotate|countersign`."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import click

from supplychain import policy
from supplychain.artifact import write_durably
from supplychain.cli import options
from supplychain.cli.options import json_option
from supplychain.cli.output import Console
from supplychain.errors import SecureTrainError
from supplychain.trust import revocations, roots
from supplychain.trust.keys import ALGORITHMS, VerifyingKey, parse_public
from supplychain.trust.revocations import KINDS
from supplychain.trust.roots import Revocation
from supplychain.trust.signers import PrivateKey

F = TypeVar("F", bound=Callable[..., Any])
_policy = click.argument("file", metavar="POLICY", type=click.Path(path_type=Path))
_signers = click.option(
    "--key",
    "keys",
    multiple=True,
    metavar="NAME|FILE",
    help="Key to sign with; may be repeated [default: yours].",
)


def _days(default: int) -> Callable[[F], F]:
    return click.option(
        "--days", default=default, show_default=True, help="For how long the signed metadata is valid."
    )


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
@click.argument("name", required=False)
@json_option
def export(name: str | None, as_json: bool) -> int:
    """Print the public key of NAME, for policies and for others to trust; of a hardware module's, too."""
    console = Console(as_json)
    hardware = name is not None and name.startswith("pkcs11:")
    key = options.private_key(name).public if hardware or name is None else _public(name)
    console.text(key.pem.decode().rstrip())
    console.answer("keys export", 0, name=key.name, identifier=key.identifier, pem=key.pem.decode())
    return 0


@command.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--root", metavar="SHA256", help="FILE is a policy: trust its metadata, which begins so.")
@json_option
def trust(file: Path, root: str | None, as_json: bool) -> int:
    """Trust the public key in FILE to sign policies on this host. Check with its owner that the digest is
    his.

    With --root, FILE is a policy with trust metadata (see `keys root`): from now on this host believes it by
    the metadata that begins with that root, and nothing older than what it has seen.
    """
    console = Console(as_json)
    if root is not None:
        seen = policy.trust_metadata(file.absolute(), root, now=_now())
        console.text(f"{file}: trusted by metadata, root {seen.root}, version {seen.targets}")
        console.answer("keys trust", 0, file=str(file), root=str(seen.root), version=str(seen.targets))
        return 0
    key = parse_public(file.stem, options.read(file, "the key"), where=str(file))
    _trust(key)
    console.text(f"{key.name}: sha256:{key.identifier} may sign policies for this host")
    console.answer("keys trust", 0, name=key.name, identifier=key.identifier)
    return 0


@command.command()
@click.argument("what")
@click.option("--reason", required=True, metavar="TEXT", help="Shown to whoever meets it.")
@click.option("--kind", type=click.Choice(KINDS), help="What it is [default: what it looks like].")
@click.option("--since", metavar="TIME", help="Keep what provably was signed before this time.")
@click.option(
    "--in", "file", type=click.Path(path_type=Path), metavar="POLICY", help="For all of the policy."
)
@_signers
@_days(90)
@json_option
def revoke(
    what: str,
    reason: str,
    kind: str | None,
    since: str | None,
    file: Path | None,
    keys: tuple[str, ...],
    days: int,
    as_json: bool,
) -> int:
    """No longer believe WHAT: a key (by name, file or digest), an identity (its subject), or a digest of an
    artifact's manifest, a statement's subject or a signature.

    On this host; or with --in in the trust metadata of a policy, for everybody who uses it.
    """
    console = Console(as_json)
    entry = _revocation(what, reason, kind, since)
    if file is None:
        revocations.add_to_this_host(entry)
        console.text(f"revoked on this host: {entry.kind} {entry.what}")
    else:
        version = metadata().renew(
            file, options.read(file, "the policy"), _private(keys), expires=_in(days), revoke=[entry]
        )
        console.text(f"revoked for {file}, version {version}: {entry.kind} {entry.what}")
    console.answer("keys revoke", 0, kind=entry.kind, what=entry.what, since=since)
    return 0


@command.command()
@_policy
@_signers
@click.option("--with", "others", multiple=True, metavar="NAME|FILE.pub", help="Other keys of the roles.")
@click.option("--threshold", default=1, show_default=True, help="How many keys must sign.")
@_days(90)
@json_option
def root(
    file: Path, keys: tuple[str, ...], others: tuple[str, ...], threshold: int, days: int, as_json: bool
) -> int:
    """Begin signed trust metadata for POLICY, in POLICY.trust. Prints the digest that other hosts trust."""
    console = Console(as_json)
    private = _private(keys)
    members = [key.public for key in private] + [_public(name) for name in others]
    digest = metadata().create(
        file,
        options.read(file, "the policy"),
        private,
        members,
        threshold=threshold,
        root_expires=_in(365),
        expires=_in(days),
    )
    console.text(f"{file}.trust: {threshold} of {', '.join(key.name for key in members)}")
    console.text(f"  on each host: secure-train keys trust {file} --root sha256:{digest}")
    console.answer("keys root", 0, root=digest)
    return 0


@command.command()
@_policy
@_signers
@_days(90)
@json_option
def renew(file: Path, keys: tuple[str, ...], days: int, as_json: bool) -> int:
    """Vouch for POLICY as it stands, in the next version of its trust metadata."""
    console = Console(as_json)
    data = options.read(file, "the policy")
    version = metadata().renew(file, data, _private(keys), expires=_in(days))
    console.text(f"{file}.trust: version {version}, valid for {days} days")
    console.answer("keys renew", 0, version=str(version))
    return 0


@command.command()
@_policy
@click.option("--role", type=click.Choice(["root", "policy"]), default="policy", show_default=True)
@click.option("--add", multiple=True, metavar="NAME|FILE.pub", help="Give this key the role.")
@click.option("--remove", multiple=True, metavar="NAME|FILE.pub", help="Take the role from this key.")
@click.option("--threshold", type=int, help="How many keys must sign from now on.")
@_signers
@_days(365)
@json_option
def rotate(
    file: Path,
    role: str,
    add: tuple[str, ...],
    remove: tuple[str, ...],
    threshold: int | None,
    keys: tuple[str, ...],
    days: int,
    as_json: bool,
) -> int:
    """Exchange keys of POLICY's trust metadata: the next root, signed by enough of the old and of the new.

    Too few signatures make a draft, which others countersign. Afterwards `keys renew` with the new keys.
    """
    path, done = metadata().rotate(
        file,
        role,
        _private(keys),
        add=[_public(name) for name in add],
        remove=[_public(name) for name in remove],
        threshold=threshold,
        expires=_in(days),
    )
    return _rooted(Console(as_json), "keys rotate", path, done)


@command.command()
@_policy
@_signers
@json_option
def countersign(file: Path, keys: tuple[str, ...], as_json: bool) -> int:
    """Add your signature to the drafted root of POLICY's trust metadata."""
    path, done = metadata().countersign(file, _private(keys))
    return _rooted(Console(as_json), "keys countersign", path, done)


def _rooted(console: Console, verb: str, path: Path, done: bool) -> int:
    console.text(f"{path}: {'complete' if done else 'a draft; more signatures are needed: keys countersign'}")
    console.answer(verb, 0, path=str(path), complete=done)
    return 0


def metadata() -> ModuleType:
    """Imported when a command needs it: most people have one key and no metadata."""
    from supplychain.trust import metadata as module

    return module


def _private(names: tuple[str, ...]) -> list[PrivateKey]:
    return [options.private_key(name) for name in names] or [options.private_key(None)]


def _public(name: str) -> VerifyingKey:
    return roots.key_store().public(name)


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


def _in(days: int) -> dt.datetime:
    return (_now() + dt.timedelta(days=days)).replace(microsecond=0)


def _revocation(what: str, reason: str, kind: str | None, since: str | None) -> Revocation:
    """A key by its name becomes its digest; a digest may be written with `sha256:` before it."""
    digest = what.removeprefix("sha256:")
    is_digest = re.fullmatch(r"[0-9a-f]{64}", digest) is not None
    kind = kind or ("digest" if is_digest else "identity" if "@" in what or "://" in what else "key")
    if kind == "digest" and not is_digest:
        raise SecureTrainError("ST-U03", f"{what!r} is no sha256 digest", expected="64 hexadecimal digits")
    if kind == "key":
        digest = digest if is_digest else _public(what).identifier
    try:
        moment = None if since is None else revocations.moment(since)
    except ValueError:
        raise SecureTrainError(
            "ST-U03", f"{since!r} is no time with a time zone", expected="2026-12-01T00:00:00Z"
        ) from None
    return Revocation(kind, what if kind == "identity" else digest, reason, moment)  # type: ignore[arg-type]  # it is one of KINDS


def _trust(key: VerifyingKey) -> None:
    folder = roots.policy_keys().folder
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = folder / f"{key.name}.pub"
        if file.exists() and file.read_bytes() != key.pem:
            raise SecureTrainError(
                "ST-U05",
                f"another key called {key.name!r} is trusted already",
                where=str(file),
                next_step=(
                    "give the new file another name; remove the old one if it should no longer be trusted"
                ),
            )
        write_durably(file, key.pem)
    except OSError as error:
        raise SecureTrainError(
            "ST-U04", f"the folder for trusted keys cannot be written: {error.strerror}", where=str(folder)
        ) from None
