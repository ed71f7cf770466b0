"""From the plan's inputs to batches: opens what the gate verified, checks that it fits the model.

The loader and the order of samples are trainer/data; this is the seam between them, the plan and torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from supplychain.artifact import VerifiedArtifact
from trainer.data import Batch, Dataset, Description, Loader, Stage, validation_batches
from trainer.distributed import World
from trainer.errors import TrainerError
from trainer.fields import unknown
from trainer.plan import Input, Plan

TRAIN, VALIDATION = "train", "validation"


def tokenizer(plan: Plan) -> bytes:
    """The tokenizer that goes into every checkpoint; ST-T10 unless all datasets were made with it."""
    source = plan.tokenizer or plan.datasets[0]
    data = VerifiedArtifact.open(source.path, source.manifest).read_bytes("tokenizer.json")
    digest = hashlib.sha256(data).hexdigest()
    for dataset in plan.datasets:
        made_with = _description(dataset).tokenizer
        if made_with != digest:
            raise TrainerError(
                "ST-T10",
                f"the dataset {dataset.name!r} was made with another tokenizer than the plan's",
                where=str(dataset.path),
                expected=digest,
                found=made_with,
                next_step="prepare it again with this tokenizer",
            )
    return data


def open_split(plan: Plan, split: str) -> list[Dataset]:
    """This split of each dataset that has it; ST-T10 if a token could be outside the model's vocabulary."""
    found = []
    for source in plan.datasets:
        if not any(shard.split == split for shard in _description(source).shards):
            continue
        dataset = Dataset.open(source.path, source.manifest, split=split, verify=plan.reads)
        if dataset.vocab_size > plan.config.model.vocab_size:
            raise TrainerError(
                "ST-T10",
                f"the dataset {source.name!r} has a larger vocabulary than the model",
                where=str(source.path),
                expected=f"at most {plan.config.model.vocab_size} (model.vocab_size)",
                found=str(dataset.vocab_size),
                next_step="leave model.vocab_size unset: it follows the dataset",
            )
        found.append(dataset)
    return found


def loader(plan: Plan, world: World) -> Loader:
    """The training data of this rank, from the first sample to the last of the run."""
    config = plan.config
    return Loader(
        open_split(plan, TRAIN),
        seq_len=config.data.sequence_length,
        global_batch=config.train.global_batch,
        seed=config.seed,
        stages=_stages(plan),
        rank=world.rank,
        world=world.size,
        end=config.train.steps * config.train.global_batch,
        prefetch=config.data.prefetch,
    )


def validation(plan: Plan, datasets: list[Dataset], world: World) -> Iterator[Batch]:
    """The first batches of each validation split: the same every time."""
    for dataset in datasets:
        yield from validation_batches(
            dataset,
            seq_len=plan.config.data.sequence_length,
            global_batch=plan.config.train.global_batch,
            rank=world.rank,
            world=world.size,
            batches=plan.config.train.validate_batches,
        )


def micro_batches(batch: Batch, size: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """(inputs, targets), each `size` x sequence length, on the device."""
    inputs, targets = (torch.from_numpy(part).contiguous() for part in (batch.inputs, batch.labels))
    for start in range(0, len(inputs), size):
        x, y = inputs[start : start + size], targets[start : start + size]
        yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)


def _description(source: Input) -> Description:
    return Description.parse(VerifiedArtifact.open(source.path, source.manifest).read_bytes("dataset.json"))


def _stages(plan: Plan) -> list[Stage] | None:
    """The mixture that `data.weights` asks for; None is by size."""
    if not plan.config.data.weights:
        return None
    digests = {source.name: source.manifest for source in plan.datasets}
    weights: dict[str, int] = {}
    for item in plan.config.data.weights.split(","):
        name, _, weight = item.partition("=")
        if name.strip() not in digests:
            raise unknown("ST-T03", "dataset", name.strip(), digests, where="data.weights")
        if not weight.strip().isdecimal() or int(weight) == 0:
            raise TrainerError("ST-T02", "a weight is a positive integer", where="data.weights", found=item)
        weights[digests[name.strip()]] = int(weight)
    return [Stage(0, weights)]
