"""From a plain Llama to one that is spread over a device mesh.

Owns the order of application: recomputation, then compilation, then sharding. A compiled block contains its
recomputation, and FSDP's hooks run around the compiled block; any other order breaks graphs or gathers
weights twice.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from trainer import precision
from trainer.config import Config
from trainer.model import Llama


def build(config: Config, world_size: int, device: torch.device) -> Llama:
    """The model of a run, sharded over all ranks, initialised from the seed."""
    mesh = device_mesh(config, world_size)
    with torch.device("meta"):
        model = Llama(config.model, config.data.sequence_length, config.train.loss_chunk)
    parallelize(model, config, mesh)
    model.to_empty(device=device)
    model.initialise(config.seed)
    return model


def parallelize(model: Llama, config: Config, mesh: DeviceMesh) -> None:
    """Everything that is done to a model, in order."""
    if config.parallel.activation_checkpoint != "none":
        recompute(model, selective=config.parallel.activation_checkpoint == "selective")
    if config.compile:
        compile_blocks(model, config.compile_backend)
    shard(model, config, mesh)


def device_mesh(config: Config, world_size: int) -> DeviceMesh:
    """dp_shard alone for FSDP, dp_replicate x dp_shard for HSDP."""
    replicate, shard = config.mesh(world_size)
    names, sizes = (
        (("dp_shard",), (shard,)) if replicate == 1 else (("dp_replicate", "dp_shard"), (replicate, shard))
    )
    # The default process group is the control plane and always gloo; a GPU mesh gets NCCL groups of its own.
    data_plane: dict[str, Any] = (
        {} if config.device == "cpu" else {"backend_override": dict.fromkeys(names, "nccl")}
    )
    return init_device_mesh(config.device, sizes, mesh_dim_names=names, **data_plane)


def recompute(model: Llama, *, selective: bool) -> None:
    """Activation checkpointing of each block: all of it, or all but attention and every second matrix
    product.
    """
    options: dict[str, Any] = {"context_fn": _selective_contexts} if selective else {}
    for index, block in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(block, preserve_rng_state=False, **options)


_PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def _selective_contexts() -> Any:
    """One block's forward and recomputation, each of which counts its own matrix products."""
    seen = {False: 0, True: 0}

    def choose(context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        keep = operation in _ATTENTION
        if operation in _PRODUCTS:
            seen[context.is_recompute] += 1
            keep = seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)


def compile_blocks(model: Llama, backend: str) -> None:
    """One graph per block, compiled once and shared by all of them; a graph break is an error, not a
    slowdown.
    """
    for block in model.layers:
        block.compile(backend=backend, fullgraph=True, dynamic=False)
    model.lm_head.loss = torch.compile(model.lm_head.loss, backend=backend, fullgraph=True, dynamic=False)


def reshard(model: Llama) -> None:
    """Let go of weights that a forward pass without a backward pass has left gathered. Until then the model's
    parameters are other objects than those that the optimizer knows.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def shard(model: Llama, config: Config, mesh: DeviceMesh) -> None:
    """FSDP2 units: each block; embedding; norm and head together, whose gathered weights are kept for the
    backward pass that follows at once. Tied embeddings and head stay in the root unit, which is gathered
    during all of it.
    """
    wrap = partial(fully_shard, mesh=mesh, mp_policy=precision.policy(config.precision))
    for block in model.layers:
        wrap(block)
    if not model.shape.tied:
        wrap(model.embed_tokens)
        wrap([model.norm, model.lm_head], reshard_after_forward=False)
    wrap(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # A plain sum over ranks: the loss was already divided by the tokens of all of them.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
