"""Llama 2 and 3, top to bottom.

A plain `nn.Module`: it knows its shape and nothing of meshes, precision or files; parallelism is applied
from outside (parallelize.py). Module names and weight layouts are those of the Hugging Face checkpoints, so
importing and exporting renames nothing but a prefix. It promises to compile without a graph break, to
compute the loss without ever holding all logits, and to start from weights that depend on seed and
parameter name only.

Shapes in comments: B sequences, T tokens, D model width, H query heads, K key/value heads, E head size, V
vocabulary.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import checkpoint

from trainer.flavors import Shape

IGNORE = -100  # a target that carries no loss
INIT_STD = 0.02
_INIT_BLOCK = 1 << 18  # values that are drawn from one generator


class Cache:
    """Keys and values of the tokens that one attention layer has seen; for generation only."""

    def __init__(
        self, batch: int, length: int, shape: Shape, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        size = (batch, shape.kv_heads, length, shape.head_dim)
        self.keys = torch.empty(size, device=device, dtype=dtype)
        self.values = torch.empty(size, device=device, dtype=dtype)
        self.length = 0

    def extend(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append B K T E keys and values; returns all so far."""
        start, self.length = self.length, self.length + keys.shape[2]
        self.keys[:, :, start : self.length] = keys
        self.values[:, :, start : self.length] = values
        return self.keys[:, :, : self.length], self.values[:, :, : self.length]


def rope_tables(shape: Shape, length: int) -> tuple[Tensor, Tensor]:
    """Cosine and sine of the rotary angles, each T E/2, float32, computed in float64.

    Llama 3 scaling: frequencies whose wavelength exceeds the original context are divided by the factor,
    short ones are kept, and those between are interpolated.
    """
    frequency = float(shape.rope_theta) ** -(
        torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    )
    factor, low, high = float(shape.rope_scaling), float(shape.rope_low), float(shape.rope_high)
    if factor != 1.0:
        turns = (
            shape.rope_original_length * frequency / (2 * math.pi)
        )  # full turns within the original context
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = keep * frequency + (1 - keep) * frequency / factor
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequency)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x (B H T E) in float32; the pairs are (i, i + E/2), as in Hugging Face's layout."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).type_as(x)


class Attention(nn.Module):
    """Causal self-attention with grouped keys and values."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        self.grouped = shape.kv_heads != shape.heads
        self.q_proj = nn.Linear(shape.dim, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(shape.dim, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.dim, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None = None) -> Tensor:
        batch, length, _ = x.shape
        heads = (batch, length, -1, self.head_dim)
        q = rotate(self.q_proj(x).view(heads).transpose(1, 2), cos, sin)  # B H T E
        k = rotate(self.k_proj(x).view(heads).transpose(1, 2), cos, sin)  # B K T E
        v = self.v_proj(x).view(heads).transpose(1, 2)
        if cache is not None:
            k, v = cache.extend(k, v)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=length > 1, enable_gqa=self.grouped)
        out: Tensor = self.o_proj(attended.transpose(1, 2).reshape(batch, length, -1))
        return out


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.up_proj = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.down_proj = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """One transformer layer: the unit of compilation, recomputation and sharding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.dim, eps=float(shape.norm_eps))
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.dim, eps=float(shape.norm_eps))
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache | None = None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def token_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross-entropies of N tokens; hidden N D, weight V D. Logits are raised to float32."""
    logits = F.linear(hidden, weight).float()
    return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")


class Head(nn.Linear):
    """Projection to the vocabulary. The loss is computed inside its forward, where FSDP has gathered the
    weight.
    """

    def __init__(self, shape: Shape, chunk: int) -> None:
        super().__init__(shape.dim, shape.vocab_size, bias=False)
        self.chunk = chunk
        self.loss: Callable[[Tensor, Tensor, Tensor], Tensor] = token_loss  # parallelize.py may compile it

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits B T V, or, given targets B T, the summed loss (float32 scalar).

        The loss is taken over chunks of tokens whose logits are recomputed in the backward pass, so that the
        largest tensor of the whole step is chunk x V instead of B x T x V.
        """
        if targets is None:
            return super().forward(hidden)
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
        if len(targets) <= self.chunk:
            return self.loss(hidden, self.weight, targets)
        total = torch.zeros((), device=hidden.device)
        # split, not slices: its backward pass is one concatenation instead of a padded gradient per chunk.
        for h, t in zip(torch.split(hidden, self.chunk), torch.split(targets, self.chunk), strict=True):
            loss = checkpoint(self.loss, h, self.weight, t, use_reentrant=False, preserve_rng_state=False)
            total = total + loss
        return total


