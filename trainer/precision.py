"""Number formats: what the forward and backward passes compute in, and what gradients are summed in.

Master weights and optimizer state stay float32; FSDP casts a block's weights as it gathers them.
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from trainer.config import PrecisionConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def policy(precision: PrecisionConfig) -> MixedPrecisionPolicy:
    """FSDP's policy. Inputs are not cast: activations already have the compute type, and the rotary tables
    that every block receives must stay float32.
    """
    return MixedPrecisionPolicy(
        param_dtype=DTYPES[precision.compute],
        reduce_dtype=DTYPES[precision.reduce],
        cast_forward_inputs=False,
    )
