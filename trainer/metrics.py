"""What a run reports: loss, speed, utilisation, memory, waiting for data.

Owns the numbers' definitions and their two sinks: lines for people on stderr, and `metrics.jsonl` for
programs. Only rank 0 writes.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainer.config import Config

# Dense bfloat16 FLOP/s of one device, without sparsity. A device that is not here has no utilisation: a
# guess would look like a measurement.
PEAK_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
}
# (6 N + 12 L d s) x tokens/s over the peak; attention not discounted for causality, as in PaLM and nanoGPT.
MFU = "mfu_palm"


@dataclass(frozen=True)
class Report:
    """One line of metrics.jsonl. Rates are those of all ranks, over the steps since the previous report."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens: int
    tokens_per_second: float
    tokens_per_second_per_device: float
    mfu: float | None
    data_wait: float  # part of the time in which rank 0 waited for data
    memory: int  # peak bytes: of the device's allocator on a GPU, of the process on a CPU
    seconds: float  # since training began
    seconds_left: float | None  # at this rate; unknown after the first step, which includes compilation

    def as_dict(self) -> dict[str, Any]:
        values = dict(vars(self))
        values[MFU] = values.pop("mfu")
        return values


class Meter:
    """Counts steps, tokens and waiting between reports."""

    def __init__(self, config: Config, world_size: int, device: torch.device) -> None:
        self._world_size = world_size
        self._device = device
        self._flops_per_token = config.model.flops_per_token(config.data.sequence_length)
        self._peak = peak_flops(device)
        self._steps, self._tokens_per_step = config.train.steps, config.tokens_per_step
        self._warm = False
        self._began = self._since = time.monotonic()
        self._waited = 0.0
        self._tokens = 0

    @property
    def silence(self) -> float:
        """Seconds since the last report."""
        return time.monotonic() - self._since

    def count(self, tokens: int, waited: float) -> None:
        """One step: tokens of all ranks, seconds that this rank waited for them."""
        self._tokens += tokens
        self._waited += waited

    def report(self, *, step: int, loss: float, lr: float, grad_norm: float, tokens: int) -> Report:
        now = time.monotonic()
        elapsed = max(now - self._since, 1e-9)
        rate = self._tokens / elapsed
        result = Report(
            step=step,
            loss=loss,
            lr=lr,
            grad_norm=grad_norm,
            tokens=tokens,
            tokens_per_second=rate,
            tokens_per_second_per_device=rate / self._world_size,
            mfu=rate * self._flops_per_token / (self._world_size * self._peak) if self._peak else None,
            data_wait=self._waited / elapsed,
            memory=peak_memory(self._device),
            seconds=now - self._began,
            seconds_left=(self._steps - step) * self._tokens_per_step / rate if self._warm else None,
        )
        self._warm = True
        self.restart(now)
        return result

    def restart(self, now: float | None = None) -> None:
        """Begin a new interval; what lay before it (a save, a validation) is not counted as training."""
        self._since, self._tokens, self._waited = now or time.monotonic(), 0, 0.0


def peak_flops(device: torch.device) -> float | None:
    """The device's peak, or None if it is not known."""
    if device.type != "cuda":
        return None
    model = torch.cuda.get_device_name(device)
    return next(
        (peak for name, peak in PEAK_FLOPS.items() if all(word in model for word in name.split())), None
    )


def peak_memory(device: torch.device) -> int:
    """Bytes; on Linux the process's own maximum is in KiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Sinks:
    """Where reports go. Made on every rank; silent on all but rank 0."""

    def __init__(self, directory: Path, steps: int, *, active: bool) -> None:
        self._steps = steps
        self._file = (directory / "metrics.jsonl").open("a", encoding="utf-8") if active else None

    def report(self, report: Report) -> None:
        self.line(_progress(report, self._steps))
        self.record(report.as_dict())

    def line(self, text: str) -> None:
        """A line for people: plain ASCII on stderr."""
        if self._file is not None:
            print(text, file=sys.stderr, flush=True)

    def record(self, values: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()

    def sync(self) -> None:
        """Put everything reported so far on the disk; done with every checkpoint."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self.sync()
            self._file.close()


def _progress(report: Report, steps: int) -> str:
    parts = [
        f"step {report.step:>{len(str(steps))}}/{steps}",
        f"loss {report.loss:.4f}",
        f"lr {report.lr:.2e}",
        f"grad {report.grad_norm:.2f}",
        f"{_si(report.tokens_per_second)} tok/s",
        f"mfu {report.mfu:.1%}" if report.mfu is not None else "mfu n/a",
        f"{report.memory / 2**20:,.0f} MiB",
        f"data wait {report.data_wait:.1%}",
        f"{report.seconds_left:,.0f} s left" if report.seconds_left is not None else "first step",
    ]
    return "  ".join(parts)


def _si(value: float) -> str:
    for limit, suffix in ((1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.1f}{suffix}"
    return f"{value:.0f}"
