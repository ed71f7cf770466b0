"""`secure-train env build|verify|sign`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from supplychain.artifact import Manifest, read_manifest
from supplychain.cli import options
from supplychain.cli.output import Console
from supplychain.environment.verify import EnvironmentFacts, find_environment, verify_environment
from supplychain.gate import read_file, size
from supplychain.trust.signers import add_signature

_lock = click.option(
    "--lock", type=click.Path(path_type=Path), metavar="FILE", help="Lock that it must have been built from."
)


@click.group()
def command() -> None:
    """Build training environments from locks, and verify them from outside, without running them."""


@command.command()
@click.option(
    "--lock", type=click.Path(path_type=Path), metavar="FILE", required=True, help="Hash-pinned lock."
)
@click.option(
    "--store",
    type=click.Path(path_type=Path),
    metavar="DIR",
    required=True,
    help="Folder for environments; each has a name that its content gives.",
)
@click.option(
    "--cache",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder that keeps hash-checked wheels [default: in the store].",
)
@click.option(
    "--wheelhouse",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Take wheels from this folder only; no index is asked.",
)
@click.option(
    "--python",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Interpreter to build on [default: the one that runs this].",
)
@click.option(
    "--project-wheel",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Wheel of secure-train itself: the run's code identity.",
)
@click.option(
    "--editable",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Checkout whose code is used in place (development).",
)
@click.option("--profile", default="", metavar="NAME", help="Name of the torch profile, for the record.")
@options.json_option
def build(
    lock: Path,
    store: Path,
    cache: Path | None,
    wheelhouse: Path | None,
    python: Path | None,
    project_wheel: Path | None,
    editable: Path | None,
    profile: str,
    as_json: bool,
) -> int:
    """Build an environment: every wheel checked against the lock, every file bound to its wheel. Then: `env
    sign`.
    """
    from supplychain.environment.build import build_environment  # brings in packaging and installer

    console = Console(as_json)
    path = build_environment(
        lock,
        store,
        python=python,
        wheelhouse=wheelhouse,
        project_wheel=project_wheel,
        editable=editable,
        profile=profile,
        cache=cache,
        progress=console.say,
    )
    console.text(str(path))
    console.answer("env build", 0, environment=str(path))
    return 0


@command.command()
@options.env_option
@_lock
@options.json_option
def verify(environment: Path | None, lock: Path | None, as_json: bool) -> int:
    """Compare every byte of the environment with its manifest and with the lock. `secure-train verify DIR`
    also checks who signed it.
    """
    console = Console(as_json)
    facts = _facts(console, environment, lock)
    return _report(console, "env verify", facts)


@command.command()
@options.env_option
@_lock
@click.option(
    "--wheels",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder with the wheels it was built from; may be repeated [default: where they were kept].",
)
@options.key_option
@options.json_option
def sign(
    environment: Path | None, lock: Path | None, wheels: tuple[Path, ...], key: str | None, as_json: bool
) -> int:
    """Verify the environment, against its wheels as well, then sign its manifest as a builder.

    Before it is signed, its own description vouches for nothing; the wheels, whose hashes the lock states,
    do.
    """
    from supplychain.environment.origin import default_folders, differences_from_wheels  # brings in installer

    console = Console(as_json)
    signer = options.signer(key)
    facts = _facts(console, environment, lock)
    if not facts.findings:
        folders = wheels or default_folders(facts.prefix)
        facts = replace(facts, findings=tuple(differences_from_wheels(facts.prefix, facts.manifest, folders)))
    if not facts.findings:
        add_signature(facts.prefix, Manifest.parse(read_manifest(facts.prefix)), signer)
    code = _report(console, "env sign", facts)
    if code == 0:
        console.text(f"  signed by {signer.public.name} (sha256:{signer.public.identifier})")
    return code


def _facts(console: Console, environment: Path | None, lock: Path | None) -> EnvironmentFacts:
    prefix = find_environment(environment)
    manifest = Manifest.parse(read_manifest(prefix), where=str(prefix))
    with console.progress(f"verifying {prefix.name}") as progress:
        return verify_environment(
            prefix, manifest.digest, read_file(lock) if lock else None, progress=progress
        )


def _report(console: Console, verb: str, facts: EnvironmentFacts) -> int:
    for finding in facts.findings:
        console.error(finding)
    code = min(
        (finding.exit_code for finding in facts.findings), key=lambda value: (value != 3, value), default=0
    )
    if code == 0:
        console.text(
            f"{facts.prefix}: {facts.distributions} packages, {facts.files} files, {size(facts.bytes)}, all"
            f" as locked and built ({facts.seconds:.1f} s)"
        )
        console.text(
            f"  Python {facts.python}, profile {facts.profile or 'none'}, "
            f"{'sealed' if facts.sealed else 'EDITABLE: code is used in place'}, manifest "
            f"sha256:{facts.manifest}"
        )
    console.answer(
        verb,
        code,
        environment=str(facts.prefix),
        manifest=facts.manifest,
        lock=facts.lock,
        sealed=facts.sealed,
        findings=[finding.as_dict() for finding in facts.findings],
    )
    return code
