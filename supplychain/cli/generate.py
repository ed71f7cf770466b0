"""`secure-train generate`."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import click

from supplychain import gate, isolation, policy
from supplychain.cli import options
from supplychain.cli.output import Console
from supplychain.environment.verify import find_environment
from supplychain.isolation import Scratch
from supplychain.lineage import Checker
from supplychain.trust import roots


@click.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--prompt", default="", metavar="TEXT", help="How the text begins.")
@click.option("--tokens", type=click.IntRange(1, 100_000), default=200, show_default=True)
@click.option("--temperature", type=float, default=0.8, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
@options.env_option
@options.policy_option
@options.pin_option
@options.json_option
def command(
    checkpoint: Path,
    prompt: str,
    tokens: int,
    temperature: float,
    seed: int,
    environment: Path | None,
    policy: Path | None,
    pin: str | None,
    as_json: bool,
) -> int:
    """Write text with CHECKPOINT. Its signature is checked first, its bytes as they are read, the environment
    before it runs.
    """
    console = Console(as_json)
    file = options.policy_path(policy)
    trusted = _load(file, pin)
    signed = Checker.by_policy(trusted).signed(checkpoint.absolute(), "checkpoint")
    with console.progress("verifying the environment") as progress:
        facts = gate.require_environment(find_environment(environment), trusted, progress=progress)
    arguments = [
        "generate",
        "--checkpoint",
        str(signed.root),
        "--manifest",
        signed.manifest.digest,
        "--prompt",
        prompt,
        "--tokens",
        str(tokens),
    ]
    arguments += ["--temperature", str(temperature), "--seed", str(seed)]
    with tempfile.TemporaryDirectory(prefix="secure-train-") as folder:
        scratch = Scratch.create(Path(folder) / "scratch")
        fence = isolation.fence(
            facts.prefix,
            scratch,
            level=trusted.document.run.isolation,
            editable=facts.code.get("editable"),
            read=[signed.root],
        )
        done = subprocess.run(
            [*fence, *isolation.command(facts.prefix, scratch, "trainer", arguments)],
            env=isolation.environment(scratch),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
    if done.returncode != 0:
        console.say(done.stderr.decode(errors="replace").rstrip())
        console.answer("generate", done.returncode, error={"what": done.stderr.decode(errors="replace")})
        return done.returncode
    text = done.stdout.decode(errors="replace")
    console.text(text.rstrip("\n"))
    console.answer("generate", 0, text=text, manifest=signed.manifest.digest)
    return 0


def _load(file: Path, pin: str | None) -> policy.Policy:
    return policy.load(file, trusted=roots.policy_keys().list(), pinned=pin)