class Llama(nn.Module):
    """The whole model. Build it on the meta device, shard it, then `initialise` it."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape, length: int, loss_chunk: int = 2048) -> None:
        super().__init__()
        self.shape = shape
        self.length = length
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.dim)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim, eps=float(shape.norm_eps))
        self.lm_head = Head(shape, loss_chunk)
        if shape.tied:
            self.lm_head.weight = self.embed_tokens.weight
        # Not in checkpoints: they follow from the shape, and stay float32 whatever the weights are.
        self.register_buffer("cos", torch.empty(length, shape.head_dim // 2), persistent=False)
        self.register_buffer("sin", torch.empty(length, shape.head_dim // 2), persistent=False)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, caches: Sequence[Cache] | None = None
    ) -> Tensor:
        """tokens B T; logits B T V, or with targets the summed loss. `caches` holds one cache per layer."""
        start = caches[0].length if caches else 0
        cos, sin = self.cos[start : start + tokens.shape[1]], self.sin[start : start + tokens.shape[1]]
        x = self.embed_tokens(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x, cos, sin, caches[index]) if caches else layer(x, cos, sin)
        out: Tensor = self.lm_head(self.norm(x), targets)
        return out

    @torch.no_grad()
    def prepare(self) -> None:
        """After `to_empty`, which leaves buffers undefined and gives tied modules a parameter each."""
        if self.shape.tied:
            self.lm_head.weight = self.embed_tokens.weight
        cos, sin = rope_tables(self.shape, self.length)
        self.cos.copy_(cos)
        self.sin.copy_(sin)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Fill all parameters and buffers in place, sharded or not.

        Values come from generators keyed by (seed, parameter name, block of rows), so they are the same at
        any world size and on any device, and a rank draws little more than its own shard.
        """
        self.prepare()
        for name, parameter in named_parameters(self).items():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                _draw(
                    parameter,
                    f"{seed}:{name}",
                    INIT_STD / math.sqrt(2 * self.shape.layers) if residual else INIT_STD,
                )


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters under the names of the plain model, whatever it was wrapped in; a tied one once."""
    return {name.replace("_checkpoint_wrapped_module.", ""): p for name, p in model.named_parameters()}


def _draw(parameter: Tensor, key: str, std: float) -> None:
    """Normal values for a matrix or for the shard of one that is here."""
    rows, columns = parameter.shape
    local: Tensor = parameter
    size, offset = tuple(parameter.shape), tuple(0 for _ in parameter.shape)
    if isinstance(parameter, DTensor):
        local = parameter.to_local()
        size, offset = compute_local_shape_and_global_offset(
            parameter.shape, parameter.device_mesh, parameter.placements
        )
    first, last = offset[0], offset[0] + size[0]
    height = max(1, _INIT_BLOCK // columns)
    for block in range(first // height, -(-last // height)) if local.numel() else ():
        digest = hashlib.sha256(f"{key}:{block}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        start, end = block * height, min((block + 1) * height, rows)
        values = torch.empty(end - start, columns).normal_(0.0, std, generator=generator)
        inside = slice(max(start, first), min(end, last))
        local[inside.start - first : inside.stop - first] = values[
            inside.start - start : inside.stop - start, offset[1] : offset[1] + size[1]
        ].to(local)
