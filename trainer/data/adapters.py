"""The loader under other people's loops: torch's DataLoader and torchdata's StatefulDataLoader.

The loader itself needs neither, and a thread hides its reading. These are for programs that are built around
a DataLoader, or transform samples in Python for so long that worker processes pay. An item is one rank's rows
of a global batch, by the number of its first sample, so the order and the shapes are the loader's own.

With workers the sampler runs ahead of training. torchdata keeps the sampler's state as it was at the last
batch that came out; torch's DataLoader keeps none, so `TorchLoader` counts what came out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from trainer.data.batch import Batch
from trainer.data.loader import Loader

Item = dict[str, Tensor]


class Batches(Dataset[Item]):
    """Map-style: the batch of this rank that begins at a sample of the global order."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getitem__(self, first: int) -> Item:
        return as_tensors(self._loader.read(first))


class Steps(Sampler[int]):
    """The first sample of each batch, from where its state says. Stateful: torchdata saves and loads it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._cursor = loader.cursor()
        self._cursor.load_state_dict(loader.state_dict())

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        first = self._cursor.consumed
        size = self._loader.size_at(first)
        if size <= 0:
            raise StopIteration
        self._cursor.advance(size)
        return first

    def state_dict(self) -> dict[str, str]:
        return self._cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        self._cursor.load_state_dict(state)


class TorchLoader:
    """Batches through torch's DataLoader; `options` are its own (num_workers, pin_memory, ...). Its state is
    the loader's, and counts what was handed out here.
    """

    def __init__(self, loader: Loader, **options: Any) -> None:
        self._loader = loader
        self._cursor = loader.cursor()
        self._cursor.load_state_dict(loader.state_dict())
        self._options = options
        self._items: Iterator[Item] | None = None

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        if self._items is None:
            steps = Steps(self._loader)
            steps.load_state_dict(self._cursor.state_dict())
            self._items = iter(
                DataLoader(Batches(self._loader), sampler=steps, batch_size=None, **self._options)
            )
        item = next(self._items)
        self._cursor.advance(int(item["size"]))
        return item

    def state_dict(self) -> dict[str, str]:
        return self._cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Also in the middle of an iteration."""
        self._cursor.load_state_dict(state)
        self._items = None


def as_tensors(batch: Batch) -> Item:
    """inputs and labels (rows x seq_len), first and size of the global batch, and document boundaries if
    the loader was asked for them."""
    item = {
        "inputs": torch.from_numpy(batch.inputs).contiguous(),
        "labels": torch.from_numpy(batch.labels).contiguous(),
        "first": torch.tensor(batch.first),
        "size": torch.tensor(batch.size),
    }
    if batch.ends is not None:
        item["cu_seqlens"] = torch.from_numpy(batch.cu_seqlens)
        item["position_ids"] = torch.from_numpy(batch.position_ids)
    return item
