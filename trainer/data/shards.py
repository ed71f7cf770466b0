"""A dataset on disk: token shards, their description, the writer, and the verified reader.

    dataset.json       what the folder holds: token type, vocabulary, tokenizer, shards and their splits
    NAME.bin           the tokens of one shard, little-endian uint16 or uint32, nothing else
    NAME.idx           where its documents end, in tokens from the shard's start, little-endian uint64
    tokenizer.json     what the tokens mean

The reader promises that every token it returns was hashed against the signed manifest when it was read
(unless told otherwise), lies in the vocabulary, and that description, index and files agree; else it
raises. It maps nothing.
"""

from __future__ import annotations

import os
import re
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from supplychain.artifact import (
    SecureTrainError,
    VerifiedArtifact,
    VerifiedFile,
    canonical_json,
    parse_json,
    write_durably,
)

KIND = "dataset"
SCHEMA = "urn:secure-train:dataset:v1"
DESCRIPTION = "dataset.json"
TOKENIZER = "tokenizer.json"
PREPARATION = "preparation.json"

Tokens = npt.NDArray[np.int64]
Verify = Literal["always", "once", "off"]

MAX_TOKENS = 2**60  # of a dataset: keeps token and byte positions inside 63 bits

_TYPES: dict[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_END = np.dtype("<u8")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")
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


@dataclass(frozen=True)
class Description:
    """dataset.json. Holds no more than what a reader needs; how the data was made is in preparation.json."""

    dtype: str
    vocab_size: int
    tokenizer: str  # sha256 of tokenizer.json, hex
    shards: tuple[Shard, ...]

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.shards)

    @property
    def documents(self) -> int:
        return sum(shard.documents for shard in self.shards)

    def to_bytes(self) -> bytes:
        return canonical_json(
            {
                "schema": SCHEMA,
                "dtype": self.dtype,
                "vocab_size": str(self.vocab_size),
                "tokens": str(self.tokens),
                "documents": str(self.documents),
                "tokenizer": self.tokenizer,
                "shards": [
                    {
                        "name": shard.name,
                        "split": shard.split,
                        "tokens": str(shard.tokens),
                        "documents": str(shard.documents),
                    }
                    for shard in self.shards
                ],
            }
        )

    @staticmethod
    def parse(data: bytes, *, where: str = DESCRIPTION) -> Description:
        """Parse foreign bytes; ST-D06 unless they are exactly what `to_bytes` of an honest description is."""
        document = parse_json(data, what=DESCRIPTION, code="ST-D06")
        try:
            description = Description(
                _one_of(document["dtype"], _TYPES, "dtype"),
                _number(document["vocab_size"], "vocab_size"),
                _matching(document["tokenizer"], _HEX, "tokenizer"),
                tuple(_shard(item) for item in document["shards"]),
            )
            _check(description)
        except (KeyError, TypeError, ValueError) as error:
            reason = f"the key {error} is missing" if isinstance(error, KeyError) else str(error)
            raise _malformed(f"dataset.json is malformed: {reason}", where) from None
        if description.to_bytes() != data:  # also catches unknown keys, wrong sums and another schema
            raise _malformed("dataset.json is not in its canonical form, or its sums are wrong", where)
        return description


def _shard(item: Any) -> Shard:
    return Shard(
        _matching(item["name"], _NAME, "the name of a shard"),
        _matching(item["split"], _SPLIT, "the split of a shard"),
        _number(item["tokens"], "the tokens of a shard"),
        _number(item["documents"], "the documents of a shard"),
    )


def _check(description: Description) -> None:
    names = [shard.name.casefold() for shard in description.shards]
    if not names:
        raise ValueError("it has no shards")
    if len(set(names)) != len(names):
        raise ValueError("two shards have the same name")
    if description.vocab_size > np.iinfo(_TYPES[description.dtype]).max + 1:
        raise ValueError(f"a vocabulary of {description.vocab_size} does not fit into {description.dtype}")
    for shard in description.shards:
        if shard.documents > shard.tokens:
            raise ValueError(f"{shard.name} has more documents than tokens")
    if description.tokens >= MAX_TOKENS:
        raise ValueError("it has too many tokens")


def _number(value: Any, what: str) -> int:
    return int(_matching(value, _NUMBER, what))


def _matching(value: Any, pattern: re.Pattern[str], what: str) -> str:
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise ValueError(f"{what} is {value!r:.60}")
    return value


def _one_of(value: Any, allowed: Iterable[str], what: str) -> str:
    if value not in list(allowed):
        raise ValueError(f"{what} is {value!r:.60}")
    return str(value)


