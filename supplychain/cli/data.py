"""`secure-train data`: prepare, adopt, inspect."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from supplychain import gate, isolation, policy
from supplychain.artifact import Manifest, parse_json, read_manifest
from supplychain.cli import inspect as claims
from supplychain.cli import options
from supplychain.cli.output import Console
from supplychain.environment.verify import find_environment
from supplychain.errors import SecureTrainError
from supplychain.isolation import Scratch
from supplychain.trust import roots
from supplychain.trust.signers import sign_artifact


@click.group()
def command() -> None:
    """Prepare datasets for training, adopt those that exist, look into them."""


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
@click.option("--seed", type=int, metavar="N", help="Decides the validation documents and the shuffle.")
@click.option(
    "--document",
    type=click.Choice(["file", "paragraph", "line"]),
    help="What of a text file is a document [default: file].",
)
@click.option("--text-key", metavar="KEY", help="Where the text stands in a record [default: text].")
@click.option("--shuffle", is_flag=True, help="Write the documents in an order that the seed decides.")
@click.option(
    "--pack", type=click.IntRange(1), metavar="N", help="Pack documents into rows of N tokens, best fit."
)
@click.option("--rows", is_flag=True, help="With --pack: lay the shards out in these rows, fastest to read.")
@click.option(
    "--drop-shorter", type=click.IntRange(1), metavar="N", help="Drop documents below N characters."
)
@click.option("--drop-longer", type=click.IntRange(1), metavar="N", help="Drop documents above N characters.")
@click.option("--drop-duplicates", is_flag=True, help="Drop exact repetitions of a document.")
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
    **more: str | int | bool | None,
) -> int:
    """Tokenize SOURCES (text, JSONL, Parquet, Arrow; also .gz, .zst) into token shards, and sign the dataset
    and the tokenizer.

    The work is done in the training environment, verified before it is used; the key stays here. The same
    sources give the same bytes, also when the command was killed and is given again.
    """
    console = Console(as_json)
    if bool(sources) == bool(corpus):
        raise click.UsageError("Name source files, or --corpus.")
    if bool(tokenizer) == bool(train_tokenizer) or bool(train_tokenizer) != bool(tokenizer_out):
        raise click.UsageError("Name a --tokenizer, or --train-tokenizer N with --tokenizer-out DIR.")
    signer = options.signer(key)
    prefix = _verified(console, environment, options.policy_path(policy), pin)
    arguments = [item for source in sources for item in ("--source", str(source.absolute()))]
    for name, value in (
        ("--corpus", corpus),
        ("--out", out.absolute()),
        ("--tokenizer", tokenizer and tokenizer.absolute()),
        ("--train-tokenizer", train_tokenizer),
        ("--tokenizer-out", tokenizer_out and tokenizer_out.absolute()),
        ("--validation-fraction", validation_fraction),
        ("--workers", workers),
    ):
        arguments += [name, str(value)] if value is not None else []
    for option, setting in more.items():  # as the program in the environment calls them too
        flag = f"--{option.replace('_', '-')}"
        arguments += [flag] if setting is True else [flag, str(setting)] if setting else []
    counts = _run(prefix, "trainer.data.prepare", arguments)
    made = {"dataset": out} | ({"tokenizer": tokenizer_out} if tokenizer_out else {})
    manifests = {kind: sign_artifact(folder, kind, signer).digest for kind, folder in made.items()}
    for kind, folder in made.items():
        console.text(f"{folder}: {kind}, sha256:{manifests[kind]}, signed by {signer.public.name}")
    console.text(
        "  " + ", ".join(f"{counts.get(name, '?')} {name}" for name in ("documents", "tokens", "shards"))
    )
    console.answer("data prepare", 0, manifests=manifests, counts=counts, signer=signer.public.identifier)
    return 0


@command.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR", help="Convert into this folder instead."
)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="tokenizer.json that made the tokens.",
)
@click.option("--vocab-size", type=click.IntRange(1), metavar="N", help="Vocabulary, without a tokenizer.")
@click.option(
    "--dtype", type=click.Choice(["uint16", "uint32"]), help="Token type of files without a header."
)
@click.option("--end-id", type=click.IntRange(0), metavar="N", help="The token that ends a document.")
@options.env_option
@options.policy_option
@options.pin_option
@options.key_option
@options.json_option
def adopt(
    folder: Path,
    out: Path | None,
    tokenizer: Path | None,
    vocab_size: int | None,
    dtype: str | None,
    end_id: int | None,
    environment: Path | None,
    policy: Path | None,
    pin: str | None,
    key: str | None,
    as_json: bool,
) -> int:
    """Sign the dataset in FOLDER that another trainer prepared: Megatron (.bin and .idx), nanoGPT and llm.c
    (.bin), OLMo-core (.npy), fms-fsdp (.arrow).

    In place: its files stay as they are, an index and a description are put beside them. With --out it is
    converted, which Arrow and other token types need.
    """
    console = Console(as_json)
    signer = options.signer(key)
    prefix = _verified(console, environment, options.policy_path(policy), pin)
    arguments = [str(folder.absolute())]
    for name, value in (
        ("--out", out and out.absolute()),
        ("--tokenizer", tokenizer and tokenizer.absolute()),
        ("--vocab-size", vocab_size),
        ("--dtype", dtype),
        ("--end-id", end_id),
    ):
        arguments += [name, str(value)] if value is not None else []
    counts = _run(prefix, "trainer.data.adopt", arguments)
    manifest = sign_artifact(out or folder, "dataset", signer)
    console.text(f"{out or folder}: dataset, sha256:{manifest.digest}, signed by {signer.public.name}")
    console.text(
        "  " + ", ".join(f"{counts.get(name, '?')} {name}" for name in ("documents", "tokens", "shards"))
    )
    if not counts.get("tokenizer"):
        console.text("  it has no tokenizer: a run needs --tokenizer")
    console.answer("data adopt", 0, manifest=manifest.digest, counts=counts, signer=signer.public.identifier)
    return 0


@command.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--samples", type=click.IntRange(0, 100), default=3, help="Documents of each split to show.")
@click.option("--seed", type=int, default=0, metavar="N", help="Decides which.")
@options.env_option
@options.policy_option
@options.pin_option
@options.json_option
def inspect(
    folder: Path,
    samples: int,
    seed: int,
    environment: Path | None,
    policy: Path | None,
    pin: str | None,
    as_json: bool,
) -> int:
    """Show what the dataset in FOLDER holds: counts, lengths, a few documents as text, sources, signers.

    What is shown was compared with the manifest; who signed the manifest is only what it claims. `verify`
    checks that.
    """
    console = Console(as_json)
    digest = Manifest.parse(read_manifest(folder), where=str(folder)).digest
    signers = claims.signatures(folder)
    prefix = _verified(console, environment, options.policy_path(policy), pin)
    words = [str(folder.absolute()), "--manifest", digest, "--samples", str(samples), "--seed", str(seed)]
    found = _run(prefix, "trainer.data.describe", words)
    for line in _described(found):
        console.text(line)
    for signature in signers:
        console.text(f"  claims to be signed by {signature['name']} (sha256:{signature['key']})")
    console.answer("data inspect", 0, manifest=digest, signatures=signers, dataset=found)
    return 0


def _described(found: dict[str, Any]) -> Iterator[str]:
    """The answer of trainer.data.describe, for people."""
    yield f"{found['documents']} documents, {found['tokens']} tokens of {found['dtype']}"
    yield f"  vocabulary {found['vocab_size']}, tokenizer sha256:{found['tokenizer'] or 'none'}"
    if found["packings"]:
        yield f"  packed into rows of {', '.join(map(str, found['packings']))} tokens"
    for name, split in found["splits"].items():
        lengths = split["lengths"]
        yield f"{name}: {split['documents']} documents, {split['tokens']} tokens, {split['shards']} shards"
        yield f"  lengths {lengths['least']} to {lengths['most']}, median {lengths['median']}"
        most = max(bar["documents"] for bar in lengths["histogram"])
        for bar in lengths["histogram"]:
            yield f"  {bar['up_to']:>12} {'#' * -(-40 * bar['documents'] // most)} {bar['documents']}"
        for sample in split["samples"]:
            text = repr(sample["text"])[:200] if sample["text"] is not None else str(sample["ids"])
            yield f"  {sample['shard']}, document {sample['document']}, {sample['tokens']} tokens: {text}"
    for source in found["sources"][:20]:
        yield f"  source {source['name']} sha256:{source.get('sha256', 'in the manifest')}"
    if len(found["sources"]) > 20:
        yield f"  ... and {len(found['sources']) - 20} more sources"


def _verified(console: Console, environment: Path | None, file: Path, pin: str | None) -> Path:
    """The training environment, after the check that a run would make: its code is about to run."""
    trusted = policy.load(file, trusted=roots.policy_keys().list(), pinned=pin)
    with console.progress("verifying the environment") as progress:
        return gate.require_environment(find_environment(environment), trusted, progress=progress).prefix


def _run(prefix: Path, module: str, arguments: list[str]) -> dict[str, Any]:
    """Run a program of ours in the environment; progress goes to stderr, its error is passed on whole."""
    with tempfile.TemporaryDirectory(prefix="secure-train-") as folder:
        scratch = Scratch.create(Path(folder) / "scratch")
        failure = Path(folder) / "failure.json"
        command = isolation.command(prefix, scratch, module, [*arguments, "--failure", str(failure)])
        done = subprocess.run(
            command,
            env=isolation.environment(scratch),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            check=False,
        )
        if failure.is_file():
            raise SecureTrainError.reported(parse_json(failure.read_bytes(), what="the failure report"))
        if done.returncode != 0:
            raise SecureTrainError(
                "ST-R07", f"{module} ended without saying why", found=f"exit status {done.returncode}"
            )
    counts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return counts
