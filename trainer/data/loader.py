"""The stateful loader: batches of the one global order, for whichever rank asks, from wherever it was
stopped.

It joins order.py (which sample is number g) and shards.py (verified tokens). What it promises:

1. Sample g is a pure function of (algorithm, manifest digests, seed, schedule, g). Ranks, threads,
read-ahead, batch
   size and restarts are not inputs.
2. Its state is JSON under 1 KB, counts the samples that were *handed out* (not those read ahead), and is
the same on
   every rank. Going on from it is exact, costs the same at any sample, and may use other ranks and batch
   sizes.
3. A state that does not fit the run is refused. So is a changed byte; nothing is ever skipped, because a
skipped
   sample changes the order silently.
4. The transcript in the state is a digest of what was consumed, in order; see `Transcript`.

Reading, hashing and copying release the interpreter lock, so a thread hides them; no worker processes, no
torch.
"""

from __future__ import annotations

import hashlib
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from supplychain.artifact import SecureTrainError
from trainer.data.order import MAX_SAMPLES, ORDER, PACKING, Concat, Indices, Order, Source, Stage
from trainer.data.shards import Dataset, Tokens

STATE = "urn:secure-train:loader-state:v1"
IGNORED = -100  # the label that a loss leaves out: cross_entropy's default
SPAN = 1024  # samples that are located, and chained in the transcript, at one time


@dataclass(frozen=True)
class Batch:
    """One rank's rows of a global batch. All ranks have the same number of rows at every step; where samples
    run out, or do not divide evenly, the last rows are padding without a loss.
    """

    first: int  # number of the global batch's first sample
    size: int  # samples of the global batch, over all ranks
    real: int  # rows of this rank that hold samples; the others are padding
    tokens: Tokens  # rows x (seq_len + 1)

    @property
    def inputs(self) -> Tokens:
        """rows x seq_len"""
        return self.tokens[:, :-1]

    @property
    def labels(self) -> Tokens:
        """rows x seq_len: the token after each input, IGNORED in padding."""
        labels = self.tokens[:, 1:]
        if self.real < len(labels):
            labels = labels.copy()
            labels[self.real :] = IGNORED
        return labels


