"""`secure-train doctor`."""

from __future__ import annotations

import locale
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Literal

import click

from supplychain.artifact import Manifest, read_manifest
from supplychain.cli.options import env_option, json_option
from supplychain.cli.output import Console
from supplychain.confine import landlock_abi
from supplychain.environment.verify import find_environment, verify_environment
from supplychain.errors import SecureTrainError
from supplychain.gate import size
from supplychain.trust import roots

State = Literal["ok", "note", "bad"]
Line = tuple[State, str, str]
ENOUGH_DISK = 5_000_000_000  # bytes that a build of the training environment may need


@click.command()
@env_option
@json_option
def command(environment: Path | None, as_json: bool) -> int:
    """Show what this machine has, what the gate and the training environment are made of, and what is
    missing.
    """
    console = Console(as_json)
    lines = [*_machine(), *_gate(), *_training(environment), *_keys()]
    for state, name, text in lines:
        console.text(f"{state:5} {name}: {text}")
    bad = [name for state, name, _ in lines if state == "bad"]
    code = 5 if bad else 0
    console.text("everything is in place" if not bad else f"not in place: {', '.join(bad)}")
    console.answer(
        "doctor", code, lines=[{"state": state, "name": name, "text": text} for state, name, text in lines]
    )
    return code


def _machine() -> Iterator[Line]:
    yield (
        "ok" if sys.version_info >= (3, 11) else "bad",
        "python",
        f"{platform.python_version()} ({sys.executable})",
    )
    yield (
        "ok",
        "system",
        f"{platform.system()} {platform.release()} {platform.machine()}, {os.cpu_count()} cores",
    )
    gpus = sorted(path.name for path in Path("/dev").glob("nvidia[0-9]*"))
    yield "ok" if gpus else "note", "gpu", ", ".join(gpus) or "none: training runs on the CPU with gloo"
    compiler = next((found for name in ("g++", "clang++") if (found := shutil.which(name))), None)
    yield (
        "ok" if compiler else "note",
        "compiler",
        compiler or "no C++ compiler: torch.compile is off on a CPU, training is slower",
    )
    free = shutil.disk_usage(Path.cwd()).free
    yield "ok" if free > ENOUGH_DISK else "note", "disk", f"{size(free)} free here"
    abi = landlock_abi()
    yield "ok" if abi > 0 else "note", "landlock", f"ABI {abi}" if abi > 0 else "not in this kernel"
    yield "ok", "encoding", f"{sys.stdout.encoding or 'none'}, locale {locale.setlocale(locale.LC_CTYPE)}"


def _gate() -> Iterator[Line]:
    distribution = metadata.distribution("secure-train")
    yield "ok", "secure-train", f"{distribution.version} in {Path(str(distribution.locate_file('')))}"
    yield (
        ("note" if _torch_is_here() else "ok"),
        "gate",
        "torch lies in the gate's environment; keep them apart"
        if _torch_is_here()
        else "an environment of its own, without torch",
    )
    owners = {
        name: sorted(set(packages))
        for name, packages in metadata.packages_distributions().items()
        if name in ("trainer", "supplychain", "sbom", "policies")
    }
    foreign = {name: packages for name, packages in owners.items() if packages != ["secure-train"]}
    yield (
        ("bad", "packages", f"another distribution owns files of ours: {foreign}")
        if foreign
        else ("ok", "packages", "no other distribution owns files of ours")
    )


def _torch_is_here() -> bool:
    try:
        metadata.distribution("torch")
    except metadata.PackageNotFoundError:
        return False
    return True


def _training(explicit: Path | None) -> Iterator[Line]:
    try:
        prefix = find_environment(explicit)
        facts = verify_environment(prefix, Manifest.parse(read_manifest(prefix)).digest)
    except SecureTrainError as error:
        yield "bad", "training environment", f"{error.what}; {error.next_step or ''}"
        return
    if facts.findings:
        yield (
            "bad",
            "training environment",
            f"{facts.prefix}: {len(facts.findings)} findings, first: {facts.findings[0].what} "
            f"({facts.findings[0].where})",
        )
    else:
        sealed = "sealed" if facts.sealed else "editable"
        yield (
            "ok",
            "training environment",
            f"{facts.prefix}: {facts.distributions} packages as locked, profile {facts.profile}, {sealed}",
        )


def _keys() -> Iterator[Line]:
    own, trusted = roots.key_store(), roots.policy_keys()
    names = [key.name for key in own.list()]
    yield (
        "ok" if names else "note",
        "keys",
        ", ".join(names) or f"none in {own.folder}: secure-train keys new NAME",
    )
    believed = [key.name for key in trusted.list()]
    yield (
        "ok" if believed else "note",
        "trusted for policies",
        ", ".join(believed) or "nobody: secure-train keys trust FILE.pub",
    )
