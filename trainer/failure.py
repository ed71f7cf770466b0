"""How a rank leaves when something went wrong: one error on stderr, one file for the launcher, at once."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import NoReturn

import torch
from torch._dynamo.exc import TorchDynamoException
from torch._inductor.exc import InductorError

from supplychain.artifact import SecureTrainError, write_durably
from trainer.distributed import peer_failure
from trainer.errors import TrainerError

REPORT = "report"  # folder of a run: outcome.json after a clean end, rank-K.json after a failure
GRACE = 3.0  # seconds that a rank which only lost a peer gives that peer to say why


def explain(error: Exception) -> TrainerError | SecureTrainError | None:
    """The error in the form that a user can act on; None for a bug of ours."""
    if isinstance(error, TrainerError | SecureTrainError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        return TrainerError(
            "ST-T12",
            "the GPU's memory is exhausted",
            found=str(error).splitlines()[0][:300],
            next_step="lower train.micro_batch or train.loss_chunk, or set parallel.activation_checkpoint",
        )
    if isinstance(error, TorchDynamoException | InductorError):
        return TrainerError(
            "ST-T11",
            "a block could not be compiled",
            found=str(error).strip()[:2000],
            next_step="install a C++ compiler, or train with --set compile=false",
        )
    return peer_failure(error)


def leave(error: Exception, run: Path, rank: int) -> NoReturn:
    """Report and end this process. Peers may be inside a collective; only its end tells them."""
    known = explain(error)
    if known is None:
        traceback.print_exception(error)
        known = SecureTrainError("ST-B01", f"{type(error).__name__}: {error}", where=f"rank {rank}")
    print(known, file=sys.stderr, flush=True)
    folder = run / REPORT
    if known.code != "ST-T08" or not _someone_said_why(folder):
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            write_durably(folder / f"rank-{rank}.json", json.dumps(known.as_dict()).encode() + b"\n")
    sys.stdout.flush()
    os._exit(known.exit_code)


def _someone_said_why(folder: Path) -> bool:
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline:
        if any(folder.glob("rank-*.json")):
            return True
        time.sleep(0.1)
    return False