class Loader:
    """Iterate over it for batches. Usable under `with`; closing stops its threads, not the datasets."""

    def __init__(
        self,
        datasets: Sequence[Dataset],
        *,
        seq_len: int,
        global_batch: int,
        seed: int,
        stages: Sequence[Stage] | None = None,
        rank: int = 0,
        world: int = 1,
        end: int | None = None,
        prefetch: int = 2,
        threads: int = 1,
    ) -> None:
        """`stages` name datasets by digest; without them each dataset counts by its size. `rank` of `world`
        is the data-parallel one: ranks that share it get the same rows. The run ends before sample `end`.
        `prefetch` global batches are read ahead by `threads` threads; 0 of either reads when asked.
        """
        check_batch(seq_len, global_batch, rank, world)
        packings = {
            dataset.digest: Concat(dataset.digest, dataset.tokens, seq_len, seed) for dataset in datasets
        }
        for dataset in datasets:
            _check_fits(dataset, datasets[0], packings[dataset.digest].samples, seq_len)
        sources = [Source(dataset.digest, packings[dataset.digest].samples) for dataset in datasets]
        stages = stages or [Stage(0, {source.digest: source.samples for source in sources})]
        self._order = Order(seed, sources, stages)
        by_digest = {dataset.digest: dataset for dataset in datasets}
        self._datasets = [by_digest[source.digest] for source in self._order.sources]
        self._packings = [packings[source.digest] for source in self._order.sources]
        self._seq_len, self._global_batch, self._rank, self._world = seq_len, global_batch, rank, world
        self._end = MAX_SAMPLES if end is None else end
        self._prefetch, self._threads = prefetch, threads
        self._span = lru_cache(maxsize=16 + 4 * (global_batch // SPAN))(self._locate_span)
        self._transcript = Transcript([source.digest for source in self._order.sources], seq_len)
        self._consumed = 0
        self._chain = self._transcript.start
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: deque[Future[Batch]] = deque()  # the batches from `_consumed` on, in order
        self._submitted = 0

    # --- iterating -------------------------------------------------------------------------------------

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._consumed >= self._end:
            raise StopIteration
        batch = self._next_read_ahead() if self._prefetch and self._threads else self._read(self._consumed)
        self._advance(batch.size)
        return batch

    def _next_read_ahead(self) -> Batch:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="loader")
        while len(self._ahead) <= self._prefetch and self._submitted < self._end:
            self._ahead.append(self._pool.submit(self._read, self._submitted))
            self._submitted += self._size_at(self._submitted)
        try:
            batch = self._ahead[0].result()
        except Exception:
            self._forget_ahead()  # who goes on after an error meets the same batch again, not the next one
            raise
        self._ahead.popleft()
        return batch

    def _forget_ahead(self) -> None:
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()
        self._submitted = self._consumed

    def close(self) -> None:
        self._forget_ahead()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- one batch -------------------------------------------------------------------------------------

    def _size_at(self, first: int) -> int:
        return min(self._global_batch, self._end - first)

    def _read(self, first: int) -> Batch:
        """The rows of this rank in the global batch that starts at sample `first`. Runs in any thread."""
        size = self._size_at(first)
        begin, real, rows = rank_slice(size, self._global_batch, self._rank, self._world)
        sources, firsts = self._located(first + begin, real)
        tokens = np.zeros((rows, self._seq_len + 1), np.int64)
        for row, source, token in zip(range(real), sources.tolist(), firsts.tolist(), strict=True):
            self._datasets[source].fill(tokens[row], token)
        self._datasets[0].check(tokens)  # one look for all: they share a vocabulary
        return Batch(first, size, real, tokens)

    def _located(self, first: int, count: int) -> tuple[Indices, Indices]:
        """Source and first token of the samples first .. first+count-1."""
        parts = []
        for number in range(first // SPAN, -(-(first + count) // SPAN)):
            part = slice(max(first - number * SPAN, 0), min(first + count - number * SPAN, SPAN))
            sources, firsts = self._span(number)
            parts.append((sources[part], firsts[part]))
        empty = np.empty(0, np.int64)
        return (
            np.concatenate([empty, *(sources for sources, _ in parts)]),
            np.concatenate([empty, *(firsts for _, firsts in parts)]),
        )

    def _locate_span(self, number: int) -> tuple[Indices, Indices]:
        located = self._order.locate(number * SPAN, SPAN)
        firsts = np.empty(SPAN, np.int64)
        for source in np.unique(located.source):
            mine = located.source == source
            firsts[mine] = self._packings[source].first_tokens(located.epoch[mine], located.index[mine])
        return located.source, firsts

    # --- state -----------------------------------------------------------------------------------------

    @property
    def consumed(self) -> int:
        """Samples of the global order that were handed out, over all ranks."""
        return self._consumed

    @property
    def transcript(self) -> str:
        """The digest (hex) of the samples handed out so far."""
        return self._transcript_at(self._consumed, self._chain).hex()

    def state_dict(self) -> dict[str, str]:
        """Everything that is needed to go on; the same on every rank."""
        return {
            "schema": STATE,
            "order": ORDER,
            "packing": PACKING,
            "seed": str(self._order.seed),
            "seq_len": str(self._seq_len),
            "schedule": self._order.prefix_digest(self._consumed),
            "consumed": str(self._consumed),
            "chain": self._chain.hex(),
            "transcript": self.transcript,
        }

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Go on from a state, also in the middle of an iteration; ST-D10 if it does not fit this run."""
        consumed = _checked_count(state)
        expected = {
            "schema": STATE,
            "order": ORDER,
            "packing": PACKING,
            "seed": str(self._order.seed),
            "seq_len": str(self._seq_len),
            "schedule": self._order.prefix_digest(consumed),
        }
        for key, value in expected.items():
            if state[key] != value:
                raise _unfit(f"the loader's state has another {_MEANINGS.get(key, key)}", value, state[key])
        if consumed > self._end:
            raise _unfit("the loader's state is past the end of the run", str(self._end), str(consumed))
        chain = bytes.fromhex(state["chain"])
        found = self._transcript_at(consumed, chain).hex()
        if found != state["transcript"] or (consumed < SPAN and chain != self._transcript.start):
            raise _unfit("the samples that the state counts are not those it saw", found, state["transcript"])
        self._consumed, self._chain = consumed, chain
        self._forget_ahead()

    def _advance(self, count: int) -> None:
        before, self._consumed = self._consumed, self._consumed + count
        for number in range(before // SPAN, self._consumed // SPAN):
            self._chain = self._transcript.extend(self._chain, *self._span(number))

    def _transcript_at(self, consumed: int, chain: bytes) -> bytes:
        begin = consumed // SPAN * SPAN
        return self._transcript.extend(chain, *self._located(begin, consumed - begin))


class Transcript:
    """The digest of what a run consumed, in order: T(0) = H(packing, length of a sample), and over spans of
    SPAN samples T(n) = H(T(start of n's span) || for each sample: digest of its manifest, its first token).

    A manifest binds the digest of every block and the description their sizes, so a token's number stands
    for its bytes: to name the range under the manifest's digest commits to the same as listing block
    digests would. It needs neither data nor block digests of the shards that other ranks read, so each rank
    computes all of it, it depends on neither ranks nor batches, and whoever has manifests and schedule can
    compute it again. That the bytes were those of the manifest is what verified reads are for.
    """

    def __init__(self, digests: Sequence[str], seq_len: int) -> None:
        self._digests = np.frombuffer(bytes.fromhex("".join(digests)), np.uint8).reshape(-1, 32)
        self.start = hashlib.sha256(f"secure-train transcript/v1 {PACKING} {seq_len}".encode()).digest()

    def extend(self, chain: bytes, sources: Indices, firsts: Indices) -> bytes:
        if not len(sources):
            return chain
        records: npt.NDArray[np.uint8] = np.concatenate(
            [self._digests[sources], firsts.astype("<u8").view(np.uint8).reshape(-1, 8)], axis=1
        )
        return hashlib.sha256(chain + records.tobytes()).digest()


def validation_batches(
    dataset: Dataset,
    *,
    seq_len: int,
    global_batch: int,
    rank: int = 0,
    world: int = 1,
    batches: int | None = None,
) -> Iterator[Batch]:
    """The samples of a (validation) split from first to last, the same every time; at most `batches` of
    them."""
    check_batch(seq_len, global_batch, rank, world)
    samples = (dataset.tokens - 1) // seq_len
    _check_fits(dataset, dataset, samples, seq_len)
    if batches is not None:
        samples = min(samples, batches * global_batch)
    for first in range(0, samples, global_batch):
        size = min(global_batch, samples - first)
        begin, real, rows = rank_slice(size, global_batch, rank, world)
        tokens = np.zeros((rows, seq_len + 1), np.int64)
        for row in range(real):
            dataset.fill(tokens[row], (first + begin + row) * seq_len)
        dataset.check(tokens)
        yield Batch(first, size, real, tokens)


def rank_slice(size: int, global_batch: int, rank: int, world: int) -> tuple[int, int, int]:
    """Of a global batch with `size` samples, contiguous parts for the ranks: (first sample, samples, rows).
    Rows are as many on every rank and at every step, so that shapes never change.
    """
    begin, after = size * rank // world, size * (rank + 1) // world
    return begin, after - begin, -(-global_batch // world)


def check_batch(seq_len: int, global_batch: int, rank: int, world: int) -> None:
    if seq_len < 1 or global_batch < 1 or not 0 <= rank < world:
        raise SecureTrainError(
            "ST-D08",
            "the shape of a batch makes no sense",
            expected="positive sizes, and a rank below the number of ranks",
            found=f"seq_len {seq_len}, global batch {global_batch}, rank {rank} of {world}",
        )


def _check_fits(dataset: Dataset, first: Dataset, samples: int, seq_len: int) -> None:
    if dataset.description.tokenizer != first.description.tokenizer:
        raise SecureTrainError(
            "ST-D09",
            "two datasets were made with different tokenizers",
            where=str(dataset.root),
            expected=f"{first.description.tokenizer} (as {first.root})",
            found=dataset.description.tokenizer,
            next_step="prepare one of them again with the tokenizer of the other",
        )
    if samples < 1:
        raise SecureTrainError(
            "ST-D09",
            f"the split {dataset.split!r} is too small for one sample",
            where=str(dataset.root),
            expected=f"more than {seq_len} tokens",
            found=str(dataset.tokens),
            next_step="use a shorter sequence length or more data",
        )


_MEANINGS = {
    "order": "algorithm",
    "schedule": "history: datasets, weights or stages differ before the sample that it counts",
    "seq_len": "sequence length",
}
_FORMS = {
    "schema": STATE,
    "order": "[a-z0-9/]{1,40}",
    "packing": "[a-z0-9/]{1,40}",
    "seed": "0|[1-9][0-9]{0,19}",
    "seq_len": "[1-9][0-9]{0,9}",
    "schedule": "[0-9a-f]{64}",
    "consumed": "0|[1-9][0-9]{0,18}",
    "chain": "[0-9a-f]{64}",
    "transcript": "[0-9a-f]{64}",
}


def _checked_count(state: Mapping[str, str]) -> int:
    """`consumed` of a foreign state that has just the fields it should, each of the right form."""
    if set(state) != set(_FORMS):
        raise _unfit(
            "the loader's state has other fields than it should", ", ".join(_FORMS), ", ".join(state)
        )
    for key, form in _FORMS.items():
        if not isinstance(state[key], str) or not re.fullmatch(form, state[key]):
            raise _unfit(f"the field {key!r} of the loader's state is malformed", form, f"{state[key]!r:.80}")
    consumed = int(state["consumed"])
    if consumed >= MAX_SAMPLES:
        raise _unfit("the loader's state counts too many samples", f"below {MAX_SAMPLES}", str(consumed))
    return consumed


def _unfit(what: str, expected: str, found: str) -> SecureTrainError:
    return SecureTrainError(
        "ST-D10",
        what,
        expected=expected,
        found=found,
        next_step="resume with the run's own data, seed and schedule; changes belong in a new stage",
    )
