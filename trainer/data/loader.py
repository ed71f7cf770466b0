"""The stateful loader: batches of the one global order, for whichever rank asks, from wherever it was
stopped.

It joins samples.py (which sample is number g, and its tokens) and state.py (where a run stands). What it
promises:

1. Sample g is a pure function of (algorithm, manifest digests, seed, schedule, g). Ranks, threads,
   read-ahead, batch size and restarts are not inputs.
2. Its state is JSON under 1 KB, counts the samples that were *handed out* (not those read ahead), and is the
   same on every rank. Going on from it is exact, costs the same at any sample, and may use other ranks and
   batch sizes.
3. A state that does not fit the run is refused. So is a changed byte; nothing is ever skipped, because a
   skipped sample changes the order silently.
4. The transcript in the state is a digest of what was consumed, in order; see `state.Transcript`.

Reading, hashing and copying release the interpreter lock, so a thread hides them; no worker processes, no
torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Self

import numpy as np

from supplychain.artifact import SecureTrainError
from trainer.data.batch import Batch
from trainer.data.dataset import Dataset
from trainer.data.order import MAX_SAMPLES, Stage, Window
from trainer.data.packing import PACKINGS
from trainer.data.samples import SPAN, Samples, check_size
from trainer.data.state import Cursor
from trainer.data.transform import Transform

FETCHES = 4  # downloads at one time


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
        packing: str = "concat",
        window: Window | None = None,
        transform: Transform | None = None,
        boundaries: bool = False,
        lookahead: int = 0,
    ) -> None:
        """`stages` name datasets by digest; without them each dataset counts by its size. `rank` of `world`
        is the data-parallel one: ranks that share it get the same rows. The run ends before sample `end`.
        `prefetch` global batches are read ahead by `threads` threads; 0 of either reads when asked.
        `packing` is "concat", or "rows" of a dataset that was packed; `window` shuffles near instead of
        everywhere. `transform` changes samples as they are read; `boundaries` adds document ends to batches.
        Of remote datasets the chunks of the next `lookahead` samples are fetched in the order of their use.
        """
        check_batch(seq_len, global_batch, rank, world)
        self._samples = Samples(
            datasets,
            seq_len=seq_len,
            seed=seed,
            stages=stages,
            packing=packing,
            window=window,
            transform=transform,
            boundaries=boundaries,
            spans=16 + 4 * (global_batch // SPAN),
        )
        self._global_batch, self._rank, self._world = global_batch, rank, world
        self._end = MAX_SAMPLES if end is None else end
        self._prefetch, self._threads = prefetch, threads
        self._cursor = self.cursor()
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: deque[Future[Batch]] = deque()  # the batches from `consumed` on, in order
        self._submitted = 0
        self._lookahead = lookahead if self._samples.is_remote else 0
        self._fetching: ThreadPoolExecutor | None = None
        self._sent_for = 0  # before this sample

    # --- iterating -------------------------------------------------------------------------------------

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self.consumed >= self._end:
            raise StopIteration
        self._send_for()
        batch = self._next_read_ahead() if self._prefetch and self._threads else self.read(self.consumed)
        self._cursor.advance(batch.size)
        return batch

    def _next_read_ahead(self) -> Batch:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="loader")
        while len(self._ahead) <= self._prefetch and self._submitted < self._end:
            self._ahead.append(self._pool.submit(self.read, self._submitted))
            self._submitted += self.size_at(self._submitted)
        try:
            batch = self._ahead[0].result()
        except Exception:
            self._forget_ahead()  # who goes on after an error meets the same batch again, not the next one
            raise
        self._ahead.popleft()
        return batch

    def _send_for(self) -> None:
        """Fetch what this rank will read within the lookahead. Which chunks these are, the order says."""
        if self._lookahead and self._fetching is None:
            self._fetching = ThreadPoolExecutor(FETCHES, thread_name_prefix="fetch")
        self._sent_for = max(self._sent_for, self.consumed)
        until = min(self.consumed + self._lookahead, self._end)
        while self._fetching is not None and self._sent_for < until:
            first, size = self._sent_for, self.size_at(self._sent_for)
            begin, real, _ = rank_slice(size, self._global_batch, self._rank, self._world)
            self._fetching.submit(self._samples.fetch, first + begin, real)  # reading tells what went wrong
            self._sent_for += size

    def _forget_ahead(self) -> None:
        for future in self._ahead:
            future.cancel()
        self._ahead.clear()
        self._submitted = self._sent_for = self.consumed

    def close(self) -> None:
        self._forget_ahead()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        if self._fetching is not None:
            self._fetching.shutdown(cancel_futures=True)
            self._fetching = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- one batch -------------------------------------------------------------------------------------

    def size_at(self, first: int) -> int:
        """Samples of the global batch that starts at sample `first`; 0 at the end of the run."""
        return min(self._global_batch, self._end - first)

    def read(self, first: int) -> Batch:
        """The rows of this rank in the global batch that starts at sample `first`. Changes no state; from
        any thread."""
        size = self.size_at(first)
        begin, real, rows = rank_slice(size, self._global_batch, self._rank, self._world)
        found = self._samples.read(first + begin, real, rows)
        return Batch(first, size, real, found.tokens, found.predicted, found.ends)

    # --- state -----------------------------------------------------------------------------------------

    @property
    def consumed(self) -> int:
        """Samples of the global order that were handed out, over all ranks."""
        return self._cursor.consumed

    @property
    def transcript(self) -> str:
        """The digest (hex) of the samples handed out so far."""
        return self._cursor.transcript

    def cursor(self) -> Cursor:
        """Another place in the same order, for who counts by himself what was consumed; at its beginning."""
        return Cursor(self._samples, self._end)

    def state_dict(self) -> dict[str, str]:
        """Everything that is needed to go on; the same on every rank."""
        return self._cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Go on from a state, also in the middle of an iteration; ST-D10 if it does not fit this run."""
        self._cursor.load_state_dict(state)
        self._forget_ahead()


def validation_batches(
    dataset: Dataset,
    *,
    seq_len: int,
    global_batch: int,
    rank: int = 0,
    world: int = 1,
    batches: int | None = None,
    packing: str = "concat",
    boundaries: bool = False,
) -> Iterator[Batch]:
    """The samples of a (validation) split from first to last, the same every time; at most `batches` of
    them."""
    check_batch(seq_len, global_batch, rank, world)
    packed = PACKINGS[packing](dataset, seq_len, 0)
    samples = (dataset.tokens - 1) // seq_len if packing == "concat" else packed.samples
    check_size(dataset, samples, seq_len)
    if batches is not None:
        samples = min(samples, batches * global_batch)
    for first in range(0, samples, global_batch):
        size = min(global_batch, samples - first)
        begin, real, rows = rank_slice(size, global_batch, rank, world)
        numbers = np.arange(first + begin, first + begin + real)
        places = packed.places(np.zeros_like(numbers), numbers).tolist()
        tokens = np.zeros((rows, seq_len + 1), np.int64)
        predicted = np.zeros(rows, np.int64)
        predicted[:real] = packed.read(places, list(tokens[:real]))
        dataset.check(tokens)
        empty = [np.empty(0, np.int64)] * (rows - real)
        ends = (*map(packed.ends, places), *empty) if boundaries else None
        yield Batch(first, size, real, tokens, predicted, ends)


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
