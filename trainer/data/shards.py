"""The form of a dataset on disk: token shards, their description, and who writes them. dataset.py reads them.

    dataset.json       what the folder holds: token type, vocabulary, tokenizer, shards, splits, packings
    NAME.bin           the tokens of one shard, little-endian uint16 or uint32, nothing else
    NAME.idx           where its documents end, in tokens from the shard's start, little-endian uint64
    NAME.pack-LENGTH   optional: its documents packed into rows of LENGTH tokens, as pieces of three
                       little-endian uint64 (row, first token, tokens), by row
    tokenizer.json     what the tokens mean

A dataset that was adopted keeps its files: a shard then names the file that holds its tokens, and how many
bytes of foreign header come before them. It may lack a tokenizer.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from supplychain.artifact import SecureTrainError, canonical_json, parse_json, write_durably

KIND = "dataset"
SCHEMA = "urn:secure-train:dataset:v1"
DESCRIPTION = "dataset.json"
TOKENIZER = "tokenizer.json"
PREPARATION = "preparation.json"

Tokens = npt.NDArray[np.int64]

MAX_TOKENS = 2**60  # of a dataset: keeps token and byte positions inside 63 bits

TYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
END = np.dtype("<u8")
PIECE = np.dtype("<u8")  # three of them: row, first token in the shard, tokens
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")
_PATH = re.compile(rf"{_NAME.pattern}(?:/{_NAME.pattern}){{0,9}}")
_SPLIT = re.compile(r"[a-z][a-z0-9_-]{0,39}")
_HEX = re.compile(r"[0-9a-f]{64}")
_NUMBER = re.compile(r"[1-9][0-9]{0,18}")  # positive


# --- the description -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """One pair of files. All of a shard belongs to one split."""

    name: str
    split: str
    tokens: int
    documents: int
    data: str = ""  # the adopted file that holds the tokens, in place of NAME.bin,
    offset: int = 0  # and the bytes of foreign header before them

    @property
    def bin(self) -> str:
        return self.data or f"{self.name}.bin"

    @property
    def idx(self) -> str:
        return f"{self.name}.idx"

    def pack(self, seq_len: int) -> str:
        return f"{self.name}.pack-{seq_len}"

    def as_dict(self) -> dict[str, str]:
        own = {
            "name": self.name,
            "split": self.split,
            "tokens": str(self.tokens),
            "documents": str(self.documents),
        }
        return own | ({"data": self.data, "offset": str(self.offset)} if self.data else {})


@dataclass(frozen=True)
class Packed:
    """That there are .pack files for rows of `seq_len` tokens: how many rows each shard has."""

    seq_len: int
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Description:
    """dataset.json. Holds no more than what a reader needs; how the data was made is in preparation.json."""

    dtype: str
    vocab_size: int
    tokenizer: str | None  # sha256 of tokenizer.json, hex; None where an adopted dataset came without one
    shards: tuple[Shard, ...]
    packings: tuple[Packed, ...] = ()

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    def packed(self, seq_len: int) -> Packed | None:
        return next((packed for packed in self.packings if packed.seq_len == seq_len), None)

    def to_bytes(self) -> bytes:
        document: dict[str, object] = {
            "schema": SCHEMA,
            "dtype": self.dtype,
            "vocab_size": str(self.vocab_size),
            "tokens": str(self.tokens),
            "documents": str(self.documents),
            "tokenizer": self.tokenizer,
            "shards": [shard.as_dict() for shard in self.shards],
        }
        if self.packings:
            document["packings"] = [
                {"seq_len": str(packed.seq_len), "rows": [str(rows) for rows in packed.rows]}
                for packed in self.packings
            ]
        return canonical_json(document)

    @staticmethod
    def parse(data: bytes, *, where: str = DESCRIPTION) -> Description:
        """Parse foreign bytes; ST-D06 unless they are exactly what `to_bytes` of an honest description is."""
        document = parse_json(data, what=DESCRIPTION, code="ST-D06")
        try:
            description = Description(
                _one_of(document["dtype"], TYPES, "dtype"),
                _number(document["vocab_size"], "vocab_size"),
                None
                if document["tokenizer"] is None
                else _matching(document["tokenizer"], _HEX, "tokenizer"),
                tuple(_shard(item) for item in document["shards"]),
                tuple(_packed(item) for item in document.get("packings", [])),
            )
            _check(description)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            reason = f"the key {error} is missing" if isinstance(error, KeyError) else str(error)
            raise malformed(f"dataset.json is malformed: {reason}", where) from None
        if description.to_bytes() != data:  # also catches unknown keys, wrong sums and another schema
            raise malformed("dataset.json is not in its canonical form, or its sums are wrong", where)
        return description


def _shard(item: Any) -> Shard:
    return Shard(
        _matching(item["name"], _NAME, "the name of a shard"),
        _matching(item["split"], _SPLIT, "the split of a shard"),
        _number(item["tokens"], "the tokens of a shard"),
        _number(item["documents"], "the documents of a shard"),
        _matching(item["data"], _PATH, "the file of a shard") if "data" in item else "",
        _number(item["offset"], "the offset of a shard", zero=True) if "offset" in item else 0,
    )


def _packed(item: Any) -> Packed:
    rows = tuple(_number(rows, "the rows of a shard", zero=True) for rows in item["rows"])
    return Packed(_number(item["seq_len"], "the length of a row"), rows)


def _check(description: Description) -> None:
    names = [shard.name.casefold() for shard in description.shards]
    if not names:
        raise ValueError("it has no shards")
    if len(set(names)) != len(names):
        raise ValueError("two shards have the same name")
    if description.vocab_size > np.iinfo(TYPES[description.dtype]).max + 1:
        raise ValueError(f"a vocabulary of {description.vocab_size} does not fit into {description.dtype}")
    files = [file.casefold() for shard in description.shards for file in (shard.bin, shard.idx)]
    if len(set(files)) != len(files):
        raise ValueError("two shards share a file")
    for shard in description.shards:
        if shard.documents > shard.tokens:
            raise ValueError(f"{shard.name} has more documents than tokens")
        if shard.offset >= MAX_TOKENS:
            raise ValueError(f"the tokens of {shard.name} begin too far into their file")
    lengths = [packed.seq_len for packed in description.packings]
    if lengths != sorted(set(lengths)):
        raise ValueError("the packings are not in the order of their lengths, each once")
    for packed in description.packings:
        if len(packed.rows) != len(description.shards):
            raise ValueError("a packing does not have the rows of every shard")
        if sum(packed.rows) > description.tokens:
            raise ValueError("a packing has more rows than there are tokens")
    if description.tokens >= MAX_TOKENS:
        raise ValueError("it has too many tokens")


def _number(value: Any, what: str, *, zero: bool = False) -> int:
    return 0 if zero and value == "0" else int(_matching(value, _NUMBER, what))


def _matching(value: Any, pattern: re.Pattern[str], what: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{what} is {value!r:.60}")
    return value


def _one_of(value: Any, allowed: Iterable[str], what: str) -> str:
    if value not in list(allowed):
        raise ValueError(f"{what} is {value!r:.60}")
    return str(value)


def malformed(
    what: str, where: str, expected: str | None = None, found: str | None = None
) -> SecureTrainError:
    return SecureTrainError(
        "ST-D06",
        what,
        where=where,
        expected=expected,
        found=found,
        next_step="prepare the dataset again, and ask its signer how this was signed",
    )


# --- the writer ----------------------------------------------------------------------------------------


class Writer:
    """Writes a dataset's shards and description into a folder. A document is never cut: a shard ends before
    the one that would make it longer than `shard_tokens`. The caller makes the folder appear whole.

    With `rows`, what is added are whole rows of that many tokens, laid out for `packing="rows"`: documents,
    and padding to the end of the row that is marked as unused.
    """

    def __init__(
        self,
        folder: Path,
        *,
        vocab_size: int,
        tokenizer: str | None,
        shard_tokens: int,
        rows: int | None = None,
    ) -> None:
        self._folder = folder
        self._shard_tokens = max(shard_tokens // rows, 1) * rows if rows else shard_tokens
        self._rows = rows
        self._description = Description(dtype_of(vocab_size), vocab_size, tokenizer, ())
        self._splits: dict[str, list[_OpenShard]] = {}

    @property
    def dtype(self) -> np.dtype[Any]:
        return TYPES[self._description.dtype]

    def add(
        self,
        split: str,
        tokens: npt.NDArray[Any],
        lengths: Tokens,
        used: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        """Append documents to a split: their tokens one after another, and the length of each (positive);
        where the writer has `rows`, also which are `used`, and not padding."""
        shards = self._splits.setdefault(split, [])
        start = document = 0
        ends = np.cumsum(lengths)
        while document < len(lengths):
            if not shards or not shards[-1].takes(int(lengths[document]), self._shard_tokens):
                if shards:
                    shards[-1].close()
                shards.append(_OpenShard(self._path(split, len(shards)), self.dtype))
            room = max(self._shard_tokens - shards[-1].tokens, int(lengths[document]))
            after = int(np.searchsorted(ends, start + room, side="right"))
            shards[-1].append(tokens[start : int(ends[after - 1])], ends[document:after] - start)
            if self._rows and used is not None:
                shards[-1].note_pieces(lengths[document:after], used[document:after])
            start, document = int(ends[after - 1]), after

    def flush(self) -> dict[str, list[list[int]]]:
        """Make what was added durable, and say what `resume` needs: [tokens, documents] of each shard."""
        for shards in self._splits.values():
            if shards:
                shards[-1].flush()
        return {
            split: [[shard.tokens, shard.documents] for shard in shards]
            for split, shards in self._splits.items()
        }

    def resume(self, flushed: dict[str, list[list[int]]]) -> None:
        """Go on where `flush` was, in a folder in which more may have been written since. OSError if files
        are not as they were then.
        """
        for split, shards in flushed.items():
            self._splits[split] = [
                _OpenShard(self._path(split, number), self.dtype, tokens, documents)
                for number, (tokens, documents) in enumerate(shards)
            ]
            for shard in self._splits[split][:-1]:
                shard.close()
        known = {file.name for shards in self._splits.values() for shard in shards for file in shard.files}
        for file in [*self._folder.glob("*.bin"), *self._folder.glob("*.idx")]:
            if file.name not in known:
                file.unlink()

    def finish(self) -> Description:
        """Close the shards, number them through (training data first) and write dataset.json."""
        shards: list[Shard] = []
        for split in sorted(self._splits, key=lambda split: (split != "train", split)):
            for shard in self._splits[split]:
                shard.close()
                name = f"shard-{len(shards):05d}"
                shard.rename(name)
                shards.append(Shard(name, split, shard.tokens, shard.documents))
                if self._rows:
                    write_pieces(self._folder, shards[-1], self._rows, shard.pieces(self._rows))
        description = replace(self._description, shards=tuple(shards))
        if self._rows:
            rows = tuple(shard.tokens // self._rows for shard in shards)
            description = replace(description, packings=(Packed(self._rows, rows),))
        write_description(self._folder, description)
        return description

    def _path(self, split: str, number: int) -> Path:
        return self._folder / f"{split}-{number:05d}"


def write_description(folder: Path, description: Description) -> None:
    data = description.to_bytes()
    Description.parse(data)  # what we write, we must be able to read
    write_durably(folder / DESCRIPTION, data)


def write_pieces(folder: Path, shard: Shard, seq_len: int, pieces: npt.NDArray[Any]) -> None:
    """The .pack file of a shard; `pieces` is n x 3, by row."""
    write_durably(folder / shard.pack(seq_len), np.ascontiguousarray(pieces, PIECE).tobytes())


def dtype_of(vocab_size: int) -> str:
    return "uint16" if vocab_size <= 2**16 else "uint32"


class _OpenShard:
    """The two files of a shard that grows."""

    def __init__(self, path: Path, dtype: np.dtype[Any], tokens: int = 0, documents: int = 0) -> None:
        """A new shard, or one that goes on after so many tokens and documents."""
        self._dtype = dtype
        self.tokens = tokens
        self.documents = documents
        self._pieces = [np.empty((0, 2), np.int64)]
        self.files = tuple(path.with_name(path.name + suffix) for suffix in (".bin", ".idx"))
        self._bin, self._idx = (
            _open(file, size)
            for file, size in zip(
                self.files, (tokens * dtype.itemsize, documents * END.itemsize), strict=True
            )
        )

    def takes(self, length: int, limit: int) -> bool:
        return self.tokens == 0 or self.tokens + length <= limit

    def append(self, tokens: npt.NDArray[Any], ends: Tokens) -> None:
        """Documents: their tokens, and where they end, counted from the first of these tokens."""
        self._bin.write(np.ascontiguousarray(tokens, self._dtype).tobytes())
        self._idx.write((ends + self.tokens).astype(END).tobytes())
        self.tokens += len(tokens)
        self.documents += len(ends)

    def note_pieces(self, lengths: Tokens, used: npt.NDArray[np.bool_]) -> None:
        """Which of the documents that were just appended are pieces of rows."""
        firsts = self.tokens - int(lengths.sum()) + np.cumsum(lengths) - lengths
        self._pieces.append(np.stack([firsts, lengths], axis=1)[used])

    def pieces(self, row: int) -> Tokens:
        """n x 3: row, first token, tokens."""
        noted = np.concatenate(self._pieces)
        return np.column_stack([noted[:, 0] // row, noted])

    def flush(self) -> None:
        for file in (self._bin, self._idx):
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        if not self._bin.closed:
            self.flush()
            self._bin.close()
            self._idx.close()

    def rename(self, name: str) -> None:
        for file in self.files:
            os.replace(file, file.with_name(name + file.suffix))


def _open(path: Path, size: int) -> BinaryIO:
    """Open for writing: a new file, or one that has at least `size` bytes, of which these are kept."""
    if not size:
        path.unlink(missing_ok=True)
        return open(path, "xb")
    file = open(path, "r+b")  # noqa: SIM115  # open as long as the shard grows
    if file.seek(0, os.SEEK_END) < size:
        file.close()
        raise FileNotFoundError(f"{path} is shorter than it was")
    file.truncate(size)
    file.seek(size)
    return file
