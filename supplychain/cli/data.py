"""`secure-train data prepare`."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

import click

from supplychain import gate, isolation
from supplychain import policy as policies
from supplychain.artifact import parse_json
from supplychain.cli import options
from supplychain.cli.output import Console
from supplychain.environment.verify import EnvironmentFacts, find_environment
from supplychain.errors import SecureTrainError
from supplychain.isolation import Scratch
from supplychain.trust import roots
from supplychain.trust.signers import sign_artifact


@click.group()
def command() -> None:
    """Prepare datasets for training."""


@command.command()
@click.argument("sources", nargs=-1, type=click.Path(path_type=Path))
@click.option("--corpus", metavar="NAME", help="An embedded corpus instead of sources: shakespeare.")
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, metavar="DIR", help="Folder for the dataset."
)
@click.option("--tokenizer", type=click.Path(path_type=Path), metavar="FILE", help="tokenizer.json to use.")
@click.option(
    "--train-tokenizer",
    type=click.IntRange(257, 1 << 20),
    metavar="N",
    help="Train a byte-level BPE tokenizer of N tokens instead.",
)
@click.option(
    "--tokenizer-out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder for the tokenizer that is trained.",
)
@click.option(
    "--validation-fraction", type=float, metavar="F", help="Part of the documents kept apart for validation."
)
@click.option(
    "--workers",
    type=click.IntRange(1, 256),
    metavar="N",
    help="Processes that tokenize [default: one per core].",
)
@options.env_option
@options.policy_option
@options.pin_option
@options.key_option
@options.json_option
def prepare(
    sources: tuple[Path, ...],
    corpus: str | None,
    out: Path,
    tokenizer: Path | None,
    train_tokenizer: int | None,
    tokenizer_out: Path | None,
    validation_fraction: float | None,
    workers: int | None,
    environment: Path | None,
    policy: Path | None,
    pin: str | None,
    key: str | None,
    as_json: bool,
) -> int:
    """Tokenize SOURCES (text, JSONL, also gzipped) into token shards, and sign the dataset and the tokenizer.

    The work is done in the training environment, verified before it is used; the key stays here. The same
    sources give the same bytes.
    """
    console = Console(as_json)
    if bool(sources) == bool(corpus):
        raise click.UsageError("Name source files, or --corpus.")
    if bool(tokenizer) == bool(train_tokenizer) or bool(train_tokenizer) != bool(tokenizer_out):
        raise click.UsageError("Name a --tokenizer, or --train-tokenizer N with --tokenizer-out DIR.")
    signer = options.signer(key)
    out, tokenizer_out = out.absolute(), tokenizer_out and tokenizer_out.absolute()
    made = {"dataset": out} | ({"tokenizer": tokenizer_out} if tokenizer_out else {})
    staged = {kind: _staging(folder) for kind, folder in made.items()}
    trusted = policies.load(options.policy_path(policy), trusted=roots.policy_keys().list(), pinned=pin)
    with console.progress("verifying the environment") as progress:
        facts = gate.require_environment(find_environment(environment), trusted, progress=progress)
    read = [path.absolute() for path in (*sources, tokenizer) if path]
    arguments = [item for source in sources for item in ("--source", str(source.absolute()))]
    for name, value in (
        ("--corpus", corpus),
        ("--out", staged["dataset"]),
        ("--tokenizer", tokenizer and tokenizer.absolute()),
        ("--train-tokenizer", train_tokenizer),
        ("--tokenizer-out", staged.get("tokenizer")),
        ("--validation-fraction", validation_fraction),
        ("--workers", workers),
    ):
        arguments += [name, str(value)] if value is not None else []
    counts = _run(
        facts, trusted.document.run.isolation, arguments, read, [path.parent for path in staged.values()]
    )
    manifests = {kind: sign_artifact(folder, kind, signer).digest for kind, folder in staged.items()}
    for kind, folder in made.items():  # only signed artifacts get their final names
        staged[kind].rename(folder)
        staged[kind].parent.rmdir()
    for kind, folder in made.items():
        console.text(f"{folder}: {kind}, sha256:{manifests[kind]}, signed by {signer.public.name}")
    console.text(
        "  " + ", ".join(f"{counts.get(name, '?')} {name}" for name in ("documents", "tokens", "shards"))
    )
    console.answer("data prepare", 0, manifests=manifests, counts=counts, signer=signer.public.identifier)
    return 0


def _staging(final: Path) -> Path:
    """Where the preparation may write: a folder beside the final name, kept if it is interrupted, so that it
    can go on. ST-U05.
    """
    if final.exists():
        raise SecureTrainError(
            "ST-U05", "the folder is there already", where=str(final), next_step="name another one"
        )
    folder = final.with_name(f".{final.name}.preparing")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SecureTrainError(
            "ST-U04", f"the folder cannot be written: {error.strerror}", where=str(folder)
        ) from None
    return folder / final.name


def _run(
    facts: EnvironmentFacts, level: str, arguments: list[str], read: list[Path], write: list[Path]
) -> dict[str, object]:
    """Run the preparation in the environment, confined; progress goes to stderr, its error is passed on
    whole.
    """
    with tempfile.TemporaryDirectory(prefix="secure-train-") as folder:
        scratch = Scratch.create(Path(folder) / "scratch")
        failure = scratch.folder / "failure.json"
        editable = facts.code.get("editable")
        fence = isolation.fence(facts.prefix, scratch, level=level, editable=editable, read=read, write=write)
        program = isolation.command(
            facts.prefix, scratch, "trainer.data.prepare", [*arguments, "--failure", str(failure)]
        )
        done = subprocess.run(
            [*fence, *program],
            env=isolation.environment(scratch),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            check=False,
        )
        if failure.is_file():
            raise SecureTrainError.reported(parse_json(failure.read_bytes(), what="the failure report"))
        if done.returncode != 0:
            raise SecureTrainError(
                "ST-R07", "the preparation ended without saying why", found=f"exit status {done.returncode}"
            )
    counts: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return counts
