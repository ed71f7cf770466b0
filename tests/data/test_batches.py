"""What a batch offers beside tokens: document boundaries, packed rows, and what transforms may do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.data.support import (
    dataset,
    first_tokens,
    pack_dataset,
    refusal,
    rows_of,
    sign,
    take,
    write_dataset,
)
from trainer.data import IGNORED, Dataset, Loader, validation_batches
from trainer.data.pack import WINDOW, best_fit, pack
from trainer.data.shards import END, PIECE, Tokens
from trainer.data.transform import generator

SEQ_LEN = 16
LENGTHS = [5, 30, 1, 16, 17, 9, 9, 2, 14, 40]  # of documents: shorter than a row, as long, and longer


def uneven(root: Path, times: int = 10) -> Path:
    """Documents of LENGTHS; token n is n, so that a row says what it was made of."""
    from trainer.data import Writer
    from trainer.data.shards import TOKENIZER

    write_dataset(root, 16)
    for file in root.iterdir():
        file.unlink()
    (root / TOKENIZER).write_bytes(b"{}")
    digest = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    writer = Writer(root, vocab_size=2**20, tokenizer=digest, shard_tokens=400)
    writer.add("train", np.arange(sum(LENGTHS) * times), np.array(LENGTHS * times))
    writer.finish()
    return root


def document_of(times: int = 10) -> Tokens:
    """The number of each token's document."""
    return np.repeat(np.arange(len(LENGTHS) * times), LENGTHS * times)


def loader(data: Dataset, **options: object) -> Loader:
    given = {"seq_len": SEQ_LEN, "global_batch": 6, "seed": 5, "boundaries": True} | options
    return Loader([data], **given)  # type: ignore[arg-type]  # the tests give what fits


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    root = pack_dataset(uneven(tmp_path / "data"), SEQ_LEN)
    return Dataset.open(root, sign(root))


# --- boundaries ----------------------------------------------------------------------------------------


def test_boundaries_are_where_documents_end(data: Dataset) -> None:
    documents = document_of()
    for batch in take(loader(data), 30):
        ids, positions = batch.document_ids, batch.position_ids
        for row, id_, position in zip(batch.inputs, ids, positions, strict=True):
            changes = np.flatnonzero(np.diff(documents[row])) + 1
            assert np.array_equal(np.flatnonzero(np.diff(id_)) + 1, changes)
            begins = np.concatenate([[0], changes])
            assert np.array_equal(np.flatnonzero(position == 0), begins)
            assert np.array_equal(position, np.arange(SEQ_LEN) - begins[id_])


def test_lengths_for_attention_cover_every_token_once(data: Dataset) -> None:
    for batch in take(loader(data), 30):
        bounds = batch.cu_seqlens
        assert bounds.dtype == np.int32
        assert bounds[0] == 0
        assert bounds[-1] == batch.inputs.size
        assert (np.diff(bounds) > 0).all()
        assert set(range(0, batch.inputs.size, SEQ_LEN)) <= set(bounds.tolist())
        assert batch.max_seqlen == np.diff(bounds).max() <= SEQ_LEN
        assert np.array_equal(np.flatnonzero(batch.position_ids.ravel() == 0), bounds[:-1])


def test_labels_may_stay_within_documents(data: Dataset) -> None:
    documents = document_of()
    for batch in take(loader(data), 30):
        within = documents[batch.tokens[:, :-1]] == documents[batch.tokens[:, 1:]]
        assert np.array_equal(batch.labels_in_documents, np.where(within, batch.labels, IGNORED))
        assert (batch.labels != IGNORED).all()


def test_padding_is_a_document_of_its_own(data: Dataset) -> None:
    (batch,) = loader(data, end=2)
    assert batch.real == 2
    assert batch.cu_seqlens[-5:].tolist() == [SEQ_LEN * row for row in range(2, 7)]
    assert (batch.labels_in_documents[2:] == IGNORED).all()


def test_boundaries_are_only_there_if_asked_for(data: Dataset) -> None:
    batch = next(loader(data, boundaries=False))
    for view in ("cu_seqlens", "position_ids", "document_ids", "labels_in_documents"):
        with pytest.raises(ValueError, match="boundaries"):
            getattr(batch, view)


def test_validation_has_boundaries_too(data: Dataset) -> None:
    documents = document_of()
    for batch in validation_batches(data, seq_len=SEQ_LEN, global_batch=7, boundaries=True):
        for row, ids in zip(batch.inputs[: batch.real], batch.document_ids, strict=False):
            assert np.array_equal(np.diff(documents[row]) > 0, np.diff(ids) > 0)


