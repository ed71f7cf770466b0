"""What a user may do to samples: a plain function of a sample's tokens and a random generator.

The generator is a counter-based one (Philox) whose key is a hash of (seed, number of the sample). So what a
transform draws depends on nothing else: no state is saved, and neither ranks nor restarts matter. The
function must itself be pure, and give one sample for one: what leaves samples out belongs into preparation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from supplychain.artifact import SecureTrainError
from trainer.data.shards import Tokens

Transform = Callable[[Tokens, np.random.Generator], Tokens]


def generator(seed: int, sample: int) -> np.random.Generator:
    """The generator for sample number `sample` of the global order."""
    key = hashlib.sha256(f"secure-train transform/v1 {seed} {sample}".encode()).digest()[:16]
    return np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))


def apply(transform: Transform, row: Tokens, seed: int, sample: int, vocab_size: int) -> None:
    """Replace a row by what `transform` makes of it; ST-D14 unless that is a row of tokens as well."""
    found = np.asarray(transform(row.copy(), generator(seed, sample)))
    if found.shape != row.shape or found.dtype.kind not in "iu" or not _within(found, vocab_size):
        raise SecureTrainError(
            "ST-D14",
            "a transform returned something that is no sample",
            where=f"sample {sample}",
            expected=f"{len(row)} integers from 0 to {vocab_size - 1}",
            found=f"{found.dtype}, shape {found.shape}",
            next_step="correct the transform; it gets seq_len + 1 tokens and returns as many",
        )
    row[:] = found


def _within(tokens: Tokens, vocab_size: int) -> bool:
    return not tokens.size or (int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size)
