"""Small real inputs, plans and processes for the trainer's tests."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from supplychain.artifact import build_manifest, canonical_json
from trainer import config, fields
from trainer.data import Writer

ROOT = Path(__file__).parents[2]
# `-m trainer` without relying on what is installed, in isolated mode as the launcher does it.
_PATH = f"import sys; sys.path.insert(0, {str(ROOT)!r}); "
BOOT = _PATH + "from trainer.__main__ import main; sys.exit(main(sys.argv[1:]))"
SCENARIOS = _PATH + "from tests.trainer import scenarios; scenarios.main()"

VOCABULARY = 512
TINY = (
    "model.flavor=tiny",
    "data.sequence_length=32",
    "train.global_batch=8",
    "train.micro_batch=2",
    "train.steps=6",
    "train.timeout=60",
    "optimizer.warmup_steps=2",
    "optimizer.learning_rate=0.01",
    "checkpoint.every=3",
    "log.every=1",
    "compile=false",
)


@dataclass(frozen=True)
class Inputs:
    """A signed-shaped dataset and tokenizer (manifests, no signatures: the trainer is given digests)."""

    dataset: Path
    tokenizer: Path

    @cached_property
    def digests(self) -> dict[str, str]:
        return {"dataset": manifest_digest(self.dataset), "tokenizer": manifest_digest(self.tokenizer)}


def manifest_digest(folder: Path) -> str:
    return hashlib.sha256((folder / "secure-train/manifest.json").read_bytes()).hexdigest()


def make_inputs(folder: Path) -> Inputs:
    """A learnable walk over a small vocabulary, with a validation split, and a byte-level tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and the dog sat on the log"], trainer)
    data = tokenizer.to_str().encode()
    inputs = Inputs(folder / "dataset", folder / "tokenizer")
    for path in (inputs.dataset, inputs.tokenizer):
        path.mkdir(parents=True)
        (path / "tokenizer.json").write_bytes(data)
    writer = Writer(
        inputs.dataset,
        vocab_size=tokenizer.get_vocab_size(),
        tokenizer=hashlib.sha256(data).hexdigest(),
        shard_tokens=100_000,
    )
    steps = np.random.default_rng(0).integers(1, 5, 120_000)
    walk = np.cumsum(steps) % tokenizer.get_vocab_size()
    writer.add("train", walk[:100_000], np.full(100, 1000))
    writer.add("validation", walk[100_000:], np.full(20, 1000))
    writer.finish()
    build_manifest(inputs.dataset, "dataset")
    build_manifest(inputs.tokenizer, "tokenizer")
    return inputs


@dataclass(frozen=True)
class Job:
    """A plan on disk, ready to be launched."""

    run: Path
    plan: Path
    digest: str

    @property
    def arguments(self) -> list[str]:
        return [str(self.plan), "--plan-sha256", self.digest]

    @property
    def outcome(self) -> dict[str, Any]:
        return dict(json.loads((self.run / "report" / "outcome.json").read_bytes()))

    @property
    def losses(self) -> dict[int, float]:
        lines = [json.loads(line) for line in (self.run / "metrics.jsonl").read_text().splitlines()]
        return {line["step"]: line["loss"] for line in lines if "loss" in line}

    @property
    def failures(self) -> dict[str, dict[str, Any]]:
        """By file name; every rank that had a reason of its own to stop."""
        return {
            path.stem: json.loads(path.read_bytes()) for path in (self.run / "report").glob("rank-*.json")
        }

    def checkpoint(self, step: int) -> Path:
        return self.run / "checkpoints" / f"step-{step:08d}"

    def tensors(self, step: int) -> dict[str, str]:
        """sha256 of each tensor file of a checkpoint."""
        folder = self.checkpoint(step)
        return {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*.safetensors"))
        }


def make_job(
    run: Path, inputs: Inputs, *settings: str, checkpoint: Path | None = None, resume: bool = True
) -> Job:
    """A plan as the gate writes it, for the tiny model; `settings` come after the defaults of these tests."""
    resolved, _ = config.resolve(settings=[*TINY, *settings], device="cpu", vocab_size=VOCABULARY)
    source = None
    if checkpoint is not None:
        digest = build_manifest(checkpoint, "checkpoint").digest
        source = {"path": str(checkpoint), "manifest": digest, "resume": resume}
    document = {
        "schema": "urn:secure-train:plan:v1",
        "run": {"id": "test", "directory": str(run), "segment": "1"},
        "inputs": {
            "datasets": [
                {"name": "walk", "path": str(inputs.dataset), "manifest": inputs.digests["dataset"]}
            ],
            "tokenizer": {"path": str(inputs.tokenizer), "manifest": inputs.digests["tokenizer"]},
            "checkpoint": source,
        },
        "reads": "always",
        "config": fields.to_document(resolved),
    }
    run.mkdir(parents=True, exist_ok=True)
    data = canonical_json(document)
    (run / "plan.json").write_bytes(data)
    return Job(run, run / "plan.json", hashlib.sha256(data).hexdigest())


def torchrun(job: Job, processes: int, *, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The whole way: torchrun, its agent and its ranks, isolated, as the launcher starts them."""
    python = [sys.executable, "-I"]
    command = [*python, "-m", "torch.distributed.run", "--no-python", "--standalone", "--nproc-per-node"]
    command += [str(processes), *python, "-c", BOOT, *job.arguments]
    return subprocess.run(
        command,
        env=_environment(cache),
        cwd=job.run,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def start_rank(
    code: str, arguments: Sequence[str], rank: int = 0, size: int = 1, port: int = 0
) -> subprocess.Popen[str]:
    """One rank, without torchrun's agent. With `size` 1 it is a process on its own."""
    place = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "MASTER_PORT": port,
    }
    environment = _environment(None)
    if size > 1:
        environment |= {"MASTER_ADDR": "127.0.0.1"} | {name: str(value) for name, value in place.items()}
    command = [sys.executable, "-I", "-c", code, *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def start_ranks(job: Job, size: int) -> list[subprocess.Popen[str]]:
    port = free_port()
    return [start_rank(BOOT, job.arguments, rank, size, port) for rank in range(size)]


def finish(processes: list[subprocess.Popen[str]], timeout: float = 200) -> list[tuple[int, str]]:
    """(exit code, stderr) of each. A rank that hangs fails the test here, and none outlives it."""
    deadline = time.monotonic() + timeout
    try:
        said = [process.communicate(timeout=deadline - time.monotonic())[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]


def train(job: Job, size: int) -> list[tuple[int, str]]:
    return finish(start_ranks(job, size))


def scenario(name: str, size: int) -> Any:
    """Run a function of scenarios.py on `size` real ranks; returns what rank 0 printed, as JSON."""
    port = free_port()
    ranks = [start_rank(SCENARIOS, [name], rank, size, port) for rank in range(size)]
    try:
        out = [process.communicate(timeout=200) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * size, out
    return json.loads(out[0][0].splitlines()[-1])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(cache: Path | None) -> dict[str, str]:
    keep = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    private = {"TORCHINDUCTOR_CACHE_DIR": str(cache)} if cache else {}
    return {**keep, "OMP_NUM_THREADS": "1", "LC_ALL": "C", **private}