# --- packed rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_best_fit_uses_every_token_once_and_cuts_only_long_documents(seed: int) -> None:
    dice = np.random.default_rng(seed)
    lengths = [int(n) for n in dice.lognormal(4, 1, 3000)]
    lengths = [max(length, 1) for length in lengths]
    rows = best_fit(lengths, 128)
    assert all(sum(length for _, _, length in row) <= 128 for row in rows)
    pieces = sorted(piece for row in rows for piece in row)
    expected = [
        (document, first, min(128, length - first))
        for document, length in enumerate(lengths)
        for first in range(0, length, 128)
    ]
    assert pieces == expected
    assert sum(lengths) / (128 * len(rows)) > 0.99


def test_packing_goes_over_windows() -> None:
    ends = np.cumsum(np.full(WINDOW + 100, 3)).astype(np.uint64)
    pieces = pack(ends, 7)
    assert sorted(pieces[:, 1].tolist()) == list(range(0, 3 * len(ends), 3))
    assert np.array_equal(np.unique(pieces[:, 0]), np.arange(pieces[-1, 0] + 1))


def test_an_epoch_of_rows_has_every_token_once(data: Dataset) -> None:
    samples = sum(data.rows(SEQ_LEN))
    for epochs in (1, 2):
        rows = rows_of(list(loader(data, packing="rows", end=samples * epochs)))
        assert len(rows) == samples * epochs
        tokens = sorted(token for row in rows for token in row)
        assert tokens == sorted([*range(data.tokens)] * epochs)


def test_rows_hold_whole_documents(data: Dataset) -> None:
    documents, lengths = document_of(), np.array(LENGTHS * 10)
    for row in rows_of(take(loader(data, packing="rows"), 20)):
        found, counts = np.unique(documents[list(row)], return_counts=True)
        assert ((counts == lengths[found]) | (lengths[found] > SEQ_LEN)).all()


def test_rows_have_boundaries_and_labels(data: Dataset) -> None:
    documents = document_of()
    for batch in take(loader(data, packing="rows"), 20):
        for row, count, labels, ids in zip(
            batch.tokens, batch.predicted, batch.labels, batch.document_ids, strict=True
        ):
            assert (labels[count:] == IGNORED).all()
            assert np.array_equal(labels[:count], row[1 : count + 1])
            changes = np.diff(documents[row[: count + 1]]) != 0
            assert np.array_equal(np.diff(ids[: count + 1]) != 0, changes)
            if count + 1 < SEQ_LEN:
                assert (ids[count + 1 :] == ids[count] + 1).all()


def test_rows_resume_exactly_on_other_ranks(data: Dataset) -> None:
    whole = loader(data, packing="rows")
    expected = rows_of(take(whole, 40))
    first = loader(data, packing="rows")
    found = rows_of(take(first, 11))
    state = first.state_dict()
    assert state["packing"] == "rows/v1"
    ranks = [loader(data, packing="rows", rank=rank, world=4) for rank in range(4)]
    for rank in ranks:
        rank.load_state_dict(state)
    for _ in range(29):
        found += rows_of([next(rank) for rank in ranks])
    assert found == expected
    refusal("ST-D10", lambda: loader(data).load_state_dict(state))


def test_a_length_that_was_not_packed_is_refused(data: Dataset, tmp_path: Path) -> None:
    refusal("ST-D15", lambda: loader(data, packing="rows", seq_len=32))
    refusal("ST-D15", lambda: loader(dataset(tmp_path / "other", 500), packing="rows"))
    refusal("ST-D08", lambda: loader(data, packing="boxes"))


def pieces_of(root: Path) -> Tokens:
    return np.fromfile(root / "shard-00000.pack-16", PIECE).astype(np.int64).reshape(-1, 3)


