"""The second half of a preparation, where one is asked for: documents that lie tokenized in a staging folder
are written to their shards in a shuffled order, or laid out in rows, or both.

A pure function of the staged documents, the seed and the parameters. Memory does not grow with the dataset:
the staged files are mapped, and documents go through in windows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.data.order import Indices, permute
from trainer.data.pack import WINDOW, best_fit
from trainer.data.shards import END, Tokens, Writer

ROWS = 256  # rows of one write


class Staged:
    """The documents of one split, where the writer of the staging folder put them."""

    def __init__(self, folder: Path, split: str, shards: list[list[int]], dtype: np.dtype[Any]) -> None:
        """`shards` are [tokens, documents] of each, as `Writer.flush` gives them."""
        paths = [folder / f"{split}-{number:05d}" for number in range(len(shards))]
        self._tokens = [np.memmap(f"{path}.bin", dtype, "r") for path in paths]
        self._ends = [np.memmap(f"{path}.idx", END, "r") for path in paths]
        self._after = list(accumulate(documents for _, documents in shards))
        self.documents = self._after[-1]

    def document(self, number: int) -> npt.NDArray[Any]:
        shard = bisect_right(self._after, number)
        place = number - (self._after[shard - 1] if shard else 0)
        ends = self._ends[shard]
        return self._tokens[shard][int(ends[place - 1]) if place else 0 : int(ends[place])]

    def windows(self, order_of: Shuffle | None) -> Iterator[list[npt.NDArray[Any]]]:
        for first in range(0, self.documents, WINDOW):
            numbers: Indices = np.arange(first, min(first + WINDOW, self.documents))
            if order_of:
                numbers = order_of(numbers, self.documents)
            yield [self.document(number) for number in numbers.tolist()]


class Shuffle:
    """The order of a split's documents under a seed."""

    def __init__(self, seed: int, split: str) -> None:
        self._seed, self._split = seed, split

    def __call__(self, positions: Indices, n: int) -> Indices:
        return permute(positions, n, self._seed, self._split, 0, "documents")


def write_documents(staged: Staged, split: str, writer: Writer, shuffle: Shuffle | None) -> None:
    for documents in staged.windows(shuffle):
        writer.add(split, np.concatenate(documents), np.array([len(document) for document in documents]))


def write_rows(
    staged: Staged, split: str, writer: Writer, shuffle: Shuffle | None, *, seq_len: int, seed: int, end: int
) -> None:
    """Best-fit rows, window by window, in a shuffled order within each: packing sorts by length. What a row
    does not fill is `end` tokens, as a document that is not used.
    """
    for number, documents in enumerate(staged.windows(shuffle)):
        rows = best_fit([len(document) for document in documents], seq_len)
        order = permute(np.arange(len(rows)), len(rows), seed, split, number, "rows").tolist()
        for first in range(0, len(rows), ROWS):
            _write_rows(
                [rows[row] for row in order[first : first + ROWS]], documents, split, writer, seq_len, end
            )


def _write_rows(
    rows: list[list[tuple[int, int, int]]],
    documents: list[npt.NDArray[Any]],
    split: str,
    writer: Writer,
    seq_len: int,
    end: int,
) -> None:
    tokens = np.full((len(rows), seq_len), end, writer.dtype)
    lengths: list[int] = []
    used: list[bool] = []
    for row, pieces in zip(tokens, rows, strict=True):
        filled = 0
        for document, first, length in pieces:
            row[filled : filled + length] = documents[document][first : first + length]
            filled += length
            lengths.append(length)
            used.append(True)
        if filled < seq_len:
            lengths.append(seq_len - filled)
            used.append(False)
    counts: Tokens = np.array(lengths)
    writer.add(split, tokens.ravel(), counts, np.array(used))
