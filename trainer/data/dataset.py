"""The verified reader of a dataset (shards.py says what lies there).

Promises that every token it returns was hashed against the signed manifest when it was read (unless told
otherwise), lies in the vocabulary, and that description, indices and files agree; else it raises. With
`verify="off"` it maps files instead; otherwise it maps nothing. Thread-safe.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from supplychain.artifact import SecureTrainError, VerifiedArtifact
from trainer.data.files import Artifact, File, Files, Remote, Verify
from trainer.data.shards import (
    DESCRIPTION,
    END,
    KIND,
    MAX_TOKENS,
    PIECE,
    TOKENIZER,
    TYPES,
    Description,
    Shard,
    Tokens,
    malformed,
)

Arrays = TypeVar("Arrays", bound=tuple[npt.NDArray[Any], ...])

RUN = 1 << 20  # tokens of one read, at most, when neighbours are read together
INDEX_MEMORY = 256 << 20  # bytes of document ends and packings that one dataset keeps


class Dataset:
    """One split of a signed dataset: a ring of `tokens` tokens in the order of its shards."""

    def __init__(self, artifact: Artifact, *, split: str = "train", verify: Verify = "always") -> None:
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
        self.dtype = TYPES[self.description.dtype]
        self._artifact = artifact
        self._ends = list(accumulate(shard.tokens for shard in self.shards))
        self.tokens = self._ends[-1]
        self._files = Files(artifact, verify)
        self._indices = _Cache(INDEX_MEMORY)

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

    # --- tokens ----------------------------------------------------------------------------------------

    def read(self, first: int, count: int) -> Tokens:
        """`count` tokens from token `first` on; past the last one it goes on at token 0."""
        tokens = np.empty(count, np.int64)
        self.gather([first], [tokens])
        self.check(tokens)
        return tokens

    def gather(self, firsts: Sequence[int], into: Sequence[Tokens]) -> None:
        """Fill each of `into` with the tokens from its first one on. What touches in the dataset is read,
        and hashed, together. Without the look at the vocabulary, which the caller has for many rows at once.
        """
        places = sorted(zip(firsts, into, strict=True), key=_first)
        done = 0
        while done < len(places):
            number = bisect_right(self._ends, places[done][0])
            shard, stop = self.shards[number], self._ends[number]
            after = bisect_left(places, stop, done, key=_first)
            file = self._files.take(shard.bin)
            try:
                over = self._fill(file, shard, stop - shard.tokens, stop, places[done:after])
            finally:
                self._files.give_back(shard.bin)
            if over:  # into the next shard, or round the ring
                self.gather([stop % self.tokens] * len(over), over)
            done = after

    def _fill(
        self, file: File, shard: Shard, start: int, stop: int, places: list[tuple[int, Tokens]]
    ) -> list[Tokens]:
        """Fill what lies in one shard (tokens start .. stop-1 of the ring); the rests that lie beyond it."""
        width, done, over = self.dtype.itemsize, 0, []
        while done < len(places):
            begin, row = places[done]
            end, after = begin + len(row), done + 1
            while after < len(places) and places[after][0] <= end and end - begin <= RUN:
                end = max(end, places[after][0] + len(places[after][1]))
                after += 1
            count = min(end, stop) - begin
            raw = file.read(shard.offset + (begin - start) * width, count * width)
            data = np.frombuffer(raw, self.dtype)
            if after == done + 1 and len(row) == count:  # the common case: one row, and all of it
                row[:] = data
            else:
                for first, row in places[done:after]:
                    mine = data[first - begin : first - begin + len(row)]
                    row[: len(mine)] = mine
                    if len(mine) < len(row):
                        over.append(row[len(mine) :])
            done = after
        return over

    @property
    def is_remote(self) -> bool:
        return isinstance(self._artifact, Remote)

    def fetch(self, first: int, count: int) -> None:
        """Have these tokens here soon, if they are far away."""
        if not isinstance(self._artifact, Remote):
            return
        while count > 0:
            first %= self.tokens
            number = bisect_right(self._ends, first)
            shard, end = self.shards[number], self._ends[number]
            take, width = min(count, end - first), self.dtype.itemsize
            offset = shard.offset + (first - self.shard_start(number)) * width
            self._artifact.fetch(shard.bin, offset, take * width)
            first, count = first + take, count - take

    def check(self, tokens: Tokens) -> None:
        """ST-D11 if a token is outside the vocabulary: it would index past the end of the embedding."""
        largest = int(tokens.max()) if tokens.size else 0
        if largest >= self.vocab_size:
            raise SecureTrainError(
                "ST-D11",
                "a token is outside the vocabulary",
                where=str(self.root),
                expected=f"below {self.vocab_size}",
                found=str(largest),
                next_step="prepare the dataset again with the tokenizer of this run",
            )

    # --- documents -------------------------------------------------------------------------------------

    def document_ends(self, first: int, count: int) -> Tokens:
        """Where documents end within the `count` tokens from `first` on: positions 1..count, increasing."""
        parts, done = [np.empty(0, np.int64)], 0
        while done < count:
            number = bisect_right(self._ends, first)
            start = self._ends[number] - self.shards[number].tokens
            take = min(count - done, self._ends[number] - first)
            ends = self.shard_ends(self.shards[number])
            # In the type of `ends`: numpy would convert all of them otherwise.
            bounds = np.array([first - start, first - start + take]).astype(ends.dtype)
            low, high = np.searchsorted(ends, bounds, side="right")
            parts.append(ends[low:high].astype(np.int64) - (first - start) + done)
            done += take
            first = (first + take) % self.tokens
        return np.concatenate(parts)

    def shard_ends(self, shard: Shard) -> npt.NDArray[Any]:
        """The document ends of a shard, checked whole; kept while memory for it lasts."""
        (ends,) = self._indices.get(shard.idx, lambda: self._load_ends(shard))
        return ends

    def _load_ends(self, shard: Shard) -> tuple[npt.NDArray[Any]]:
        ends = self._whole(shard.idx, END)
        if ends[0] == 0 or ends[-1] != shard.tokens or bool((ends[1:] <= ends[:-1]).any()):
            raise _stale(
                self.root / shard.idx,
                "a document index does not describe its shard",
                f"increasing ends up to {shard.tokens}",
                f"{len(ends)} ends up to {ends[-1]}",
            )
        return (ends.astype(np.uint32 if shard.tokens < 2**32 else np.uint64),)

    # --- packed rows -----------------------------------------------------------------------------------

    def rows(self, seq_len: int) -> list[int]:
        """How many packed rows of `seq_len` tokens each shard has; ST-D15 if it was not packed so."""
        packed = self.description.packed(seq_len)
        rows = [
            rows
            for shard, rows in zip(self.description.shards, packed.rows if packed else (), strict=False)
            if shard.split == self.split
        ]
        if not sum(rows):
            raise SecureTrainError(
                "ST-D15",
                "the dataset is not packed into rows of this length",
                where=str(self.root),
                expected=str(seq_len),
                found=", ".join(str(packed.seq_len) for packed in self.description.packings) or "no packing",
                next_step=f"prepare it with --pack {seq_len}",
            )
        return rows

    def shard_start(self, number: int) -> int:
        """The first token of a shard in the ring."""
        return self._ends[number] - self.shards[number].tokens

    def pieces(self, number: int, row: int, seq_len: int) -> tuple[list[int], list[int]]:
        """Of a row of shard `number`: the first token in the ring, and the tokens, of each of its pieces."""
        table, bounds = self._indices.get((number, seq_len), lambda: self._load_pieces(number, seq_len))
        low, high, start = bounds[row], bounds[row + 1], self.shard_start(number)
        return [first + start for first in table[1, low:high].tolist()], table[2, low:high].tolist()

    def _load_pieces(self, number: int, seq_len: int) -> tuple[Tokens, Tokens]:
        """The .pack file as three rows of numbers, and where each row begins among them. Checked whole: rows
        in order and none empty or too long, pieces inside the shard, no token in two of them.
        """
        shard = self.shards[number]
        name = shard.pack(seq_len)
        rows = self.rows(seq_len)[number]
        raw = self._whole(name, PIECE).reshape(-1, 3)
        table = np.ascontiguousarray(raw.T).astype(np.int64)
        row, first, length = table
        by_place = np.argsort(first, kind="stable")
        ends = (first + length)[by_place]
        good = (
            bool((raw < MAX_TOKENS).all())  # first: what follows may then add, and count rows
            and rows <= len(raw)
            and np.array_equal(np.unique(row), np.arange(rows))
            and bool((row[1:] >= row[:-1]).all())
            and bool((length > 0).all())
            and bool((np.bincount(row, length, rows) <= seq_len).all())
            and bool((ends <= shard.tokens).all())
            and bool((first[by_place][1:] >= ends[:-1]).all())
        )
        if not good:
            raise _stale(
                self.root / name,
                "a packing does not fit its shard",
                f"{rows} rows of at most {seq_len} tokens, each token once",
                f"{len(raw)} pieces that are something else",
            )
        return table, np.searchsorted(row, np.arange(rows + 1))

    def _whole(self, name: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """A private copy of a whole file."""
        file = self._files.take(name)
        try:
            return np.frombuffer(bytes(file.read(0, file.size)), dtype)
        finally:
            self._files.give_back(name)


def _first(place: tuple[int, Tokens]) -> int:
    return place[0]


class _Cache:
    """Arrays by key, the least recently used dropped when they are more than `limit` bytes."""

    def __init__(self, limit: int) -> None:
        self._limit, self._size = limit, 0
        self._lock = threading.Lock()
        self._kept: OrderedDict[Hashable, tuple[npt.NDArray[Any], ...]] = OrderedDict()

    def get(self, key: Hashable, load: Callable[[], Arrays]) -> Arrays:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return cast(Arrays, self._kept[key])
        loaded = load()  # two threads may do the same; neither waits for the other's file
        with self._lock:
            if key not in self._kept:
                self._kept[key] = loaded
                self._size += _bytes(loaded)
            while self._size > self._limit and len(self._kept) > 1:
                self._size -= _bytes(self._kept.popitem(last=False)[1])
        return loaded


def _bytes(arrays: tuple[npt.NDArray[Any], ...]) -> int:
    return sum(array.nbytes for array in arrays)


def _described(artifact: Artifact) -> Description:
    """The description, in agreement with the manifest: names, sizes, and no data that it leaves out."""
    manifest, where = artifact.manifest, str(artifact.root)
    if manifest.kind != KIND:
        raise malformed("the artifact is not a dataset", where, KIND, manifest.kind)
    description = Description.parse(artifact.read_bytes(DESCRIPTION), where=str(artifact.root / DESCRIPTION))
    width = TYPES[description.dtype].itemsize
    sizes = {shard.idx: shard.documents * END.itemsize for shard in description.shards}
    own = {shard.bin: shard.tokens * width for shard in description.shards if not shard.data}
    for name, size in (sizes | own).items():
        found = manifest.entry(name).size
        if found != size:
            raise malformed(
                f"{name} has another size than dataset.json says", where, f"{size} bytes", f"{found} bytes"
            )
    for shard in description.shards:
        size = manifest.entry(shard.bin).size
        if shard.data and size < shard.offset + shard.tokens * width:
            raise malformed(f"{shard.bin} is too short for what dataset.json says", where)
    packs = {shard.pack(packed.seq_len) for packed in description.packings for shard in description.shards}
    for name in packs:
        if manifest.entry(name).size % (3 * PIECE.itemsize):
            raise malformed(f"{name} does not hold whole pieces", where)
    # The index of an adopted file lies beside it, under its name, and is signed with it.
    adopted = {shard.data.removesuffix(".bin") + ".idx" for shard in description.shards if shard.data}
    known = {*sizes, *own, *packs, *adopted, *(shard.data for shard in description.shards)}
    extra = [
        file.path
        for file in manifest.files
        if (file.path.endswith((".bin", ".idx")) or ".pack-" in file.path) and file.path not in known
    ]
    if extra:
        raise malformed(f"dataset.json does not mention {extra[0]}", where)
    if description.tokenizer is not None:
        tokenizer = manifest.entry(TOKENIZER).sha256
        if tokenizer != description.tokenizer:
            raise malformed(
                "tokenizer.json is not the one of dataset.json", where, description.tokenizer, tokenizer
            )
    return description


def _stale(path: Path, what: str, expected: str, found: str) -> SecureTrainError:
    return SecureTrainError(
        "ST-D07",
        what,
        where=str(path),
        expected=expected,
        found=found,
        next_step="prepare the dataset again",
    )