HOSTILE: dict[str, Callable[[Tokens], object]] = {
    "beyond the shard": lambda pieces: pieces.__setitem__((-1, 1), 400),
    "far beyond": lambda pieces: pieces.__setitem__((0, 1), -1),
    "huge row": lambda pieces: pieces.__setitem__((-1, 0), 2**61),
    "empty piece": lambda pieces: pieces.__setitem__((3, 2), 0),
    "token twice": lambda pieces: pieces.__setitem__((5, 1), pieces[6, 1]),
    "row too long": lambda pieces: pieces.__setitem__((slice(0, 2), 0), 0),
    "row left out": lambda pieces: pieces.__setitem__((pieces[:, 0] == 3, 0), 4),
    "last row beyond": lambda pieces: pieces.__setitem__(
        (pieces[:, 0] == pieces[-1, 0], 0), pieces[-1, 0] + 1
    ),
    "rows unsorted": lambda pieces: pieces.__setitem__((slice(None), 0), pieces[::-1, 0].copy()),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_packing_is_refused(tmp_path: Path, change: Callable[[Tokens], object]) -> None:
    root = pack_dataset(uneven(tmp_path / "data"), SEQ_LEN)
    pieces = pieces_of(root)
    change(pieces)
    pieces.astype(PIECE).tofile(root / "shard-00000.pack-16")
    with Dataset.open(root, sign(root)) as data:
        refusal("ST-D07", lambda: take(loader(data, packing="rows"), 40))


def test_a_packing_of_cut_pieces_is_refused(tmp_path: Path) -> None:
    root = pack_dataset(uneven(tmp_path / "data"), SEQ_LEN)
    with open(root / "shard-00000.pack-16", "ab") as file:
        file.write(b"\0" * END.itemsize)
    refusal("ST-D06", lambda: Dataset.open(root, sign(root)))


# --- the window, and reading neighbours together -------------------------------------------------------


def test_neighbours_are_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that fill blocks, shuffled by blocks: each block is hashed once in an epoch."""
    from supplychain.artifact import digest
    from trainer.data import Window

    root = tmp_path / "data"
    write_dataset(root, 2**16 * 4, shard_tokens=2**17, document=4096)
    pack_dataset(root, 4096)
    hashed = []
    with Dataset.open(root, sign(root)) as data:
        data.read(0, 1)  # the tables of digests are loaded, the files open
        data.read(2**17, 1)
        data.pieces(0, 0, 4096), data.pieces(1, 0, 4096)
        real = digest.leaf

        def counted(block: memoryview) -> bytes:
            hashed.append(len(block))
            return real(block)

        monkeypatch.setattr(digest, "leaf", counted)
        given = {"seq_len": 4096, "global_batch": 8, "packing": "rows", "end": 64, "boundaries": False}
        rows = rows_of(list(loader(data, window=Window(4, 1), threads=0, **given)))
        assert sorted(token for row in rows for token in row) == list(range(2**18))
        assert hashed == [2**16] * 16
        hashed.clear()
        list(loader(data, threads=0, **given))  # shuffled everywhere: a block for each of its four rows
        assert len(hashed) > 40


def test_a_window_resumes_exactly(data: Dataset) -> None:
    from trainer.data import Window

    window = Window(4, 3)
    expected = first_tokens(take(loader(data, window=window), 40))
    first = loader(data, window=window)
    found = first_tokens(take(first, 7))
    again = loader(data, window=window, global_batch=11)
    again.load_state_dict(first.state_dict())
    assert (found + first_tokens(take(again, 18)))[:240] == expected
    assert first.state_dict()["order"] == "window/v1/4x3"
    assert len(str(first.state_dict())) < 1024
    for other in (None, Window(4, 2)):
        refusal("ST-D10", lambda other=other: loader(data, window=other).load_state_dict(first.state_dict()))  # type: ignore[misc]  # default argument


# --- transforms ----------------------------------------------------------------------------------------


def noisy(tokens: Tokens, dice: np.random.Generator) -> Tokens:
    return np.where(dice.random(len(tokens)) < 0.3, 7, tokens)


def test_a_transform_depends_on_the_sample_alone(data: Dataset) -> None:
    expected = np.concatenate([batch.tokens for batch in take(loader(data, transform=noisy), 10)])
    assert (expected == 7).mean() > 0.2
    ranks = [loader(data, transform=noisy, rank=r, world=3, global_batch=12, threads=3) for r in range(3)]
    before = [next(rank) for rank in ranks]
    state = ranks[0].state_dict()
    ranks = [loader(data, transform=noisy, rank=rank, world=2, threads=0) for rank in range(2)]
    for rank in ranks:
        rank.load_state_dict(state)
    after = [next(rank) for _ in range(8) for rank in ranks]
    assert np.array_equal(np.concatenate([batch.tokens for batch in [*before, *after]]), expected)


def test_the_generator_is_frozen() -> None:
    """Its bits are; what numpy's distributions make of them is numpy's to keep."""
    raw = [
        generator(seed, sample).bit_generator.random_raw(3).tolist()
        for seed, sample in [(5, 10**12), (5, 10**12 + 1), (6, 10**12)]
    ]
    assert raw[0] == [990228135251189077, 16141530278737819531, 5644624075345399370]
    assert raw[0] != raw[1] != raw[2] != raw[0]


@pytest.mark.parametrize(
    "transform",
    [
        lambda tokens, dice: tokens[:-1],
        lambda tokens, dice: tokens / 2,
        lambda tokens, dice: tokens - 10**6,
        lambda tokens, dice: tokens + 2**20,
        lambda tokens, dice: None,
    ],
    ids=["shorter", "fractions", "negative", "outside the vocabulary", "nothing"],
)
def test_a_transform_returns_a_sample(data: Dataset, transform: Callable[..., Tokens]) -> None:
    refusal("ST-D14", lambda: next(loader(data, transform=transform)))
