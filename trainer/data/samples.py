"""The samples of a run: its datasets, its order and its packing joined. Which sample is number g, where it
lies, and what it reads. No state, no threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from supplychain.artifact import SecureTrainError
from trainer.data import transform as transforms
from trainer.data.dataset import Dataset
from trainer.data.order import Indices, Order, Source, Stage, Window
from trainer.data.packing import PACKINGS
from trainer.data.shards import Tokens
from trainer.data.transform import Transform

SPAN = 1024  # samples that are located, and chained in the transcript, at one time


@dataclass(frozen=True)
class Rows:
    """Successive samples, as a batch holds them."""

    tokens: Tokens  # rows x (seq_len + 1); rows after the samples are zeros
    predicted: Tokens  # of each row: how many of its labels count
    ends: tuple[Tokens, ...] | None


class Samples:
    """Every sample of a run, by its number g. Thread-safe."""

    def __init__(
        self,
        datasets: Sequence[Dataset],
        *,
        seq_len: int,
        seed: int,
        stages: Sequence[Stage] | None = None,
        packing: str = "concat",
        window: Window | None = None,
        transform: Transform | None = None,
        boundaries: bool = False,
        spans: int = 16,
    ) -> None:
        """`stages` name datasets by digest; without them each dataset counts by its size. `spans` are kept
        located."""
        if packing not in PACKINGS:
            raise SecureTrainError(
                "ST-D08", "there is no such packing", expected=", ".join(PACKINGS), found=packing
            )
        check_alike(datasets)
        kind = PACKINGS[packing]
        packings = {dataset.digest: kind(dataset, seq_len, seed) for dataset in datasets}
        for dataset in datasets:
            check_size(dataset, packings[dataset.digest].samples, seq_len)
        sources = [Source(dataset.digest, packings[dataset.digest].samples) for dataset in datasets]
        stages = stages or [Stage(0, {source.digest: source.samples for source in sources})]
        self.order = Order(seed, sources, stages, window)
        self.packing = kind.name
        self.seq_len = seq_len
        if window is None and any(dataset.is_remote for dataset in datasets):
            raise SecureTrainError(
                "ST-D08",
                "a remote dataset shuffled everywhere would fetch a chunk for each sample",
                expected="a window of the shuffle",
                found="none",
                next_step="shuffle within a window, or copy the dataset to a local disk",
            )
        by_digest = {dataset.digest: dataset for dataset in datasets}
        self.datasets = [by_digest[source.digest] for source in self.order.sources]
        self._packings = [packings[source.digest] for source in self.order.sources]
        self._transform, self._boundaries = transform, boundaries
        self._vocab_size = min(dataset.vocab_size for dataset in datasets)
        self.span = lru_cache(maxsize=spans)(self._locate_span)

    @property
    def digests(self) -> list[str]:
        return [source.digest for source in self.order.sources]

    def located(self, first: int, count: int) -> tuple[Indices, Indices]:
        """Source and place (see packing.py) of the samples first .. first+count-1."""
        parts = []
        for number in range(first // SPAN, -(-(first + count) // SPAN)):
            part = slice(max(first - number * SPAN, 0), min(first + count - number * SPAN, SPAN))
            sources, places = self.span(number)
            parts.append((sources[part], places[part]))
        empty = np.empty(0, np.int64)
        return (
            np.concatenate([empty, *(sources for sources, _ in parts)]),
            np.concatenate([empty, *(places for _, places in parts)]),
        )

    def _locate_span(self, number: int) -> tuple[Indices, Indices]:
        located = self.order.locate(number * SPAN, SPAN)
        places = np.empty(SPAN, np.int64)
        for source in np.unique(located.source):
            mine = located.source == source
            places[mine] = self._packings[source].places(located.epoch[mine], located.index[mine])
        return located.source, places

    def read(self, first: int, count: int, rows: int) -> Rows:
        """The samples first .. first+count-1, in the first of `rows` rows."""
        tokens = np.empty((rows, self.seq_len + 1), np.int64)
        tokens[count:] = 0
        predicted = np.zeros(rows, np.int64)
        ends = [np.empty(0, np.int64)] * rows if self._boundaries else []
        sources, places = self.located(first, count)
        for source in set(sources.tolist()):
            mine = np.flatnonzero(sources == source).tolist()
            packing, at = self._packings[source], places[mine].tolist()
            predicted[mine] = packing.read(at, [tokens[row] for row in mine])
            if self._boundaries:
                for row, place in zip(mine, at, strict=True):
                    ends[row] = packing.ends(place)
        if count and int(tokens.max()) >= self._vocab_size:
            for row, source in enumerate(sources.tolist()):
                self.datasets[source].check(tokens[row])
        if self._transform:
            for row in range(count):
                seed, sample = self.order.seed, first + row
                transforms.apply(self._transform, tokens[row], seed, sample, self._vocab_size)
        return Rows(tokens, predicted, tuple(ends) if self._boundaries else None)

    @property
    def is_remote(self) -> bool:
        return any(dataset.is_remote for dataset in self.datasets)

    def fetch(self, first: int, count: int) -> None:
        """Have these samples here soon, those that are far away."""
        sources, places = self.located(first, count)
        for source, place in zip(sources.tolist(), places.tolist(), strict=True):
            self._packings[source].fetch(place)


def check_alike(datasets: Sequence[Dataset]) -> None:
    for dataset in datasets:
        if dataset.description.tokenizer != datasets[0].description.tokenizer:
            raise SecureTrainError(
                "ST-D09",
                "two datasets were made with different tokenizers",
                where=str(dataset.root),
                expected=f"{datasets[0].description.tokenizer} (as {datasets[0].root})",
                found=str(dataset.description.tokenizer),
                next_step="prepare one of them again with the tokenizer of the other",
            )


def check_size(dataset: Dataset, samples: int, seq_len: int) -> None:
    if samples < 1:
        raise SecureTrainError(
            "ST-D09",
            f"the split {dataset.split!r} is too small for one sample",
            where=str(dataset.root),
            expected=f"more than {seq_len} tokens",
            found=str(dataset.tokens),
            next_step="use a shorter sequence length or more data",
        )
