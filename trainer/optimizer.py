"""AdamW over sharded parameters, the learning rate as a function of the step, and clipping.

Nothing here has hidden state: the rate follows from configuration and step number, and the optimizer's own
state is a flat dictionary of named tensors for the checkpoint.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from trainer.config import OptimizerConfig
from trainer.model import Llama, named_parameters


def build(model: Llama, config: OptimizerConfig) -> AdamW:
    """AdamW with two groups: matrices decay, norms do not, embedding and head as configured."""
    decaying: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for name, parameter in named_parameters(model).items():
        embedding = name.startswith(("embed_tokens.", "lm_head."))
        decays = parameter.ndim > 1 and (config.decay_embeddings or not embedding)
        (decaying if decays else plain).append(parameter)
    groups: list[dict[str, Any]] = [{"params": decaying}, {"params": plain, "weight_decay": 0.0}]
    return AdamW(
        groups,
        lr=float(config.learning_rate),
        betas=(float(config.beta1), float(config.beta2)),
        eps=float(config.epsilon),
        weight_decay=float(config.weight_decay),
        fused=config.implementation == "fused",
        foreach=config.implementation == "foreach",
    )


def learning_rate(config: OptimizerConfig, steps: int, step: int) -> float:
    """The rate of optimizer step `step` (0 is the first) of a run of `steps`."""
    peak, final = float(config.learning_rate), float(config.final_ratio)
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    start = config.warmup_steps
    if config.schedule == "wsd":
        start = max(start, steps - config.decay_steps)
    progress = min(max(step - start, 0) / max(steps - 1 - start, 1), 1.0)
    fall = (1 + math.cos(math.pi * progress)) / 2 if config.schedule == "cosine" else 1 - progress
    return peak * (final + (1 - final) * fall)


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients so that their joint norm over all ranks is at most `max_norm` (0: only measure).
    Returns the norm before scaling, on the device, without waiting for it.
    """
    parameters = list(model.parameters())
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if max_norm:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def state_tensors(model: Llama, optimizer: Optimizer) -> dict[str, Tensor]:
    """The optimizer's state by parameter name and quantity, for example `norm.weight.exp_avg`. Tensors
    only: rates and betas come from the configuration.
    """
    if not optimizer.state:
        _create_state(optimizer)
    tensors: dict[str, Tensor] = {}
    for name, parameter in named_parameters(model).items():
        if parameter not in optimizer.state:  # it answers an unknown key with an empty state
            raise KeyError(f"the optimizer does not know {name}")
        tensors |= {f"{name}.{quantity}": value for quantity, value in optimizer.state[parameter].items()}
    return tensors


def _create_state(optimizer: Optimizer) -> None:
    """Make an untouched optimizer allocate its state, by a step without gradient and without rate."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
