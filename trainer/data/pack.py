"""Best-fit packing: documents into rows of one length, so that none is cut but those longer than a row.

Done once, when a dataset is prepared: either beside the shards, as pieces that a row gathers, or by laying
the shards out in rows. Deterministic, and one window of documents at a time, so that memory is bounded and a
row's documents lie near each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.data.shards import END, Description, Packed, Tokens, write_description, write_pieces

WINDOW = 16384  # documents that are packed together: leaves about 0.02 % of the rows empty

Piece = tuple[int, int, int]  # document, first token in it, tokens


def best_fit(lengths: list[int], seq_len: int) -> list[list[Piece]]:
    """Rows for documents of these lengths. The longest first, each into the fullest row that takes it."""
    rows: list[list[Piece]] = []
    rest: list[Piece] = []
    for document, length in enumerate(lengths):
        whole = length - length % seq_len
        rows += [[(document, first, seq_len)] for first in range(0, whole, seq_len)]
        if whole < length:
            rest.append((document, whole, length - whole))
    rest.sort(key=lambda piece: -piece[2])
    waiting: dict[int, list[int]] = {}  # the rows with so much room left
    rooms = 0  # bit n is set if there is a row with room for n
    for piece in rest:
        length = piece[2]
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = waiting[room].pop()
            if not waiting[room]:
                rooms ^= 1 << room
            rows[row].append(piece)
        else:
            room, row = seq_len, len(rows)
            rows.append([piece])
        room -= length
        if room:
            waiting.setdefault(room, []).append(row)
            rooms |= 1 << room
    return rows


def pack(ends: npt.NDArray[np.uint64] | Tokens, seq_len: int) -> Tokens:
    """Rows for a shard whose documents end there: n x 3 of (row, first token, tokens), by row."""
    found: list[tuple[int, int, int]] = []
    count = 0
    for starts, lengths in windows(ends):
        for row in best_fit(lengths, seq_len):
            found += [(count, starts[document] + first, length) for document, first, length in row]
            count += 1
    return np.array(found, np.int64).reshape(-1, 3)


def pack_folder(folder: Path, description: Description, seq_len: int) -> Description:
    """Pack every shard of a dataset that was just written there, beside its tokens."""
    rows = []
    for shard in description.shards:
        pieces = pack(np.fromfile(folder / shard.idx, END), seq_len)
        write_pieces(folder, shard, seq_len, pieces)
        rows.append(int(pieces[-1, 0]) + 1)
    description = replace(description, packings=(Packed(seq_len, tuple(rows)),))
    write_description(folder, description)
    return description


def windows(ends: npt.NDArray[np.uint64] | Tokens) -> Iterator[tuple[list[int], list[int]]]:
    """(starts, lengths) of successive documents, WINDOW at a time."""
    for begin in range(0, len(ends), WINDOW):
        after = ends[begin : begin + WINDOW].astype(np.int64)
        before = np.concatenate([[int(ends[begin - 1]) if begin else 0], after[:-1]])
        yield before.tolist(), (after - before).tolist()
