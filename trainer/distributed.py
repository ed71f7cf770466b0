"""A process among its peers: the control plane that all ranks share.

Owns the default process group, which is gloo on every device: it carries verdicts, signals and checkpoint
plans, so that ranks can agree before CUDA is touched and after a GPU has failed. Gradients and weights
travel over the groups of the device mesh (parallelize.py). Promises that ranks either all go on or all
stop.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from trainer.config import Config
from trainer.errors import TrainerError


@dataclass(frozen=True)
class World:
    """This process's place: global and node-local rank and size, and its device."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device

    @property
    def leads(self) -> bool:
        return self.rank == 0


def place() -> tuple[int, int, int, int]:
    """(rank, size, local rank, local size), as torchrun tells them; a process on its own is rank 0 of 1."""
    rank, size, local_rank, local_size = (
        int(os.environ.get(name, default))
        for name, default in (
            ("RANK", "0"),
            ("WORLD_SIZE", "1"),
            ("LOCAL_RANK", "0"),
            ("LOCAL_WORLD_SIZE", "1"),
        )
    )
    return rank, size, local_rank, local_size


def join(config: Config, plan_digest: str) -> World:
    """Meet the peers, compare plans with them, and only then choose the device."""
    rank, size, local_rank, local_size = place()
    timeout = timedelta(seconds=config.train.timeout)
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group("gloo", timeout=timeout)
    else:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timeout)
    _compare(plan_digest)
    if config.device == "cuda":
        if not torch.cuda.is_available() or torch.cuda.device_count() <= local_rank:
            raise TrainerError(
                "ST-T09",
                f"rank {rank} has no CUDA device {local_rank}",
                expected=f"{local_size} GPUs on this node",
                found=f"{torch.cuda.device_count()}",
                next_step="start fewer processes, or plan with `--device cpu`",
            )
        torch.cuda.set_device(local_rank)
    device = torch.device("cuda", local_rank) if config.device == "cuda" else torch.device("cpu")
    return World(rank, size, local_rank, local_size, device)


def _compare(plan_digest: str) -> None:
    mine = torch.tensor(list(bytes.fromhex(plan_digest)), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    for rank, theirs in enumerate(everyone):
        if not torch.equal(theirs, everyone[0]):
            raise TrainerError(
                "ST-T05",
                f"rank {rank} was started with another plan than rank 0",
                expected=f"sha256:{bytes(everyone[0].tolist()).hex()}",
                found=f"sha256:{bytes(theirs.tolist()).hex()}",
                next_step="start all nodes from the same run folder",
            )


def total(value: Tensor) -> float:
    """The sum of one number of each rank. Waits for the device and for all ranks."""
    number = value.detach().to("cpu", torch.float64)
    dist.all_reduce(number)
    return float(number)


@contextmanager
def together(what: str) -> Iterator[None]:
    """Run the body on every rank; when it raises on one, all ranks leave with an error, and none waits for
    ever.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    failed = torch.tensor([dist.get_rank() + 1 if failure else 0])
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if failure is not None:
        raise failure
    if failed.item():
        raise TrainerError(
            "ST-T08", f"rank {int(failed.item()) - 1} failed: {what}", next_step="see that rank's message"
        )


def peer_failure(error: Exception) -> TrainerError | None:
    """The clear form of what torch raises when a peer is gone or silent; None for anything else."""
    text = str(error)
    lost = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed", "NCCL")
    if isinstance(error, dist.DistError) or any(sign in text for sign in lost):
        return TrainerError(
            "ST-T08", "the connection to another rank was lost", found=text.strip().splitlines()[0][:200]
        )
    if "Timed out waiting" in text:
        return TrainerError(
            "ST-T08", "another rank did not answer in time (train.timeout)", found=text.strip()[:200]
        )
    return None


class Control:
    """Stop signals and requests for a progress line, agreed on by all ranks without waiting for each other.

    SIGTERM and SIGINT only note their number, however often they come. Each step starts an all-reduce of
    the notes on a gloo group of its own and reads the one that the previous step started, so a decision is
    one step late, the same on every rank, and costs the step nothing.
    """

    def __init__(self) -> None:
        self._signal = 0
        self._group = dist.new_group(backend="gloo")
        self._notes = torch.zeros(2, dtype=torch.int64)
        self._pending: dist.Work | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number

    def exchange(self, report: bool = False) -> tuple[int, bool]:
        """(signal number or 0, whether a rank wants a report), as of the previous call. Once per step."""
        agreed = self._collect()
        self._notes = torch.tensor([self._signal, int(report)])
        self._pending = dist.all_reduce(self._notes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return agreed

    def now(self) -> int:
        """The signal, agreed on at once; waits for all ranks."""
        self.exchange()
        return self._collect()[0]

    def _collect(self) -> tuple[int, bool]:
        if self._pending is None:
            return 0, False
        self._pending.wait()
        self._pending = None
        number, report = self._notes.tolist()
        return int(number), bool(report)