def _malformed(
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


# --- the reader ----------------------------------------------------------------------------------------


class Dataset:
    """One split of a signed dataset: a ring of `tokens` tokens in the order of its shards. Thread-safe."""

    def __init__(
        self, artifact: VerifiedArtifact, *, split: str = "train", verify: Verify = "always"
    ) -> None:
        """`artifact` was opened with a digest that somebody vouched for. Reads no shard; ST-D06 if
        description and manifest disagree, ST-D03 if there is no such split.
        """
        self.root = artifact.root
        self.digest = artifact.manifest.digest
        self.description = _described(artifact)
        self.split = split
        self.shards = tuple(shard for shard in self.description.shards if shard.split == split)
        if not self.shards:
            raise SecureTrainError(
                "ST-D03",
                f"the dataset has no split {split!r}",
                where=str(self.root),
                expected=split,
                found=", ".join(sorted({shard.split for shard in self.description.shards})),
                next_step="prepare it with --validation-fraction" if split == "validation" else None,
            )
        self.vocab_size = self.description.vocab_size
        self.dtype = _TYPES[self.description.dtype]
        self._ends = list(accumulate(shard.tokens for shard in self.shards))
        self.tokens = self._ends[-1]
        self._files = _Files(artifact, verify)
        self._indices = _Files(artifact, verify)

    @classmethod
    def open(
        cls, root: Path, manifest_digest: str, *, split: str = "train", verify: Verify = "always"
    ) -> Dataset:
        """Open the dataset in `root`, whose manifest must have the sha256 `manifest_digest` (hex)."""
        return cls(VerifiedArtifact.open(root, manifest_digest), split=split, verify=verify)

    def __enter__(self) -> Dataset:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._files.close()
        self._indices.close()

    def read(self, first: int, count: int) -> Tokens:
        """`count` tokens from token `first` on; past the last one it goes on at token 0."""
        tokens = np.empty(count, np.int64)
        self.fill(tokens, first)
        self.check(tokens)
        return tokens

    def fill(self, row: Tokens, first: int) -> None:
        """As `read`, into `row`, and without the look at the vocabulary, which the caller does for many
        rows at once.
        """
        done, size, width = 0, len(row), self.dtype.itemsize
        while done < size:
            number = bisect_right(self._ends, first)
            shard, end = self.shards[number], self._ends[number]
            offset = first - (end - shard.tokens)
            take = min(size - done, end - first)
            file = self._files.take(f"{shard.name}.bin")
            try:
                data = file.read(offset * width, take * width)
            finally:
                self._files.give_back(file)
            row[done : done + take] = np.frombuffer(data, self.dtype)
            done += take
            first = (first + take) % self.tokens

    def check(self, tokens: Tokens) -> None:
        """ST-D11 if a token is outside the vocabulary: it would index past the end of the embedding."""
        if tokens.size and int(tokens.max()) >= self.vocab_size:
            raise SecureTrainError(
                "ST-D11",
                "a token is outside the vocabulary",
                where=str(self.root),
                expected=f"below {self.vocab_size}",
                found=str(tokens.max()),
                next_step="prepare the dataset again with the tokenizer of this run",
            )

    def document_ends(self, first: int, count: int) -> Tokens:
        """Where documents end within the `count` tokens from `first` on: positions 1..count, increasing."""
        parts, done = [np.empty(0, np.int64)], 0
        while done < count:
            number = bisect_right(self._ends, first)
            start = self._ends[number] - self.shards[number].tokens
            take = min(count - done, self._ends[number] - first)
            ends = self._index(self.shards[number])
            low, high = np.searchsorted(ends, [first - start, first - start + take], side="right")
            parts.append(ends[low:high] - (first - start) + done)
            done += take
            first = (first + take) % self.tokens
        return np.concatenate(parts)

    def _index(self, shard: Shard) -> Tokens:
        """The document ends of a shard, checked whole."""
        name = f"{shard.name}.idx"
        file = self._indices.take(name)
        try:
            ends = np.frombuffer(file.read(0, file.size), _END)
        finally:
            self._indices.give_back(file)
        if ends[0] == 0 or ends[-1] != shard.tokens or bool((ends[1:] <= ends[:-1]).any()):
            raise SecureTrainError(
                "ST-D07",
                "a document index does not describe its shard",
                where=str(self.root / name),
                expected=f"increasing ends up to {shard.tokens}",
                found=f"{len(ends)} ends up to {ends[-1]}",
                next_step="prepare the dataset again",
            )
        return ends.astype(np.int64)


def _described(artifact: VerifiedArtifact) -> Description:
    """The description, in agreement with the manifest: names, sizes, and no data that it leaves out."""
    manifest, where = artifact.manifest, str(artifact.root)
    if manifest.kind != KIND:
        raise _malformed("the artifact is not a dataset", where, KIND, manifest.kind)
    description = Description.parse(artifact.read_bytes(DESCRIPTION), where=str(artifact.root / DESCRIPTION))
    width = _TYPES[description.dtype].itemsize
    sizes = {f"{shard.name}.bin": shard.tokens * width for shard in description.shards}
    sizes |= {f"{shard.name}.idx": shard.documents * _END.itemsize for shard in description.shards}
    for name, size in sizes.items():
        found = manifest.entry(name).size
        if found != size:
            raise _malformed(
                f"{name} has another size than dataset.json says", where, f"{size} bytes", f"{found} bytes"
            )
    extra = [
        file.path
        for file in manifest.files
        if file.path.endswith((".bin", ".idx")) and file.path not in sizes
    ]
    if extra:
        raise _malformed(f"dataset.json does not mention {extra[0]}", where)
    tokenizer = manifest.entry(TOKENIZER).sha256
    if tokenizer != description.tokenizer:
        raise _malformed(
            "tokenizer.json is not the one of dataset.json", where, description.tokenizer, tokenizer
        )
    return description


class _Files:
    """Open files of an artifact, the least recently used closed first, and never while somebody reads it.

    An open shard of 1 GiB costs a descriptor and half a megabyte of block digests; datasets have thousands.
    """

    LIMIT = 64

    def __init__(self, artifact: VerifiedArtifact, verify: Verify) -> None:
        self._artifact = artifact
        self._verify = verify
        self._lock = threading.Lock()
        self._open: OrderedDict[str, VerifiedFile] = OrderedDict()
        self._readers: dict[str, int] = {}

    def take(self, path: str) -> VerifiedFile:
        with self._lock:
            file = self._open.get(path)
            if file is None:
                self._close_idle(self.LIMIT - 1)
                file = self._open[path] = self._artifact.open_file(path, verify=self._verify)
            else:
                self._open.move_to_end(path)
            self._readers[path] = self._readers.get(path, 0) + 1
            return file

    def give_back(self, file: VerifiedFile) -> None:
        with self._lock:
            self._readers[file.path] -= 1

    def close(self) -> None:
        with self._lock:
            self._close_idle(0)

    def _close_idle(self, keep: int) -> None:
        idle = [path for path in self._open if not self._readers.get(path)]
        for path in idle[: max(0, len(self._open) - keep)]:
            self._open.pop(path).close()
            self._readers.pop(path, None)


# --- the writer ----------------------------------------------------------------------------------------


class Writer:
    """Writes a dataset's shards and description into an empty folder. A document is never cut: a shard ends
    before the one that would make it longer than `shard_tokens`. The caller makes the folder appear whole.
    """

    def __init__(self, folder: Path, *, vocab_size: int, tokenizer: str, shard_tokens: int) -> None:
        self._folder = folder
        self._shard_tokens = shard_tokens
        self._description = Description(dtype_of(vocab_size), vocab_size, tokenizer, ())
        self._splits: dict[str, list[_OpenShard]] = {}

    @property
    def dtype(self) -> np.dtype[Any]:
        return _TYPES[self._description.dtype]

    def add(self, split: str, tokens: npt.NDArray[Any], lengths: Tokens) -> None:
        """Append documents to a split: their tokens one after another, and the length of each (positive)."""
        shards = self._splits.setdefault(split, [])
        start = document = 0
        ends = np.cumsum(lengths)
        while document < len(lengths):
            if not shards or not shards[-1].takes(int(lengths[document]), self._shard_tokens):
                if shards:
                    shards[-1].close()
                shards.append(_OpenShard(self._folder / f"{split}-{len(shards):05d}", self.dtype))
            room = max(self._shard_tokens - shards[-1].tokens, int(lengths[document]))
            after = int(np.searchsorted(ends, start + room, side="right"))
            shards[-1].append(tokens[start : int(ends[after - 1])], ends[document:after] - start)
            start, document = int(ends[after - 1]), after

    def finish(self) -> Description:
        """Close the shards, number them through (training data first) and write dataset.json."""
        shards: list[Shard] = []
        for split in sorted(self._splits, key=lambda split: (split != "train", split)):
            for shard in self._splits[split]:
                shard.close()
                name = f"shard-{len(shards):05d}"
                shard.rename(name)
                shards.append(Shard(name, split, shard.tokens, shard.documents))
        description = Description(
            self._description.dtype, self._description.vocab_size, self._description.tokenizer, tuple(shards)
        )
        data = description.to_bytes()
        Description.parse(data)  # what we write, we must be able to read
        write_durably(self._folder / DESCRIPTION, data)
        return description


def dtype_of(vocab_size: int) -> str:
    return "uint16" if vocab_size <= 2**16 else "uint32"


class _OpenShard:
    """The two files of a shard that grows."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        self._path = path
        self._dtype = dtype
        self._bin: BinaryIO = open(f"{path}.bin", "xb")  # noqa: SIM115  # open as long as the shard grows
        self._idx: BinaryIO = open(f"{path}.idx", "xb")  # noqa: SIM115
        self.tokens = 0
        self.documents = 0

    def takes(self, length: int, limit: int) -> bool:
        return self.tokens == 0 or self.tokens + length <= limit

    def append(self, tokens: npt.NDArray[Any], ends: Tokens) -> None:
        """Documents: their tokens, and where they end, counted from the first of these tokens."""
        self._bin.write(np.ascontiguousarray(tokens, self._dtype).tobytes())
        self._idx.write((ends + self.tokens).astype(_END).tobytes())
        self.tokens += len(tokens)
        self.documents += len(ends)

    def close(self) -> None:
        for file in (self._bin, self._idx):
            if not file.closed:
                file.flush()
                os.fsync(file.fileno())
                file.close()

    def rename(self, name: str) -> None:
        for suffix in (".bin", ".idx"):
            os.replace(f"{self._path}{suffix}", self._path.with_name(name + suffix))
