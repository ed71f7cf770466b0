"""What tests run on several real ranks. Each function prints one JSON document on rank 0."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.trainer.support import TINY
from trainer import config, distributed, optimizer, parallelize, reproducible
from trainer.model import Llama, named_parameters


def build(*settings: str) -> tuple[config.Config, Llama]:
    resolved, _ = config.resolve(settings=[*TINY, *settings], device="cpu")
    reproducible.apply(resolved, distributed.place()[3])
    return resolved, parallelize.build(resolved, dist.get_world_size(), torch.device("cpu"))


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def digest(model: Llama) -> str:
    total = hashlib.sha256()
    for name, parameter in sorted(named_parameters(model).items()):
        total.update(name.encode() + whole(parameter).contiguous().numpy().tobytes())
    return total.hexdigest()


def initial() -> Any:
    """Digest of the initial weights, tied and untied, of shapes that divide unevenly."""
    batch = ("train.global_batch=6", "train.micro_batch=1")  # for three ranks as well
    return [
        digest(build(*batch, *settings)[1])
        for settings in ((), ("model.tied=false",), ("model.dim=72", "model.heads=4", "model.hidden=101"))
    ]


def steps(*settings: str, count: int = 3) -> list[list[float]]:
    """[loss, gradient norm] of some optimizer steps on fixed data, the same whatever the number of ranks."""
    resolved, model = build(*settings)
    adam = optimizer.build(model, resolved.optimizer)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 512, (8, 33), generator=generator)
    mine = rows.tensor_split(dist.get_world_size())[dist.get_rank()]
    results = []
    for _ in range(count):
        loss = torch.zeros(())
        for part in mine.split(2):
            share = model(part[:, :-1].contiguous(), part[:, 1:].contiguous()) / resolved.tokens_per_step
            share.backward()
            loss += share.detach()
        norm = optimizer.clip(model, 1.0)
        adam.step()
        adam.zero_grad()
        results.append([distributed.total(loss), float(norm)])
    return results


def layouts() -> Any:
    """The same training under every layout that this many ranks allow."""
    size = dist.get_world_size()
    found: dict[str, Any] = {
        "initial": initial(),
        "fsdp": steps(),
        "untied": steps("model.tied=false"),
        "compiled": steps("compile=true", "compile_backend=aot_eager"),
        "recompute": steps("parallel.activation_checkpoint=full"),
        "selective": steps("parallel.activation_checkpoint=selective"),
        "chunked": steps("train.loss_chunk=16"),
        "bfloat16": steps("precision.compute=bfloat16"),
    }
    if size > 1:
        found["hsdp"] = steps(f"parallel.dp_replicate={size}")
    return found


def main() -> None:
    resolved, _ = config.resolve(settings=TINY, device="cpu")
    world = distributed.join(resolved, "00" * 32)
    result = {"initial": initial, "layouts": layouts}[sys.argv[1]]()
    if world.leads:
        print(json.dumps(result))
    dist.destroy_process_group()
