"""Which sample is number g of a run: the permutation, the mixture, the schedule of stages, the packing.

Everything here is a pure function of (name of the order, manifest digests, seed, schedule, g): no I/O, no
state, integers only, the same on every platform. World size, ranks, threads, batch sizes and restarts are
not inputs, so they cannot matter.

    g --stage, mixture--> (source, ordinal) --permutation--> (source, epoch, index) --packing--> place

These orders are frozen. A change of any result needs a new name beside the old one: golden vectors in
tests/data hold it. They are shuffles, not ciphers.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from supplychain.artifact import SecureTrainError, canonical_json

ORDER = "feistel6/v1"
PACKING = "concat/v1"
ROWS = "rows/v1"  # the other packing: one sample is one row of the dataset's .pack files

MAX_SEED = 2**64 - 1
MAX_SAMPLES = 2**62  # of a source, and of a run: keeps all index arithmetic inside 64 bits
MAX_WEIGHT = 2**50  # sum of one stage's weights
MAX_COUNT = 1024  # samples located in one call: keeps (sum of weights x count) inside 64 bits

Indices = npt.NDArray[np.int64]
_Words = npt.NDArray[np.uint64]


# --- the permutation -----------------------------------------------------------------------------------
#
# A Feistel network over the smallest power of two that holds n values, and cycle walking: a result that is
# not below n is put through again. Fewer than two passes are expected, and nothing is stored, whatever n
# is. Below 2^16 values the network would show a bias; there a sort by keyed words is exact, and takes a few
# milliseconds once per epoch.

_FEW = 2**16
_ROUNDS = 6
_MULTIPLY_1 = np.uint64(0xFF51AFD7ED558CCD)  # the constants of MurmurHash3's finalizer
_MULTIPLY_2 = np.uint64(0xC4CEB9FE1A85EC53)


def permute(
    positions: Indices, n: int, seed: int, digest: str, epoch: int, purpose: str = "permutation"
) -> Indices:
    """Where `positions` (each in 0..n-1) go under the permutation of n values that this seed, source and
    epoch have for this purpose."""
    if n < _FEW:
        return _sorted(n, seed, digest, epoch, purpose)[positions]
    bits = (n - 1).bit_length()
    keys = _words(purpose, seed, digest, epoch, _ROUNDS)
    values = _feistel(positions.astype(np.uint64), bits, keys)
    outside = np.flatnonzero(values >= n)
    while outside.size:
        values[outside] = _feistel(values[outside], bits, keys)
        outside = outside[values[outside] >= n]
    return values.astype(np.int64)


def _feistel(values: _Words, bits: int, keys: tuple[int, ...]) -> _Words:
    """A bijection of 0..2^bits-1: the two halves are mixed into each other in turn."""
    high_bits, low_bits = bits // 2, bits - bits // 2
    high, low = values >> np.uint64(low_bits), values & np.uint64((1 << low_bits) - 1)
    for number, key in enumerate(keys):
        if number % 2 == 0:
            high ^= _mix(low, key) >> np.uint64(64 - high_bits)
        else:
            low ^= _mix(high, key) >> np.uint64(64 - low_bits)
    return (high << np.uint64(low_bits)) | low


@lru_cache(maxsize=128)  # of at most half a megabyte each
def _sorted(n: int, seed: int, digest: str, epoch: int, purpose: str) -> Indices:
    first, second = _words(purpose, seed, digest, epoch, 2)
    order = np.argsort(_mix(_mix(np.arange(n, dtype=np.uint64), first), second), kind="stable").astype(
        np.int64
    )
    order.flags.writeable = False  # it is shared
    return order


def _mix(values: _Words, key: int) -> _Words:
    """Multiply, fold, multiply, modulo 2^64: the upper bits depend on every bit of value and key."""
    mixed = (values ^ np.uint64(key)) * _MULTIPLY_1
    mixed ^= mixed >> np.uint64(32)
    mixed *= _MULTIPLY_2
    return mixed


@lru_cache(maxsize=4096)
def _words(purpose: str, seed: int, digest: str, epoch: int, count: int) -> tuple[int, ...]:
    """`count` 64-bit words that depend on everything given, and on nothing else."""
    text = f"{ORDER} {purpose} {seed} {digest} {epoch}"
    return tuple(
        int.from_bytes(hashlib.sha256(f"{text} {number}".encode()).digest()[:8], "little")
        for number in range(count)
    )


# --- the scope of the permutation ----------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """A permutation that stays near: for data that is fetched, or hashed, in larger parts than a sample.

    An epoch is cut into chunks of `chunk` successive samples, the last of which may be short. The full
    chunks are permuted, the short one stays last. `chunks` of them at a time make a window, and the samples
    of a window are permuted among each other, so a stretch of the order touches few chunks. A window of one
    chunk is read in its own order.
    """

    chunk: int
    chunks: int

    @property
    def name(self) -> str:
        return f"window/v1/{self.chunk}x{self.chunks}"

    def permute(self, positions: Indices, n: int, seed: int, digest: str, epoch: int) -> Indices:
        full = n // self.chunk  # chunks; the windows are cut from these, so the short one shifts no window
        windows = max(1, -(-full // self.chunks))
        number = np.minimum(positions // (self.chunk * self.chunks), windows - 1)
        within = positions - number * (self.chunk * self.chunks)
        if self.chunks > 1:
            for window in np.unique(number):
                mine = number == window
                last = window == windows - 1
                size = n - int(window) * self.chunk * self.chunks if last else self.chunk * self.chunks
                purpose = f"window/v1 {window}"
                within[mine] = permute(within[mine], size, seed, digest, epoch, purpose)
        slot, place = np.divmod(within, self.chunk)
        slot += number * self.chunks
        whole = slot < full
        slot[whole] = permute(slot[whole], full, seed, digest, epoch, "window/v1 chunks")
        found: Indices = slot * self.chunk + place
        return found


# --- the mixture ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Node:
    """A subtree of sources. A leaf has a source and no children."""

    weight: int
    source: int = -1
    left: _Node | None = None
    right: _Node | None = None


class Mixture:
    """Exact apportionment of samples to sources with integer weights: after g samples each source was taken
    within two of g * weight / sum, for every g and every set of weights.

    The sources are the leaves of a binary tree. A node that was reached c times sent round(c * left / weight)
    of them to its left child and the rest to its right, so each node adds at most half a sample of error, and
    passes on its own in proportion. Sorted by weight and cut where it balances best, no inner child has more
    than two thirds of its parent. So the error is at most 1/2 * (1 + 1 + 2/3 + 4/9 + ...) = 2. Each sample
    raises just one source's count, which is where it comes from, so sources are spread as evenly as can be.
    """

    def __init__(self, weights: Sequence[int]) -> None:
        """`weights` in an order that does not depend on names (ties between equal weights go by position)."""
        ranked = sorted(range(len(weights)), key=lambda source: -weights[source])
        self._root = _tree([(weights[source], source) for source in ranked])
        self._sources = len(weights)

    def counts(self, taken: int) -> list[int]:
        """How often each source is among the first `taken` samples; exact at any size."""
        counts = [0] * self._sources
        pending = [(self._root, taken)]
        while pending:
            node, count = pending.pop()
            if node.left is None or node.right is None:
                counts[node.source] = count
            else:
                left = (2 * count * node.left.weight + node.weight) // (2 * node.weight)
                pending += [(node.left, left), (node.right, count - left)]
        return counts

    def assign(self, first: int, count: int) -> tuple[Indices, Indices]:
        """Of the samples first .. first+count-1: the source, and how often that source came before."""
        sources, ordinals = np.empty(count, np.int64), np.empty(count, np.int64)
        pending = [(self._root, first, np.arange(count))]
        while pending:
            node, before, samples = pending.pop()
            if node.left is None or node.right is None:
                sources[samples] = node.source
                ordinals[samples] = before + np.arange(samples.size)
                continue
            # round(c * left / weight) for c = before .. before+size, relative to its first value. The first
            # is exact in Python's integers; the steps fit into 64 bits because weights and counts are
            # bounded.
            left, remainder = divmod(2 * before * node.left.weight + node.weight, 2 * node.weight)
            steps = np.arange(samples.size + 1, dtype=np.uint64) * np.uint64(2 * node.left.weight)
            lefts = (steps + np.uint64(remainder)) // np.uint64(2 * node.weight)
            goes_left = lefts[1:] != lefts[:-1]
            pending += [
                (node.left, left, samples[goes_left]),
                (node.right, before - left, samples[~goes_left]),
            ]
        return sources, ordinals


def _tree(leaves: list[tuple[int, int]]) -> _Node:
    """The tree over (weight, source), heaviest first."""
    total = sum(weight for weight, _ in leaves)
    if len(leaves) == 1:
        return _Node(total, source=leaves[0][1])
    best, cut, prefix = total, 1, 0
    for position, (weight, _) in enumerate(leaves[:-1], start=1):
        prefix += weight
        if abs(2 * prefix - total) < best:
            best, cut = abs(2 * prefix - total), position
    return _Node(total, left=_tree(leaves[:cut]), right=_tree(leaves[cut:]))


# --- the schedule --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Source:
    """A dataset as the order sees it: its manifest's digest (hex), and how many samples one epoch has."""

    digest: str
    samples: int


