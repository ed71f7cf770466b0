"""Safetensors headers are foreign bytes: whatever an honest writer would not write is refused."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from trainer.errors import TrainerError
from trainer.tensorfile import SHARDING, Piece, read_header, whole_shape


@dataclass
class Bytes:
    """A file in memory."""

    data: bytes
    path: str = "model/x.safetensors"

    @property
    def size(self) -> int:
        return len(self.data)

    def read(self, offset: int, length: int) -> memoryview:
        assert 0 <= offset <= offset + length <= self.size
        return memoryview(self.data)[offset : offset + length]


def raw(header: bytes, payload: int) -> Bytes:
    return Bytes(len(header).to_bytes(8, "little") + header + bytes(payload))


def file(header: Any, payload: int = 8) -> Bytes:
    return raw(json.dumps(header).encode(), payload)


def tensor(start: int = 0, end: int = 8, shape: Any = (2,), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_what_the_library_writes_is_read() -> None:
    tensors = {
        "a": torch.arange(6.0).view(2, 3),
        "b": torch.zeros((), dtype=torch.bfloat16),
        "c": torch.zeros(0, 4),
    }
    found = {piece.name: piece for piece in read_header(Bytes(save(tensors, {"format": "pt"})))}
    assert {name: piece.shape for name, piece in found.items()} == {"a": (2, 3), "b": (), "c": (0, 4)}


HOSTILE = {
    "empty": Bytes(b""),
    "only a length": Bytes((5).to_bytes(8, "little")),
    "length past the end": Bytes((2**63).to_bytes(8, "little") + b"{}"),
    "not json": raw(b"{", 0),
    "not utf-8": raw(b'{"\xff": 1}', 0),
    "a list": raw(b"[]", 0),
    "deep": raw(b"[" * 100_000, 0),
    "duplicate name": raw(
        b'{"a":' + json.dumps(tensor()).encode() + b',"a":' + json.dumps(tensor()).encode() + b"}", 8
    ),
    "extra key": file({"a": {**tensor(), "x": 1}}),
    "missing key": file({"a": {"dtype": "F32", "shape": [2]}}),
    "entry is no table": file({"a": 3}),
    "unknown type": file({"a": tensor(dtype="F8")}),
    "type is no text": file({"a": tensor(dtype=["F32"])}),
    "negative dimension": file({"a": tensor(shape=[-2])}),
    "boolean dimension": file({"a": tensor(shape=[True, 2])}),
    "float dimension": raw(b'{"a":{"dtype":"F32","shape":[2.0],"data_offsets":[0,8]}}', 8),
    "too many dimensions": file({"a": tensor(shape=[2] + [1] * 20)}),
    "huge dimension": file({"a": tensor(shape=[2**60, 0], end=0)}, 0),
    "shape and bytes differ": file({"a": tensor(shape=[3])}),
    "begins after its end": file({"a": tensor(start=8, end=0)}),
    "out of the file": file({"a": tensor(end=16, shape=[4])}),
    "overlap": file({"a": tensor(), "b": tensor(4, 12)}, 12),
    "gap": file({"a": tensor(), "b": tensor(12, 20)}, 20),
    "bytes at the end": file({"a": tensor()}, 9),
    "bytes at the start": file({"a": tensor(4, 12)}, 12),
    "metadata is no table": file({"__metadata__": [], "a": tensor()}),
    "metadata of numbers": file({"__metadata__": {"a": 1}, "a": tensor()}),
    "sharding is no json": file({"__metadata__": {SHARDING: "{"}, "a": tensor()}),
    "sharding of others": file({"__metadata__": {SHARDING: "{}"}, "a": tensor()}),
    "sharding without offsets": file({"__metadata__": {SHARDING: '{"a":{}}'}, "a": tensor()}),
    "sharding of another rank": file(
        {"__metadata__": {SHARDING: '{"a":{"saved_offsets":[0,0]}}'}, "a": tensor()}
    ),
    "negative offset": file({"__metadata__": {SHARDING: '{"a":{"saved_offsets":[-1]}}'}, "a": tensor()}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused(name: str) -> None:
    with pytest.raises(TrainerError) as caught:
        read_header(HOSTILE[name])
    assert caught.value.code == "ST-C01"
    assert caught.value.where == "model/x.safetensors"


@given(st.data())
def test_no_bytes_do_anything_else(data: st.DataObject) -> None:
    """A mutated real file is read or refused; nothing else ever leaves the parser."""
    real = bytearray(
        save(
            {"a": torch.zeros(2, 3), "b": torch.zeros(4)},
            {SHARDING: '{"a":{"saved_offsets":[0,0]},"b":{"saved_offsets":[0]}}'},
        )
    )
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(real) - 1))
        real[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(real)))
    for blob in (bytes(real), bytes(real[:cut])):
        with contextlib.suppress(TrainerError):
            read_header(Bytes(blob))


def piece(offsets: tuple[int, ...], shape: tuple[int, ...], dtype: str = "F32") -> Piece:
    return Piece("a", dtype, shape, offsets, 0, 0)


@pytest.mark.parametrize(
    ("pieces", "shape"),
    [
        ([piece((0, 0), (2, 3))], (2, 3)),
        ([piece((0, 0), (2, 3)), piece((2, 0), (1, 3))], (3, 3)),
        ([piece((0, 0), (2, 2)), piece((0, 2), (2, 1))], (2, 3)),
        ([piece((0, 0), (2, 3)), piece((2, 0), (0, 3))], (2, 3)),
        ([piece((), ())], ()),
        ([piece((1, 0), (2, 3))], None),
        ([piece((0, 0), (2, 3)), piece((1, 0), (2, 3))], None),
        ([piece((0, 0), (2, 3)), piece((0, 0), (2, 3))], None),
        ([piece((0, 0), (1, 2)), piece((1, 1), (1, 2))], None),
        ([piece((0, 0), (2, 2)), piece((1, 1), (2, 1)), piece((2, 0), (1, 1))], None),
        ([piece((0,), (2,)), piece((2,), (2,), "BF16")], None),
        ([piece((0,), (2,)), piece((2, 0), (2, 1))], None),
        ([piece((), ()), piece((), ())], None),
    ],
)
def test_shards_must_make_up_one_tensor(pieces: list[Piece], shape: tuple[int, ...] | None) -> None:
    assert whole_shape(pieces) == shape
