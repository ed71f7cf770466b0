"""Named model shapes: Llama 2, Llama 3.x, and small ones for laptops and tests.

Owns the one description of a Llama's shape. Torch-free, so that a configuration can be resolved without
torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal

from trainer.fields import option

# ruff: noqa: RUF009 - `option` and `section` are dataclasses.field with a fixed form of metadata


@dataclass(frozen=True)
class Shape:
    """Everything that decides which tensors a Llama has and what it computes."""

    flavor: str = option("llama3-8b", "named shape that the other fields of this section start from")
    vocab_size: int = option(128256, "rows of the embedding; at least the tokenizer's size", low=2)
    dim: int = option(4096, "width of the residual stream", low=2)
    layers: int = option(32, "number of transformer blocks", low=1)
    heads: int = option(32, "query heads; must divide dim into even head sizes", low=1)
    kv_heads: int = option(8, "key and value heads (grouped-query attention); must divide heads", low=1)
    hidden: int = option(14336, "width of the SwiGLU feed-forward", low=1)
    norm_eps: Decimal = option(Decimal("0.00001"), "epsilon of RMSNorm", above=0)
    rope_theta: Decimal = option(Decimal(500000), "base of the rotary frequencies", above=1)
    rope_scaling: Decimal = option(Decimal(8), "Llama 3 frequency scaling factor; 1 is off", low=1)
    rope_low: Decimal = option(Decimal(1), "low-frequency factor of the scaling", above=0)
    rope_high: Decimal = option(Decimal(4), "high-frequency factor of the scaling", above=0)
    rope_original_length: int = option(8192, "context length before the scaling", low=1)
    tied: bool = option(False, "the output head shares the embedding's weight")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def parameters(self) -> int:
        """Number of trained values; a tied head counts once."""
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.kv_heads * self.head_dim
        block = attention + 3 * self.dim * self.hidden + 2 * self.dim
        embeddings = self.vocab_size * self.dim * (1 if self.tied else 2)
        return embeddings + self.layers * block + self.dim

    def flops_per_token(self, sequence_length: int) -> int:
        """Forward and backward, the PaLM/nanoGPT count: 6 N + 12 L d s, attention not discounted for
        causality.
        """
        return 6 * self.parameters + 12 * self.layers * self.dim * sequence_length


_LLAMA2 = Shape(
    "llama2-7b",
    32000,
    4096,
    32,
    32,
    32,
    11008,
    rope_theta=Decimal(10000),
    rope_scaling=Decimal(1),
    rope_original_length=4096,
)
_LLAMA3 = Shape()
_TINY = replace(_LLAMA3, rope_theta=Decimal(10000), rope_scaling=Decimal(1), tied=True)

FLAVORS: dict[str, Shape] = {
    shape.flavor: shape
    for shape in (
        _LLAMA2,
        replace(_LLAMA2, flavor="llama2-13b", dim=5120, layers=40, heads=40, kv_heads=40, hidden=13824),
        replace(_LLAMA2, flavor="llama2-34b", dim=8192, layers=48, heads=64, kv_heads=8, hidden=22016),
        replace(_LLAMA2, flavor="llama2-70b", dim=8192, layers=80, heads=64, kv_heads=8, hidden=28672),
        replace(
            _LLAMA3, flavor="llama3-1b", dim=2048, layers=16, hidden=8192, rope_scaling=Decimal(32), tied=True
        ),
        replace(
            _LLAMA3,
            flavor="llama3-3b",
            dim=3072,
            layers=28,
            heads=24,
            hidden=8192,
            rope_scaling=Decimal(32),
            tied=True,
        ),
        _LLAMA3,
        replace(_LLAMA3, flavor="llama3-70b", dim=8192, layers=80, heads=64, hidden=28672),
        replace(_LLAMA3, flavor="llama3-405b", dim=16384, layers=126, heads=128, hidden=53248),
        # Under a million parameters at a vocabulary of 2048: learns Shakespeare's layout in two minutes on
        # two cores.
        replace(
            _TINY, flavor="quickstart", vocab_size=2048, dim=128, layers=4, heads=4, kv_heads=2, hidden=344
        ),
        replace(_TINY, flavor="tiny", vocab_size=512, dim=64, layers=2, heads=4, kv_heads=2, hidden=128),
    )
}
