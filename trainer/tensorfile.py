"""Safetensors files: written repeatably, read strictly and in parts.

Owns the writer and the parser of the header. What is parsed is foreign data: names are unique, ranges lie
inside the file, neither overlap nor leave gaps, and fit their shapes; sharded files say where each piece
lies in the whole tensor. Torch-free.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from supplychain.artifact import SecureTrainError, parse_json
from trainer.errors import TrainerError

HEADER_LIMIT = 100_000_000  # bytes, the limit of the format
RANK_LIMIT = 8  # dimensions
SHARDING = "DCP_SHARDING_INFO"  # where torch.distributed.checkpoint notes the offsets of sharded tensors

# Bytes per value of the types that a checkpoint of ours, or a Llama of anyone's, may hold.
DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1}


Refuse = Callable[[str], NoReturn]


class Readable(Protocol):
    """What is needed of a `supplychain.artifact.VerifiedFile`."""

    @property
    def path(self) -> str: ...
    @property
    def size(self) -> int: ...
    def read(self, offset: int, length: int) -> memoryview: ...


@dataclass(frozen=True)
class Piece:
    """A tensor, or a rectangular part of one, that a file holds from byte `start` to `end`, row-major.

    `offsets` is where the part begins in the whole tensor, one number per dimension.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    start: int
    end: int


def read_header(file: Readable) -> list[Piece]:
    """All pieces of a file. ST-C01 for anything that an honest writer would not write."""

    def refuse(reason: str) -> NoReturn:
        raise TrainerError(
            "ST-C01",
            f"the tensor file is malformed: {reason}",
            where=file.path,
            next_step="do not use this checkpoint; restore it from where it was published",
        )

    if file.size < 8:
        refuse(f"it has {file.size} bytes")
    length = int.from_bytes(file.read(0, 8), "little")
    if length > min(HEADER_LIMIT, file.size - 8):
        refuse(f"its header claims {length} bytes of a file of {file.size}")
    header = _parse(bytes(file.read(8, length)), refuse)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        refuse("__metadata__ is not a table of texts")
    sharding = _parse(metadata[SHARDING].encode(), refuse) if SHARDING in metadata else None
    if sharding is not None and sharding.keys() != header.keys():
        refuse(f"{SHARDING} and the header name different tensors")
    base = 8 + length
    pieces = [_piece(name, entry, sharding, base, refuse) for name, entry in header.items()]
    position = base
    for piece in sorted(pieces, key=lambda piece: (piece.start, piece.end)):
        if piece.start != position:
            refuse(f"{piece.name!r:.100} begins at byte {piece.start}, where byte {position} was due")
        position = piece.end
    if position != file.size:
        refuse(f"its tensors end at byte {position} of {file.size}")
    return pieces


def _parse(data: bytes, refuse: Refuse) -> dict[str, Any]:
    try:
        document = parse_json(data, what="the header", code="ST-A02", limit=HEADER_LIMIT)
    except SecureTrainError as error:
        refuse(error.what)
    if not isinstance(document, dict):
        refuse("its header is no table")
    return dict(document)


def _piece(name: str, entry: Any, sharding: Mapping[str, Any] | None, base: int, refuse: Refuse) -> Piece:
    label = f"{name!r:.100}"
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        refuse(f"the entry of {label} has other keys than dtype, shape, data_offsets")
    dtype, shape, span = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        refuse(f"{label} has the type {dtype!r:.40}")
    if not _counts(shape) or len(shape) > RANK_LIMIT:
        refuse(f"{label} has the shape {shape!r:.80}")
    if not _counts(span) or len(span) != 2 or span[0] > span[1]:
        refuse(f"{label} has the data offsets {span!r:.80}")
    if span[1] - span[0] != math.prod(shape) * DTYPES[dtype]:
        refuse(f"{label} of shape {shape} has {span[1] - span[0]} bytes")
    offsets = [0] * len(shape)
    if sharding is not None:
        info = sharding[name]
        if not isinstance(info, dict) or info.keys() != {"saved_offsets"}:
            refuse(f"the sharding of {label} is not its offsets")
        offsets = info["saved_offsets"]
        if not _counts(offsets) or len(offsets) != len(shape):
            refuse(f"{label} of shape {shape} lies at {offsets!r:.80}")
    return Piece(name, dtype, tuple(shape), tuple(offsets), base + span[0], base + span[1])


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def header(pieces: Sequence[Piece]) -> bytes:
    """The header, with its length before it, of a file that holds these pieces one after another (only
    their order and sizes count, not `start` and `end`). The same pieces give the same bytes, which the
    library's own writer does not promise.
    """
    entries: dict[str, Any] = {
        "__metadata__": {
            SHARDING: json.dumps({piece.name: {"saved_offsets": list(piece.offsets)} for piece in pieces}),
            "DCP_VERSION": "1.0",
            "format": "pt",
        }
    }
    position = 0
    for piece in pieces:
        span = [position, position := position + piece.end - piece.start]
        entries[piece.name] = {"dtype": piece.dtype, "shape": list(piece.shape), "data_offsets": span}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text


def whole_shape(pieces: list[Piece]) -> tuple[int, ...] | None:
    """The shape of the tensor that these pieces make up; None if they overlap, leave a hole or differ in
    type.
    """
    first = pieces[0]
    if any(piece.dtype != first.dtype or len(piece.shape) != len(first.shape) for piece in pieces):
        return None
    shape = tuple(
        max(piece.offsets[axis] + piece.shape[axis] for piece in pieces) for axis in range(len(first.shape))
    )
    filled = [piece for piece in pieces if math.prod(piece.shape)]
    if sum(math.prod(piece.shape) for piece in filled) != math.prod(shape):
        return None
    # Equal volume and no overlap: nothing is missing. Sorted by offset, only neighbours along the first
    # axis can touch.
    filled.sort(key=lambda piece: piece.offsets)
    for index, piece in enumerate(filled):
        for other in filled[index + 1 :]:
            if shape and other.offsets[0] >= piece.offsets[0] + piece.shape[0]:
                break
            if all(
                o < p + length and p < o + size
                for p, length, o, size in zip(
                    piece.offsets, piece.shape, other.offsets, other.shape, strict=True
                )
            ):
                return None
    return shape
