"""How samples lie in a dataset: what a packing reads for them. Which samples there are is order.py's.

A sample is known by one integer, its place, which also stands for it in the transcript: the first token for
`concat`, the number of the row for `rows`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np

from trainer.data.dataset import Dataset
from trainer.data.order import PACKING, ROWS, Concat, Indices
from trainer.data.shards import Tokens


class Packing(Protocol):
    """The samples of one dataset."""

    @property
    def samples(self) -> int:
        """Of one epoch."""
        ...

    def places(self, epochs: Indices, indices: Indices) -> Indices: ...

    def read(self, places: Sequence[int], rows: Sequence[Tokens]) -> Sequence[int]:
        """Fill `rows` (seq_len + 1 tokens each) to their ends; how many labels of each count."""
        ...

    def fetch(self, place: int) -> None:
        """Have what `read` will read here soon, if it is far away."""
        ...

    def ends(self, place: int) -> Tokens:
        """Where documents end within the seq_len tokens of a sample: positions 1..seq_len."""
        ...


class Chunks:
    """Concatenate and chunk: successive stretches of the ring of tokens, whatever documents they cut."""

    name = PACKING

    def __init__(self, dataset: Dataset, seq_len: int, seed: int) -> None:
        self._dataset, self._seq_len = dataset, seq_len
        self._concat = Concat(dataset.digest, dataset.tokens, seq_len, seed)
        self.samples = self._concat.samples

    def places(self, epochs: Indices, indices: Indices) -> Indices:
        return self._concat.first_tokens(epochs, indices)

    def read(self, places: Sequence[int], rows: Sequence[Tokens]) -> Sequence[int]:
        self._dataset.gather(places, rows)
        return [self._seq_len] * len(rows)

    def fetch(self, place: int) -> None:
        self._dataset.fetch(place, self._seq_len + 1)

    def ends(self, place: int) -> Tokens:
        return self._dataset.document_ends(place, self._seq_len)


class Rows:
    """Whole documents, packed into rows when the dataset was prepared: one is cut only if it is longer than
    a row. What a row does not fill is zeros without a loss. A row's last token predicts nothing.
    """

    name = ROWS

    def __init__(self, dataset: Dataset, seq_len: int, seed: int) -> None:
        self._dataset, self._seq_len = dataset, seq_len
        self._ends = list(accumulate(dataset.rows(seq_len)))
        self.samples = self._ends[-1]

    def places(self, epochs: Indices, indices: Indices) -> Indices:
        return indices

    def read(self, places: Sequence[int], rows: Sequence[Tokens]) -> Sequence[int]:
        firsts: list[int] = []
        into: list[Tokens] = []
        predicted = []
        for place, row in zip(places, rows, strict=True):
            filled = 0
            for first, length in zip(*self._pieces(place), strict=True):
                firsts.append(first)
                into.append(row[filled : filled + length])
                filled += length
            row[filled:] = 0
            predicted.append(filled - 1)
        self._dataset.gather(firsts, into)
        return predicted

    def fetch(self, place: int) -> None:
        for first, length in zip(*self._pieces(place), strict=True):
            self._dataset.fetch(first, length)

    def ends(self, place: int) -> Tokens:
        return np.cumsum(self._pieces(place)[1])

    def _pieces(self, place: int) -> tuple[list[int], list[int]]:
        shard = bisect_right(self._ends, place)
        before = self._ends[shard - 1] if shard else 0
        return self._dataset.pieces(shard, place - before, self._seq_len)


PACKINGS: dict[str, type[Chunks] | type[Rows]] = {"concat": Chunks, "rows": Rows}
