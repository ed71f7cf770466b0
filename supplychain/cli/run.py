"""`secure-train run`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import click

from supplychain import run
from supplychain.cli import options, version
from supplychain.cli.output import Console, show_decision
from supplychain.environment.verify import find_environment
from supplychain.errors import SecureTrainError
from supplychain.gate import Decision, Request
from supplychain.launch import Result
from supplychain.trust import roots


@click.command()
@click.option(
    "--data", "dataset", type=click.Path(path_type=Path), metavar="DIR", help="Signed dataset to train on."
)
@click.option(
    "--tokenizer", type=click.Path(path_type=Path), metavar="DIR", help="Signed tokenizer that belongs to it."
)
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR", help="Folder of the run; must not hold one yet."
)
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    metavar="RUN",
    help="Go on with an interrupted run, from its last signed checkpoint.",
)
@click.option("--preset", metavar="NAME", help="Ready configuration of the trainer.")
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    metavar="TOML",
    help="Configuration file of the trainer.",
)
@click.option(
    "--set", "settings", multiple=True, metavar="A.B=C", help="One setting of the trainer; may be repeated."
)
@click.option(
    "--processes",
    type=click.IntRange(1, 64),
    help="Processes on this machine [default: one per GPU; 2 on a CPU].",
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option(
    "--reads",
    type=click.Choice(["always", "once", "off"]),
    default="always",
    show_default=True,
    help="How blocks of data are verified as they are read.",
)
@click.option(
    "--lock",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Lock that the environment must have been built from.",
)
@options.env_option
@options.policy_option
@options.pin_option
@options.key_option
@options.json_option
def command(
    dataset: Path | None,
    tokenizer: Path | None,
    out: Path | None,
    resume: Path | None,
    preset: str | None,
    config_file: Path | None,
    settings: tuple[str, ...],
    processes: int | None,
    device: str,
    reads: Literal["always", "once", "off"],
    lock: Path | None,
    environment: Path | None,
    policy: Path | None,
    pin: str | None,
    key: str | None,
    as_json: bool,
) -> int:
    """Verify every input, then train, then sign and attest.

    The gate checks policy, environment, signatures, files and formats, and writes a signed decision. Only if
    every rule passes does anything start. Checkpoints are signed while training goes on. Ctrl-C saves and
    stops; `--resume RUN` goes on, bit for bit.
    """
    console = Console(as_json)
    signer = options.signer(key)
    keys = roots.policy_keys().list()
    if resume is not None:
        folder = resume.absolute()
        former = run.read_former(folder)
        request = run.request_again(folder, former)
        changes = {"policy": policy.absolute() if policy else None, "policy_pin": pin, "processes": processes}
        request = run.with_overrides(
            request, **changes, environment=find_environment(environment) if environment else None
        )
    else:
        former = None
        if dataset is None or out is None:
            raise click.UsageError(
                "Name the dataset with --data and the run's folder with --out, or a run with --resume."
            )
        where: Literal["cpu", "cuda"] = (
            "cuda" if device == "cuda" or (device == "auto" and _gpus()) else "cpu"
        )
        request = Request(
            run=out.absolute(),
            run_id=run.new_id(out.absolute()),
            policy=options.policy_path(policy),
            policy_pin=pin,
            environment=find_environment(environment),
            lock=lock.absolute() if lock else None,
            dataset=dataset.absolute(),
            tokenizer=tokenizer.absolute() if tokenizer else None,
            config=_trainer_arguments(preset, config_file, settings),
            processes=processes or (max(_gpus(), 1) if where == "cuda" else min(2, os.cpu_count() or 1)),
            device=where,
            reads=reads,
        )

    def show(decision: Decision) -> None:
        show_decision(console, decision)
        console.say("allowed: training starts" if decision.passed else "refused: nothing was started")

    with console.progress("hashing") as progress:
        decision, result = run.start(
            request,
            signer,
            keys,
            version=version(),
            say=console.say,
            show=show,
            progress=progress,
            former=former,
        )
    _show_result(console, request, result)
    verdicts = [verdict.as_dict() for verdict in decision.verdicts]
    console.answer("run", result.exit_code, run=str(request.run), result=result.__dict__, verdicts=verdicts)
    return result.exit_code


def _trainer_arguments(
    preset: str | None, config_file: Path | None, settings: tuple[str, ...]
) -> tuple[str, ...]:
    """Arguments for `python -m trainer config`."""
    arguments = ["--preset", preset] if preset else []
    arguments += ["--file", str(config_file.absolute())] if config_file else []
    return (*arguments, *(item for setting in settings for item in ("--set", setting)))


def _gpus() -> int:
    """NVIDIA devices, counted without torch; CUDA_VISIBLE_DEVICES narrows them."""
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, len([item for item in visible.split(",") if item.strip() not in ("", "-1")]))


def _show_result(console: Console, request: Request, result: Result) -> None:
    """The run's last lines: what happened, what was saved, what to do next."""
    if result.status == "refused":
        return
    if result.error:
        console.error(SecureTrainError.reported(result.error))
    where = f"{request.run}/checkpoints/{result.checkpoint}" if result.checkpoint else None
    if result.status == "completed":
        console.text(f"completed at step {result.step}, loss {result.loss}: {where}")
        console.text(f"  chain head sha256:{result.chain_head}")
        console.text(f"  provenance sha256:{result.provenance}, decision sha256:{result.decision}")
        console.text(f"  next: secure-train verify {request.run} --policy {request.policy}")
    elif where:
        console.text(f"{result.status} at step {result.step}: saved {where}")
        console.text(f"  next: secure-train run --resume {request.run}")
    else:
        console.text(
            f"{result.status}: no checkpoint was written by this launch; next: secure-train run --resume "
            f"{request.run}"
        )