@dataclass(frozen=True)
class Stage:
    """From global sample `start` on, samples come from the sources (by manifest digest) in `weights`."""

    start: int
    weights: Mapping[str, int]


@dataclass(frozen=True)
class Located:
    """Successive samples: of each its source (place in `Order.sources`), epoch, and index in the epoch."""

    source: Indices
    epoch: Indices
    index: Indices


class Order:
    """The global order of a run.

    Stages begin where they say. What a source gave before a stage stays given: the stage goes on where that
    source stands, and its weights hold from its own start, they never catch up with history. A source that
    is added, or comes back, disturbs no other. Annealing is a stage, a ramp is many.
    """

    def __init__(
        self,
        seed: int,
        sources: Sequence[Source],
        stages: Sequence[Stage],
        window: Window | None = None,
    ) -> None:
        """Every epoch of a source is shuffled as a whole, or within a `window`."""
        _check(seed, sources, stages, window)
        self.seed = seed
        self._window = window
        self.sources = tuple(sorted(sources, key=lambda source: source.digest))
        self.stages = tuple(stages)
        place = {source.digest: number for number, source in enumerate(self.sources)}
        self._starts = [stage.start for stage in stages]
        self._members: list[Indices] = []  # of each stage: the sources that it draws from,
        self._mixtures: list[Mixture] = []  # how it mixes them,
        self._given: list[Indices] = []  # and how much every source of the run gave before it
        given = np.zeros(len(self.sources), np.int64)
        for stage, end in zip(self.stages, [*self._starts[1:], None], strict=True):
            members = np.array(sorted(place[digest] for digest in stage.weights), np.int64)
            mixture = Mixture([stage.weights[self.sources[member].digest] for member in members])
            self._members.append(members)
            self._mixtures.append(mixture)
            self._given.append(given.copy())
            if end is not None:
                given[members] += mixture.counts(end - stage.start)

    @property
    def name(self) -> str:
        return self._window.name if self._window else ORDER

    def locate(self, first: int, count: int) -> Located:
        """Samples first .. first+count-1, count <= MAX_COUNT. Costs the same at any `first`."""
        if first < 0 or not 0 <= count <= MAX_COUNT or first + count > MAX_SAMPLES:
            raise ValueError(f"samples {first} to {first + count}")  # a bug of the caller's
        sources, ordinals = np.empty(count, np.int64), np.empty(count, np.int64)
        done = 0
        while done < count:
            stage = self._stage_at(first + done)
            after = self._starts[stage + 1] if stage + 1 < len(self._starts) else MAX_SAMPLES
            now = slice(done, min(count, after - first))
            which, within = self._mixtures[stage].assign(first + done - self._starts[stage], now.stop - done)
            sources[now] = self._members[stage][which]
            ordinals[now] = within + self._given[stage][sources[now]]
            done = now.stop
        return self._shuffled(sources, ordinals)

    def given(self, taken: int) -> dict[str, int]:
        """How many samples each source (by digest) gave among the first `taken` samples of the run."""
        stage = self._stage_at(taken)
        counts = self._given[stage].copy()
        counts[self._members[stage]] += self._mixtures[stage].counts(taken - self._starts[stage])
        return {source.digest: int(count) for source, count in zip(self.sources, counts, strict=True)}

    def prefix_digest(self, taken: int) -> str:
        """What decided the first `taken` samples: the stages that began before, and their sources. Two
        schedules that agree here agree on those samples; they may differ afterwards.
        """
        begun = [stage for stage in self.stages if stage.start < taken]
        used = {digest for stage in begun for digest in stage.weights}
        document = {
            "stages": [
                {"start": str(stage.start), "weights": {d: str(w) for d, w in stage.weights.items()}}
                for stage in begun
            ],
            "sources": {s.digest: str(s.samples) for s in self.sources if s.digest in used},
        }
        return hashlib.sha256(canonical_json(document)).hexdigest()

    def _stage_at(self, sample: int) -> int:
        return bisect_right(self._starts, sample) - 1

    def _shuffled(self, sources: Indices, ordinals: Indices) -> Located:
        epochs, indices = np.empty_like(ordinals), np.empty_like(ordinals)
        shuffle = self._window.permute if self._window else permute
        for number in np.unique(sources):
            source = self.sources[number]
            mine = np.flatnonzero(sources == number)
            epochs[mine], positions = np.divmod(ordinals[mine], source.samples)
            for epoch in np.unique(epochs[mine]):
                now = epochs[mine] == epoch
                indices[mine[now]] = shuffle(
                    positions[now], source.samples, self.seed, source.digest, int(epoch)
                )
        return Located(sources, epochs, indices)


