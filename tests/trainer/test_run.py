"""Whole runs: real processes over gloo, started as the launcher starts them, interrupted and damaged."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from supplychain.artifact import VerifiedArtifact, build_manifest
from tests.trainer.support import (
    BOOT,
    Inputs,
    Job,
    finish,
    free_port,
    make_inputs,
    make_job,
    start_rank,
    start_ranks,
    torchrun,
    train,
)
from trainer import checkpoint
from trainer.tensorfile import read_header

FILES = {"state.json", "config.json", "tokenizer.json", "model", "optimizer"}


def succeed(results: list[tuple[int, str]]) -> None:
    assert [code for code, _ in results] == [0] * len(results), "\n".join(said for _, said in results)


def complete(folder: Path) -> None:
    """Everything is there, and every tensor file is whole."""
    assert {path.name for path in folder.iterdir()} == FILES
    artifact = VerifiedArtifact.open(folder, build_manifest(folder, "checkpoint").digest)
    for entry in artifact.manifest.files:
        if entry.path.endswith(".safetensors"):
            with artifact.open_file(entry.path) as file:
                assert read_header(file)
    shutil.rmtree(folder / "secure-train")


def resumed(run: Path, job: Job, inputs: Inputs, step: int, *settings: str) -> Job:
    """A second segment that goes on from a checkpoint of `job`, in a folder of its own."""
    source = run / "source"
    shutil.copytree(job.checkpoint(step), source)
    return make_job(run, inputs, *settings, checkpoint=source)


@pytest.fixture(scope="module")
def one(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Job:
    job = make_job(
        tmp_path_factory.mktemp("one"), inputs, "train.validate_every=3", "train.validate_batches=2"
    )
    succeed(train(job, 1))
    return job


@pytest.fixture(scope="module")
def two(inputs: Inputs, tmp_path_factory: pytest.TempPathFactory) -> Job:
    """Two ranks, compiled as far as it is cheap."""
    job = make_job(tmp_path_factory.mktemp("two"), inputs, "compile=true", "compile_backend=aot_eager")
    done = torchrun(job, 2)
    assert done.returncode == 0, done.stderr
    return job


def test_a_run_learns_and_leaves_what_it_should(one: Job) -> None:
    assert one.outcome == {
        "status": "completed",
        "step": "6",
        "loss": f"{one.losses[6]:.6f}",
        "checkpoint": "step-00000006",
        "signal": None,
    }
    assert one.losses[6] < one.losses[1] - 0.5
    lines = [json.loads(line) for line in (one.run / "metrics.jsonl").read_text().splitlines()]
    assert [line["validation_loss"] < 6.5 for line in lines if "validation_loss" in line] == [True, True]
    assert {path.name for path in (one.run / "checkpoints").iterdir()} == {"step-00000003", "step-00000006"}
    complete(one.checkpoint(3))
    assert not list((one.run / "report").glob("rank-*.json"))


def test_two_ranks_train_what_one_trains(one: Job, two: Job) -> None:
    for step, loss in one.losses.items():
        assert two.losses[step] == pytest.approx(loss, rel=1e-4)


def test_resuming_on_one_rank_is_exact(one: Job, inputs: Inputs, tmp_path: Path) -> None:
    job = resumed(tmp_path, one, inputs, 3)
    succeed(train(job, 1))
    assert job.tensors(6) == one.tensors(6)
    assert {step: job.losses[step] for step in (4, 5, 6)} == {step: one.losses[step] for step in (4, 5, 6)}
    assert (job.checkpoint(6) / "state.json").read_bytes().replace(job.digest.encode(), b"") == (
        one.checkpoint(6) / "state.json"
    ).read_bytes().replace(one.digest.encode(), b"")


def test_resuming_on_two_ranks_is_exact(two: Job, inputs: Inputs, tmp_path: Path) -> None:
    job = resumed(tmp_path, two, inputs, 3, "compile=true", "compile_backend=aot_eager")
    done = torchrun(job, 2)
    assert done.returncode == 0, done.stderr
    assert len(job.tensors(6)) == 4
    assert job.tensors(6) == two.tensors(6)


@pytest.mark.slow
def test_resuming_a_compiled_run_is_exact(inputs: Inputs, tmp_path: Path) -> None:
    """With the real compiler, and each segment with an empty cache of its own."""
    first = make_job(tmp_path / "first", inputs, "compile=true")
    done = torchrun(first, 2, cache=tmp_path / "cache-1")
    assert done.returncode == 0, done.stderr
    job = resumed(tmp_path / "second", first, inputs, 3, "compile=true")
    assert torchrun(job, 2, cache=tmp_path / "cache-2").returncode == 0
    assert job.tensors(6) == first.tensors(6)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_resuming_on_another_number_of_ranks(
    one: Job, two: Job, inputs: Inputs, tmp_path: Path, before: int, after: int
) -> None:
    source = {1: one, 2: two}[before]
    job = resumed(tmp_path, source, inputs, 3)
    succeed(train(job, after))
    for step in (4, 5, 6):
        assert job.losses[step] == pytest.approx(source.losses[step], rel=1e-4)


def test_starting_from_weights_only(one: Job, inputs: Inputs, tmp_path: Path) -> None:
    shutil.copytree(one.checkpoint(6), tmp_path / "base")
    job = make_job(tmp_path / "run", inputs, "train.steps=2", checkpoint=tmp_path / "base", resume=False)
    succeed(train(job, 1))
    assert job.outcome["step"] == "2"
    assert job.losses[1] < one.losses[1] - 0.5


def test_resuming_a_finished_run_does_nothing(one: Job, inputs: Inputs, tmp_path: Path) -> None:
    job = resumed(tmp_path, one, inputs, 6)
    succeed(train(job, 1))
    assert (job.outcome["status"], job.outcome["step"]) == ("completed", "6")
    assert not (job.run / "checkpoints").exists()


def test_a_signal_saves_and_ends_well(inputs: Inputs, tmp_path: Path) -> None:
    """To one of two ranks, several times, and the other kind as well."""
    job = make_job(tmp_path, inputs, "train.steps=100000", "checkpoint.every=0")
    ranks = start_ranks(job, 2)
    _wait_for_step(job, ranks, 2)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM):
        ranks[1].send_signal(number)
        time.sleep(0.05)
    results = finish(ranks)
    assert [code for code, _ in results] == [0, 0], results
    assert job.outcome["status"] == "stopped"
    assert job.outcome["signal"] in ("SIGTERM", "SIGINT")
    assert job.outcome["checkpoint"] == checkpoint.name(int(job.outcome["step"]))
    complete(job.checkpoint(int(job.outcome["step"])))
    assert "stopped by SIG" in results[0][1]


@pytest.mark.parametrize("attempt", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_kill_9_while_saving_leaves_no_half_checkpoint(inputs: Inputs, tmp_path: Path, attempt: int) -> None:
    job = make_job(tmp_path, inputs, "train.steps=100000", "checkpoint.every=1")
    ranks = start_ranks(job, 2)
    folder = job.run / "checkpoints"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not list(folder.glob(f".step-0000000{5 + attempt}.partial")):
        assert all(rank.poll() is None for rank in ranks)
    ranks[attempt].kill()
    codes = [code for code, _ in finish(ranks)]
    assert codes[attempt] == -signal.SIGKILL
    assert codes[1 - attempt] != 0, "the other rank notices, and does not hang"
    kept = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    assert kept
    for path in kept:
        complete(path)
    # And a second run goes on, over what was left.
    again = make_job(
        job.run, inputs, f"train.steps={len(kept) + 2}", "checkpoint.every=1", checkpoint=kept[-1]
    )
    succeed(train(again, 2))
    complete(again.checkpoint(len(kept) + 2))


def test_a_changed_byte_of_the_checkpoint_is_refused(one: Job, inputs: Inputs, tmp_path: Path) -> None:
    job = resumed(tmp_path, one, inputs, 3)
    path = next((tmp_path / "source" / "optimizer").iterdir())
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    results = train(job, 2)
    assert {code for code, _ in results} <= {3, 11}
    failures = [item for item in job.failures.values() if item["code"] != "ST-T08"]
    assert failures
    assert {item["code"] for item in failures} == {"ST-A03"}
    assert str(path) in failures[0]["where"]
    assert not (job.run / "report" / "outcome.json").exists()


def test_a_changed_byte_of_the_data_stops_all_ranks(inputs: Inputs, tmp_path: Path) -> None:
    damaged = make_inputs(tmp_path / "inputs")
    job = make_job(tmp_path / "run", damaged)
    path = damaged.dataset / "shard-00000.bin"
    data = bytearray(path.read_bytes())
    for at in range(0, len(data), 65536):
        data[at] ^= 1
    path.write_bytes(data)
    results = train(job, 2)
    assert {code for code, _ in results} <= {3, 11}
    failures = [item for item in job.failures.values() if item["code"] != "ST-T08"]
    assert failures
    assert {item["code"] for item in failures} == {"ST-A03"}
    assert str(path) in failures[0]["where"]
    assert all("Traceback" not in said for _, said in results)


def test_another_plan_than_was_decided_is_refused(one: Job) -> None:
    rank = start_rank(BOOT, [str(one.plan), "--plan-sha256", "00" * 32])
    ((code, said),) = finish([rank])
    assert code == 3
    assert "error[ST-R01]" in said


def test_ranks_with_different_plans_refuse_to_start(inputs: Inputs, tmp_path: Path) -> None:
    jobs = [make_job(tmp_path / name, inputs, f"seed={seed}") for name, seed in (("a", 1), ("b", 2))]
    port = free_port()
    results = finish([start_rank(BOOT, job.arguments, rank, 2, port) for rank, job in enumerate(jobs)])
    assert [code for code, _ in results] == [3, 3]
    assert all("error[ST-T05]" in said for _, said in results)
    assert not list(tmp_path.glob("*/checkpoints"))


def test_a_checkpoint_of_another_shape_is_refused(one: Job, inputs: Inputs, tmp_path: Path) -> None:
    job = resumed(tmp_path, one, inputs, 3, "model.hidden=96")
    ((code, said),) = train(job, 1)
    assert code == 2
    assert "error[ST-C02]" in said


def test_a_loss_that_is_not_finite_is_not_saved(inputs: Inputs, tmp_path: Path) -> None:
    job = make_job(
        tmp_path, inputs, "optimizer.learning_rate=1e20", "optimizer.warmup_steps=0", "optimizer.clip_norm=0"
    )
    ((code, _),) = train(job, 1)
    assert code == 10
    assert job.failures["rank-0"]["code"] == "ST-T07"
    assert not (job.run / "report" / "outcome.json").exists()


def test_text_from_a_checkpoint(two: Job) -> None:
    digest = build_manifest(two.checkpoint(3), "checkpoint").digest
    arguments = ["generate", "--checkpoint", str(two.checkpoint(3)), "--manifest", digest]
    command = [sys.executable, "-I", "-c", BOOT, *arguments, "--prompt", "the cat", "--tokens", "8"]
    first, again = (subprocess.run(command, capture_output=True, text=True, check=False) for _ in range(2))
    shutil.rmtree(two.checkpoint(3) / "secure-train")
    assert first.returncode == 0, first.stderr
    assert first.stdout.startswith("the cat")
    assert first.stdout == again.stdout
    assert first.stderr == ""


def _wait_for_step(job: Job, ranks: list[subprocess.Popen[str]], step: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert all(rank.poll() is None for rank in ranks), [rank.communicate() for rank in ranks]
        if (job.run / "metrics.jsonl").exists() and max(job.losses, default=0) >= step:
            return
        time.sleep(0.05)
    pytest.fail("no step was made in time")


def test_no_compiler_is_one_clear_error(
    inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    ((code, said),) = train(make_job(tmp_path, inputs, "compile=true"), 1)
    assert code == 10
    assert "error[ST-T11]" in said
    assert "Traceback" not in said
