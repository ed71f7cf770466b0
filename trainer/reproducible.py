"""Switches that make a run repeatable bit by bit on the same machines, and the values that are really in
effect.

Same plan, same number of processes, same kind of processor: same checkpoint. On a CPU that needs fixed thread
counts (the compiler bakes them into its reductions); on a GPU it needs deterministic kernels.
"""

from __future__ import annotations

import os

import torch
import torch._inductor.config as inductor

from trainer.config import Config


def apply(config: Config, local_size: int) -> None:
    """Set everything, before the first kernel runs. `local_size` is the number of processes on this node."""
    threads = config.train.threads or max(1, len(os.sched_getaffinity(0)) // local_size)
    torch.set_num_threads(threads)
    inductor.cpp.threads = threads
    if not config.train.deterministic:
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when the first cuBLAS handle is made
    torch.use_deterministic_algorithms(True)
    # A debugging aid that costs a pass over memory. (The module replaces itself, which hides its types.)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def facts() -> dict[str, str]:
    """What the result's bits depend on, as read back from torch; goes into every checkpoint's state."""
    return {
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "inductor_threads": str(inductor.cpp.threads),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()).lower(),
        "cuda": torch.version.cuda or "none",
        "gpu": torch.cuda.get_device_name() if torch.version.cuda else "none",
    }
