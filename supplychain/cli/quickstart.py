"""`secure-train quickstart`: the real verbs in a row, each printed so that it can be typed by hand."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from pathlib import Path

import click

from supplychain import chain
from supplychain.cli import options
from supplychain.cli.output import Console
from supplychain.environment.verify import find_environment
from supplychain.errors import SecureTrainError
from supplychain.trust import roots

KEY = "development"
VOCABULARY = 2048
_GROUPS = ("keys", "policy", "env", "data")  # verbs of two words


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), required=False)
@click.option(
    "--lock",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Lock that the environment must have been built from.",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="A.B=C",
    help="A setting of the trainer, such as train.steps=50.",
)
@options.env_option
@options.json_option
def command(
    folder: Path | None, lock: Path | None, settings: tuple[str, ...], environment: Path | None, as_json: bool
) -> int:
    """Train a tiny signed Llama on the embedded corpus, end to end, without a network.

    Makes a development key and policy, verifies and signs the training environment, prepares and signs data,
    trains under the gate, verifies the result from its files alone, and lets it write. Everything goes into
    FOLDER [default: quickstart, or the next free name].
    """
    console = Console(as_json)
    prefix = find_environment(environment)
    work = _new_folder(folder)
    tour = _Tour(console)
    policy, run = work / "policy.toml", work / "run"
    where = ["--env", str(environment)] if environment else []
    locked = ["--lock", str(lock)] if lock else []

    tour.chapter("A key, and a policy that trusts it")
    if roots.key_store().has_private(KEY):
        console.say(f"the key {KEY!r} is there already")
        if roots.key_store().public(KEY).pem not in [key.pem for key in roots.policy_keys().list()]:
            tour.verb("keys", "trust", str(roots.key_store().folder / f"{KEY}.pub"))
    else:
        tour.verb("keys", "new", KEY, "--trust")
    tour.verb("policy", "new", str(policy), "--key", KEY)

    tour.chapter("The training environment, verified from outside before anything in it runs")
    tour.verb("env", "sign", *where, *locked, "--key", KEY)

    tour.chapter("A tokenizer and token shards, prepared in that environment, signed outside of it")
    tokenizer = ["--train-tokenizer", str(VOCABULARY), "--tokenizer-out", str(work / "tokenizer")]
    tour.verb(
        "data",
        "prepare",
        "--corpus",
        "shakespeare",
        "--out",
        str(work / "data"),
        *tokenizer,
        "--validation-fraction",
        "0.05",
        "--policy",
        str(policy),
        "--key",
        KEY,
        *where,
    )

    tour.chapter("The gate decides; then training; checkpoints are signed while it goes on")
    inputs = ["--data", str(work / "data"), "--tokenizer", str(work / "tokenizer"), "--out", str(run)]
    chosen = [item for setting in settings for item in ("--set", setting)]
    tour.verb(
        "run",
        *inputs,
        "--preset",
        "quickstart",
        *chosen,
        "--policy",
        str(policy),
        "--key",
        KEY,
        *where,
        *locked,
    )

    tour.chapter("The result, verified from the files alone")
    tour.verb("verify", str(run), "--policy", str(policy))

    tour.chapter("What it learned")
    last = chain.checkpoint_folders(run)[-1][1]
    tour.verb("generate", str(last), "--prompt", "KING", "--tokens", "120", "--policy", str(policy), *where)

    _break_it(console, tour.program, work, run, last, policy, prefix)
    console.answer(
        "quickstart", 0, folder=str(work), run=str(run), checkpoint=str(last), seconds=tour.seconds
    )
    return 0


class _Tour:
    """Prints each command as it could be typed, then runs it in this process. The first that fails ends the
    tour.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._chapter = 0
        self.program = _program()
        self.seconds: dict[str, int] = {}

    def chapter(self, title: str) -> None:
        self._chapter += 1
        self._console.say(f"\n[{self._chapter}/6] {title}")

    def verb(self, *arguments: str) -> None:
        from supplychain.cli import invoke

        self._console.say(f"$ {self.program} {shlex.join(arguments)}")
        begun = time.monotonic()
        sys.stdout.flush()
        with _StdoutToStderr(self._console.as_json):
            code = invoke(list(arguments))
        name = " ".join(arguments[:2] if arguments[0] in _GROUPS else arguments[:1])
        self.seconds[name] = round(time.monotonic() - begun)
        if code != 0:
            self._console.answer("quickstart", code, failed=list(arguments))
            raise click.exceptions.Exit(code)


class _StdoutToStderr:
    """With --json, stdout holds one document only: the verbs' own answers go to stderr."""

    def __init__(self, active: bool) -> None:
        self._active = active

    def __enter__(self) -> None:
        if self._active:
            self._saved, sys.stdout = sys.stdout, sys.stderr

    def __exit__(self, *error: object) -> None:
        if self._active:
            sys.stdout = self._saved


def _program() -> str:
    """How the reader can start this program: by name if it is on the PATH, else by its path."""
    name = Path(sys.argv[0])
    found = shutil.which(name.name)
    if found and os.path.samefile(found, name):
        return name.name
    return os.path.relpath(name) if not os.path.relpath(name).startswith("../..") else str(name)


def _new_folder(folder: Path | None) -> Path:
    """The named folder, which must not exist, or the next free name. ST-U05, ST-U04."""
    if folder is not None and folder.exists():
        raise SecureTrainError(
            "ST-U05", "the folder is there already", where=str(folder), next_step="name another one, or none"
        )
    number = 1
    while folder is None or folder.exists():
        folder = Path("quickstart" if number == 1 else f"quickstart-{number}")
        number += 1
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise SecureTrainError(
            "ST-U04",
            f"the folder cannot be made: {error.strerror}",
            where=str(folder),
            next_step="secure-train quickstart FOLDER",
        ) from None
    return folder


def _break_it(
    console: Console, program: str, work: Path, run: Path, last: Path, policy: Path, prefix: Path
) -> None:
    """Three commands that the reader can paste: each changes a file and ends in a refusal that names it."""
    shard = next(iter(sorted((work / "data").glob("*.bin"))))
    weights = next(iter(sorted(last.rglob("*.safetensors"))))
    module = next(iter(sorted(prefix.glob("lib/python*/site-packages/numpy/version.py"))))
    overwrite = "printf TAMPERED | dd of={} bs=1 seek=4096 conv=notrunc status=none; "
    verify = f"{program} verify {{}} --policy {policy}; echo exit $?"
    inputs = f"--data {work}/data --tokenizer {work}/tokenizer --out {work}/refused --preset quickstart"
    console.text("\nNow break it. Each of these ends in a refusal that names the file.\n")
    console.text("bytes in an installed package (undo: sed -i '$d' on the same file):")
    console.text(f"  echo '# changed' >> {module}; {program} run {inputs} --policy {policy}; echo exit $?\n")
    console.text("bytes in a checkpoint:")
    console.text(f"  {overwrite.format(weights)}{verify.format(run)}\n")
    console.text("bytes in a shard:")
    console.text(f"  {overwrite.format(shard)}{verify.format(work / 'data')}\n")
    console.text(f"{program} explain CODE tells more about a refusal.")
