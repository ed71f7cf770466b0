"""Small signed datasets for the tests, made by the real writer. Token n of a dataset is n (plus an offset),
so that a batch says by itself where it was read from.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import pytest

from supplychain.artifact import SecureTrainError, build_manifest
from trainer.data import Batch, Dataset, Description, Loader, Writer
from trainer.data.pack import pack_folder
from trainer.data.shards import DESCRIPTION, TOKENIZER

SEQ_LEN = 16


def write_dataset(
    root: Path,
    tokens: int,
    *,
    offset: int = 0,
    vocab_size: int = 2**20,
    shard_tokens: int = 700,
    document: int = 50,
    tokenizer: bytes = b"{}",
    splits: Sequence[str] = ("train",),
) -> Path:
    root.mkdir()
    (root / TOKENIZER).write_bytes(tokenizer)
    writer = Writer(
        root,
        vocab_size=vocab_size,
        tokenizer=hashlib.sha256(tokenizer).hexdigest(),
        shard_tokens=shard_tokens,
    )
    for split in splits:
        lengths = np.array([document] * (tokens // document) + [tokens % document] * (tokens % document > 0))
        writer.add(split, np.arange(offset, offset + tokens) % vocab_size, lengths)
    writer.finish()
    return root


def sign(root: Path) -> str:
    """Write the manifest; its digest is what a signature would vouch for."""
    return build_manifest(root, "dataset").digest


def dataset(root: Path, tokens: int, *, offset: int = 0, **options: int) -> Dataset:
    write_dataset(root, tokens, offset=offset, **options)  # type: ignore[arg-type]  # only integers are passed on
    return Dataset.open(root, sign(root))


def first_tokens(batches: Iterable[Batch]) -> list[int]:
    """What identifies each sample."""
    return [int(token) for batch in batches for token in batch.tokens[: batch.real, 0]]


def take(loader: Loader, batches: int) -> list[Batch]:
    return [next(loader) for _ in range(batches)]


def pack_dataset(root: Path, seq_len: int) -> Path:
    """Add a packing to an unsigned dataset, as the preparation does."""
    pack_folder(root, Description.parse((root / DESCRIPTION).read_bytes()), seq_len)
    return root


def refusal(code: str, call: Callable[[], object]) -> SecureTrainError:
    with pytest.raises(SecureTrainError) as refused:
        call()
    assert refused.value.code == code
    return refused.value


def rows_of(batches: list[Batch]) -> list[tuple[int, ...]]:
    """The real tokens of each row."""
    return [
        tuple(row[: count + 1].tolist())
        for batch in batches
        for row, count in zip(batch.tokens[: batch.real], batch.predicted, strict=False)
    ]
