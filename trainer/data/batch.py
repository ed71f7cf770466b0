"""A batch: one rank's rows of a global batch, and the views of it that a model asks for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trainer.data.shards import Tokens

IGNORED = -100  # the label that a loss leaves out: cross_entropy's default


@dataclass(frozen=True)
class Batch:
    """One rank's rows of a global batch. All ranks have the same number of rows at every step; where samples
    run out, or do not divide evenly, the last rows are padding without a loss.
    """

    first: int  # number of the global batch's first sample
    size: int  # samples of the global batch, over all ranks
    real: int  # rows of this rank that hold samples; the others are padding
    tokens: Tokens  # rows x (seq_len + 1)
    predicted: Tokens  # of each row: how many of its labels count, from the left
    ends: tuple[Tokens, ...] | None = None  # of each row, if asked for: where documents end in its seq_len

    @property
    def inputs(self) -> Tokens:
        """rows x seq_len"""
        return self.tokens[:, :-1]

    @property
    def labels(self) -> Tokens:
        """rows x seq_len: the token after each input, IGNORED in padding."""
        labels = self.tokens[:, 1:]
        if self.predicted.size and int(self.predicted.min()) < labels.shape[1]:
            labels = labels.copy()
            labels[np.arange(labels.shape[1]) >= self.predicted[:, None]] = IGNORED
        return labels

    @property
    def labels_in_documents(self) -> Tokens:
        """As `labels`, and IGNORED where a document's last token would predict the next one's first."""
        labels = self.labels.copy()
        for row, ends in zip(labels, self._ends(), strict=True):
            row[ends - 1] = IGNORED
        return labels

    @property
    def cu_seqlens(self) -> npt.NDArray[np.int32]:
        """Where documents begin in the rows laid end to end, and the end: what variable-length attention
        takes. A row always ends one; padding is one of its own.
        """
        length = self.inputs.shape[1]
        starts = [np.append(ends[ends < length], length) + r * length for r, ends in enumerate(self._ends())]
        return np.concatenate([[0], *starts]).astype(np.int32)

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest document in it."""
        return int(np.diff(self.cu_seqlens).max())

    @property
    def document_ids(self) -> Tokens:
        """rows x seq_len: the number of each token's document in its row, from 0. Attention stays within
        equal numbers."""
        ids = np.zeros(self.inputs.shape, np.int64)
        for row, ends in zip(ids, self._ends(), strict=True):
            row[ends[ends < len(row)]] = 1
        return np.cumsum(ids, axis=1)

    @property
    def position_ids(self) -> Tokens:
        """rows x seq_len: each token's place in its document (or in the part of it that is in the row)."""
        length = self.inputs.shape[1]
        begins = np.zeros(self.inputs.shape, np.int64)
        for row, ends in zip(begins, self._ends(), strict=True):
            inside = ends[ends < length]
            row[inside] = inside
        positions: Tokens = np.arange(length) - np.maximum.accumulate(begins, axis=1)
        return positions

    def _ends(self) -> tuple[Tokens, ...]:
        if self.ends is None:
            raise ValueError("the loader was not asked for boundaries")  # a bug of the caller's
        return self.ends
