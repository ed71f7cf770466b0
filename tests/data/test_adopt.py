"""Datasets of other trainers, adopted in place or converted; and what `describe` says of a dataset."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from supplychain.artifact import SecureTrainError
from tests.data.support import refusal, sign, take
from trainer.data import Dataset, Loader
from trainer.data.adopt import Request, adopt, main
from trainer.data.describe import describe, histogram
from trainer.data.shards import Tokens
from trainer.data.tokenization import train

END = 0
LENGTHS = [5, 1, 30, 16, 7] * 20


def stream(dtype: str = "<u2", tail: int = 0) -> Tokens:
    """Documents of LENGTHS, each ended by END; then a document that is not ended."""
    tokens = np.arange(1, sum(LENGTHS) + tail + 1) % 900 + 1
    tokens[np.cumsum(LENGTHS) - 1] = END
    return tokens.astype(dtype)


def megatron(folder: Path, dtype: str = "<u2", code: int = 8, name: str = "corpus_text_document") -> None:
    tokens = stream(dtype)
    tokens.tofile(folder / f"{name}.bin")
    lengths = np.array(LENGTHS, "<i4")
    places = ((np.cumsum(LENGTHS) - LENGTHS) * tokens.itemsize).astype("<i8")
    documents = np.arange(len(LENGTHS) + 1, dtype="<i8")
    header = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, code, len(lengths), len(documents))
    index = header + lengths.tobytes() + places.tobytes() + documents.tobytes()
    (folder / f"{name}.idx").write_bytes(index)


def nanogpt(folder: Path) -> None:
    stream().tofile(folder / "train.bin")
    stream(tail=9).tofile(folder / "val.bin")


def llm_c(folder: Path) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, sum(LENGTHS)
    (folder / "fineweb_train_000001.bin").write_bytes(header.tobytes() + stream().tobytes())


def olmo(folder: Path) -> None:
    (folder / "part-0").mkdir()
    stream("<u4").tofile(folder / "part-0" / "00000.npy")


def numpy_array(folder: Path) -> None:
    np.save(folder / "tokens.npy", stream("<u4"))


FORMS: dict[str, tuple[Callable[[Path], object], dict[str, Any]]] = {
    "megatron": (megatron, {}),
    "megatron, four bytes": (lambda folder: megatron(folder, "<i4", 4), {}),
    "tokens": (nanogpt, {"end_id": END}),
    "llm.c": (llm_c, {"end_id": END}),
    "olmo": (olmo, {"end_id": END, "dtype": "uint32"}),
    "numpy": (numpy_array, {"end_id": END}),
}


@pytest.mark.parametrize("converted", [False, True], ids=["in place", "converted"])
@pytest.mark.parametrize(("make", "options"), FORMS.values(), ids=FORMS.keys())
def test_what_was_adopted_is_read_as_it_was(
    tmp_path: Path, make: Callable[[Path], object], options: dict[str, Any], converted: bool
) -> None:
    folder, out = tmp_path / "theirs", tmp_path / "ours"
    folder.mkdir()
    make(folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    counts = adopt(Request(folder, out if converted else None, vocab_size=1000, **options))
    assert {path: path.read_bytes() for path in before} == before
    assert counts["tokenizer"] is None
    root = out if converted else folder
    with Dataset.open(root, sign(root)) as data:
        assert np.array_equal(data.read(0, data.tokens), stream("<i8"))
        ends = data.document_ends(0, data.tokens)
        assert np.array_equal(ends, np.cumsum(LENGTHS))
        batches = take(Loader([data], seq_len=16, global_batch=4, seed=1, boundaries=True), 3)
        assert all(batch.cu_seqlens[-1] == 64 for batch in batches)


def test_a_validation_file_is_a_split(tmp_path: Path) -> None:
    nanogpt(tmp_path)
    adopt(Request(tmp_path, vocab_size=1000, end_id=END))
    digest = sign(tmp_path)
    with Dataset.open(tmp_path, digest, split="validation") as data:
        assert data.tokens == sum(LENGTHS) + 9
        assert data.document_ends(0, data.tokens)[-2:].tolist() == [sum(LENGTHS), sum(LENGTHS) + 9]


def test_a_flipped_bit_of_an_adopted_file_is_caught(tmp_path: Path) -> None:
    llm_c(tmp_path)
    adopt(Request(tmp_path, vocab_size=1000))
    digest = sign(tmp_path)
    file = tmp_path / "fineweb_train_000001.bin"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with Dataset.open(tmp_path, digest) as dataset:
        refusal("ST-A03", lambda: dataset.read(0, 10))


def test_an_adopted_file_that_became_shorter_is_refused(tmp_path: Path) -> None:
    """Signed afterwards, so that only the description can tell."""
    nanogpt(tmp_path)
    adopt(Request(tmp_path, vocab_size=1000))
    data = (tmp_path / "train.bin").read_bytes()
    (tmp_path / "train.bin").write_bytes(data[:-2])
    refusal("ST-D06", lambda: Dataset.open(tmp_path, sign(tmp_path)))


def test_a_tokenizer_is_bound(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(train(["hello world"] * 9, 300))
    folder = tmp_path / "theirs"
    folder.mkdir()
    (np.arange(200) % 250).astype("<u2").tofile(folder / "train.bin")
    counts = adopt(Request(folder, tokenizer=path, dtype="uint16"))
    assert counts["documents"] == 2  # the token that is 0 ends the first
    assert (folder / "tokenizer.json").read_bytes() == path.read_bytes()
    found = describe(folder, sign(folder))
    assert found["tokenizer"] == counts["tokenizer"]


def spoil(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    def spoiled(folder: Path) -> None:
        megatron(folder, name="x")
        path = folder / name
        path.write_bytes(change(path.read_bytes()))

    return spoiled


def both(*makers: Callable[[Path], object]) -> Callable[[Path], object]:
    return lambda folder: [make(folder) for make in makers]


REFUSED: dict[str, tuple[str, Callable[[Path], object], dict[str, Any]]] = {
    "nothing": ("ST-D16", lambda folder: None, {}),
    "no vocabulary": ("ST-D16", nanogpt, {"vocab_size": None, "dtype": "uint16"}),
    "too small a vocabulary": ("ST-D11", nanogpt, {"vocab_size": 500}),
    "half a token": ("ST-D16", lambda folder: (folder / "a.bin").write_bytes(b"123"), {}),
    "empty": ("ST-D16", lambda folder: (folder / "a.bin").write_bytes(b""), {}),
    "two types": ("ST-D16", both(megatron, numpy_array), {}),
    "negative": ("ST-D11", lambda folder: (-stream("<i4")).tofile(folder / "a.bin"), {"dtype": "uint32"}),
    "a pickle beside": ("ST-D16", both(nanogpt, lambda f: (f / "meta.pkl").touch()), {}),
    "eight bytes": ("ST-D16", lambda folder: megatron(folder, "<i8", 5), {}),
    "array of fractions": ("ST-D16", lambda folder: np.save(folder / "a.npy", np.ones(9)), {}),
    "array of two axes": ("ST-D16", lambda folder: np.save(folder / "a.npy", np.ones((9, 2), "<u2")), {}),
    "cut array": ("ST-D16", lambda folder: (folder / "a.npy").write_bytes(b"\x93NUMPY\x01\x00\xff\xff"), {}),
    "other index": ("ST-D16", spoil("x.idx", lambda data: b"TNTIDX\x00\x00" + data), {}),
    "cut index": ("ST-D16", spoil("x.idx", lambda data: data[:-8]), {}),
    "huge index": ("ST-D16", spoil("x.idx", lambda data: data[:18] + b"\xff" * 16 + data[34:]), {}),
    "wrong index": ("ST-D16", spoil("x.idx", lambda data: data[:34] + b"\x06" + data[35:]), {}),
    "wrong places": ("ST-D16", spoil("x.idx", lambda data: data[:442] + b"\x01" + data[443:]), {}),
    "second file": ("ST-D11", both(llm_c, lambda f: stream("<u2").__add__(900).tofile(f / "x.bin")), {}),
    "longer file": ("ST-D16", spoil("x.bin", lambda data: data + b"\0\0"), {}),
}


@pytest.mark.parametrize(("code", "make", "options"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_adopted_is_refused(
    tmp_path: Path, code: str, make: Callable[[Path], object], options: dict[str, Any]
) -> None:
    make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    refusal(code, lambda: adopt(Request(tmp_path, **({"vocab_size": 1000} | options))))
    assert sorted(tmp_path.rglob("*")) == before


def test_eight_bytes_are_converted(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    megatron(folder, "<i8", 5)
    adopt(Request(folder, tmp_path / "ours", vocab_size=1000))
    with Dataset.open(tmp_path / "ours", sign(tmp_path / "ours")) as data:
        assert np.array_equal(data.read(0, data.tokens), stream("<i8"))
        assert data.dtype.itemsize == 2


def test_a_dataset_is_not_adopted_twice(tmp_path: Path) -> None:
    nanogpt(tmp_path)
    adopt(Request(tmp_path, vocab_size=1000))
    refusal("ST-U05", lambda: adopt(Request(tmp_path, vocab_size=1000)))


@pytest.mark.parametrize("lists", [False, True], ids=["batches", "lists"])
def test_arrow_of_fms_fsdp(tmp_path: Path, lists: bool) -> None:
    arrow = pytest.importorskip("pyarrow")
    folder = tmp_path / "theirs"
    folder.mkdir()
    documents = [list(range(1, n + 1)) for n in (5, 0, 30, 1)]
    kind = arrow.list_(arrow.uint32()) if lists else arrow.uint32()
    schema = arrow.schema([("tokens", kind)])
    with arrow.ipc.new_file(str(folder / "shard.arrow"), schema) as writer:
        for document in documents:
            column = arrow.array([document] if lists else document, kind)
            writer.write_batch(arrow.record_batch([column], schema=schema))
    adopt(Request(folder, tmp_path / "ours", vocab_size=1000, end_id=999))
    with Dataset.open(tmp_path / "ours", sign(tmp_path / "ours")) as data:
        expected = [token for document in documents if document for token in [*document, 999]]
        assert data.read(0, data.tokens).tolist() == expected
        assert data.document_ends(0, data.tokens).tolist() == [6, 37, 39]
    (folder / "shard.arrow").write_bytes(b"ARROW1 and something else")
    refusal("ST-D16", lambda: adopt(Request(folder, tmp_path / "other", vocab_size=1000)))
    assert not (tmp_path / "other").exists()


def test_the_command_says_what_it_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nanogpt(tmp_path)
    assert main([str(tmp_path), "--vocab-size", "1000", "--end-id", "0"]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert counts["forms"] == {"train.bin": "tokens", "val.bin": "tokens"}
    assert counts["documents"] == 201
    assert main([str(tmp_path), "--vocab-size", "1000"]) == SecureTrainError("ST-U05", "").exit_code


# --- describing ----------------------------------------------------------------------------------------


def test_a_description_of_a_dataset(tmp_path: Path) -> None:
    nanogpt(tmp_path)
    adopt(Request(tmp_path, vocab_size=1000, end_id=END))
    found: Any = describe(tmp_path, sign(tmp_path), samples=4)
    assert found["documents"] == 201
    assert set(found["splits"]) == {"train", "validation"}
    lengths = found["splits"]["train"]["lengths"]
    assert (lengths["least"], lengths["median"], lengths["most"]) == (1, 7, 30)
    assert {bar["up_to"]: bar["documents"] for bar in lengths["histogram"]} == {1: 20, 8: 40, 16: 20, 32: 20}
    samples = found["splits"]["train"]["samples"]
    assert len(samples) == 4
    tokens, ends = stream().tolist(), [0, *np.cumsum(LENGTHS).tolist()]
    for sample in samples:
        number = sample["document"]
        assert sample["ids"] == tokens[ends[number] : ends[number + 1]][:16]
        assert sample["tokens"] == LENGTHS[number]


def test_a_histogram_counts_every_length_once() -> None:
    lengths = np.arange(1, 1001)
    bars = histogram(lengths)
    assert sum(bar["documents"] for bar in bars) == 1000
    assert bars[:3] == [
        {"up_to": 1, "documents": 1},
        {"up_to": 2, "documents": 1},
        {"up_to": 4, "documents": 2},
    ]