def _check(seed: int, sources: Sequence[Source], stages: Sequence[Stage], window: Window | None) -> None:
    def refuse(what: str, found: object) -> SecureTrainError:
        return SecureTrainError(
            "ST-D08", what, found=str(found), next_step="correct the data schedule of the run"
        )

    if not 0 <= seed <= MAX_SEED:
        raise refuse("the seed is not an integer of 64 bits", seed)
    if window and not (window.chunk >= 1 and window.chunks >= 1 and window.chunk * window.chunks < 2**32):
        raise refuse("the window of the shuffle is empty, or too large", window.name)
    digests = [source.digest for source in sources]
    if len(set(digests)) != len(digests):
        raise refuse("one dataset is given twice", next(d for d in digests if digests.count(d) > 1))
    for source in sources:
        if not 1 <= source.samples < MAX_SAMPLES:
            raise refuse(f"dataset {source.digest} has no samples, or too many", source.samples)
    starts = [stage.start for stage in stages]
    if not starts or starts[0] != 0 or starts != sorted(set(starts)) or starts[-1] > MAX_SAMPLES:
        raise refuse("stages must begin at sample 0, and each after the one before", starts)
    for stage in stages:
        unknown = set(stage.weights) - set(digests)
        if unknown or not stage.weights:
            raise refuse(f"the stage at sample {stage.start} names no dataset of the run", sorted(unknown))
        if min(stage.weights.values()) < 1 or sum(stage.weights.values()) > MAX_WEIGHT:
            raise refuse(
                f"the weights of the stage at sample {stage.start} are not positive integers, or too large",
                dict(stage.weights),
            )


# --- the packing ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Concat:
    """Concatenate and chunk: a source is one ring of tokens, cut into samples of `seq_len` tokens.

    A sample also reads the token after its last one, for the labels. The first epoch begins at token 0,
    each later one at a place of its own, so that documents are cut elsewhere and the few tokens that fill
    no sample are others.
    """

    digest: str
    tokens: int
    seq_len: int
    seed: int

    @property
    def samples(self) -> int:
        return self.tokens // self.seq_len

    def first_tokens(self, epochs: Indices, indices: Indices) -> Indices:
        """The first token of each sample, in 0..tokens-1. What runs over the end goes on at token 0."""
        begins = np.zeros_like(epochs)
        for epoch in np.unique(epochs[epochs > 0]):
            (word,) = _words("rotation", self.seed, self.digest, int(epoch), 1)
            begins[epochs == epoch] = word % self.tokens
        return (begins + indices * self.seq_len) % self.tokens
