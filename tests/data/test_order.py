"""The order contract: what it is (golden vectors, a second implementation), and what it promises."""

from __future__ import annotations

import json
import random
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from supplychain.artifact import SecureTrainError
from tests.data import reference
from trainer.data.order import MAX_COUNT, Concat, Mixture, Order, Source, Stage, Window, permute

GOLDEN = json.loads(Path(__file__).with_name("golden.json").read_bytes())
A, B, C = "aa" * 32, "bb" * 32, "cc" * 32
DAY_LONG = 10**12  # samples: far beyond any run


def order_of(stages: list[tuple[int, dict[str, int]]], seed: int = 1, **samples: int) -> Order:
    digests = {"a": A, "b": B, "c": C}
    return Order(
        seed,
        [Source(digests[name], count) for name, count in samples.items()],
        [
            Stage(start, {digests[name]: weight for name, weight in weights.items()})
            for start, weights in stages
        ],
    )


def sequence(order: Order, first: int, count: int) -> list[tuple[str, int, int]]:
    """(digest, epoch, index) of each sample."""
    found: list[tuple[str, int, int]] = []
    while count:
        located = order.locate(first, min(count, MAX_COUNT))
        for source, epoch, index in zip(located.source, located.epoch, located.index, strict=True):
            found.append((order.sources[source].digest, int(epoch), int(index)))
        first, count = first + len(located.source), count - len(located.source)
    return found


# --- what it is: frozen --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", GOLDEN["permutations"], ids=lambda case: f"n={case['n']}")
def test_golden_permutations(case: dict[str, Any]) -> None:
    found = permute(np.array(case["positions"]), case["n"], case["seed"], case["digest"], case["epoch"])
    assert found.tolist() == case["values"]


@pytest.mark.parametrize("case", GOLDEN["orders"], ids=lambda case: case["name"])
def test_golden_orders(case: dict[str, Any]) -> None:
    packings = {
        digest: Concat(digest, tokens, case["seq_len"], case["seed"])
        for digest, tokens in case["tokens"].items()
    }
    order = Order(
        case["seed"],
        [Source(digest, packing.samples) for digest, packing in packings.items()],
        [Stage(start, weights) for start, weights in case["stages"]],
    )
    for g, digest, epoch, index, token in case["samples"]:
        assert sequence(order, g, 1) == [(digest, epoch, index)]
        assert packings[digest].first_tokens(np.array([epoch]), np.array([index])).tolist() == [token]


def test_agrees_with_the_reference_on_random_runs() -> None:
    dice = random.Random(5)
    for _ in range(12):
        seed, seq_len = dice.getrandbits(64), dice.choice([1, 7, 128])
        sizes = [seq_len * dice.choice([1, 2, 5, 900, 70_000]) + dice.randrange(seq_len) for _ in range(4)]
        tokens = {f"{dice.getrandbits(256):064x}": size for size in sizes}
        starts = [0, *sorted(dice.sample(range(1, 3000), dice.randint(0, 3)))]
        stages = []
        for start in starts:
            chosen = dice.sample(sorted(tokens), dice.randint(1, 4))
            stages.append((start, {digest: dice.choice([1, 1, 3, 10**6]) for digest in chosen}))
        packings = {digest: Concat(digest, size, seq_len, seed) for digest, size in tokens.items()}
        order = Order(
            seed,
            [Source(digest, packing.samples) for digest, packing in packings.items()],
            [Stage(start, weights) for start, weights in stages],
        )
        for first in (0, 1000, starts[-1] - 2 if starts[-1] > 2 else 2, 10**10):
            for g, (digest, epoch, index) in enumerate(sequence(order, first, 4), start=first):
                token = int(packings[digest].first_tokens(np.array([epoch]), np.array([index]))[0])
                assert (digest, epoch, index, token) == reference.sample(g, seed, tokens, seq_len, stages)


# --- the permutation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 5, 64, 1000, 2**16 - 1, 2**16, 2**16 + 1, 2**17, 100_003])
def test_each_value_comes_once(n: int) -> None:
    found = permute(np.arange(n), n, 3, A, 2)
    assert np.array_equal(np.sort(found), np.arange(n))


def test_depends_on_seed_source_and_epoch() -> None:
    found = {
        tuple(permute(np.arange(50), 100_000, *key).tolist())
        for key in [(1, A, 0), (2, A, 0), (1, B, 0), (1, A, 1)]
    }
    assert len(found) == 4


def test_all_orders_of_few_are_equally_likely() -> None:
    seen = Counter(tuple(permute(np.arange(4), 4, seed, A, 0).tolist()) for seed in range(4800))
    assert len(seen) == 24
    assert (
        sum((count - 200) ** 2 / 200 for count in seen.values()) < 60
    )  # chi-square with 23 degrees of freedom


def test_neighbours_do_not_stay_together() -> None:
    n, cells = 300_007, 32
    found = permute(np.arange(n), n, 9, A, 0)
    cell = found * cells // n
    pairs = np.bincount(cell[:-1] * cells + cell[1:], minlength=cells**2)
    expected = (n - 1) / cells**2
    z = (((pairs - expected) ** 2 / expected).sum() - cells**2) / (2 * cells**2) ** 0.5
    assert abs(z) < 5
    assert abs(np.mean((found[1:] ^ found[:-1]) & 1) - 0.5) < 0.01


def test_a_trillion_values_need_no_memory() -> None:
    n = 10**12 + 39
    found = permute(np.array([0, 1, n - 1]), n, 1, A, 0)
    assert found.tolist() == [reference.permute(position, n, 1, A, 0) for position in (0, 1, n - 1)]


# --- the window ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", GOLDEN["windows"], ids=lambda case: f"{case['chunk']}x{case['chunks']}")
def test_golden_windows(case: dict[str, Any]) -> None:
    window = Window(case["chunk"], case["chunks"])
    positions = np.array(case["positions"])
    found = window.permute(positions, case["n"], case["seed"], case["digest"], case["epoch"])
    assert found.tolist() == case["values"]


SHAPES = [(1, 1), (4, 1), (4, 3), (7, 2), (16, 5), (1000, 2), (5, 1000)]


@pytest.mark.parametrize(("chunk", "chunks"), SHAPES)
@pytest.mark.parametrize("n", [1, 3, 4, 60, 61, 63, 997, 1000])
def test_a_window_gives_each_sample_once(n: int, chunk: int, chunks: int) -> None:
    found = Window(chunk, chunks).permute(np.arange(n), n, 3, A, 2)
    assert np.array_equal(np.sort(found), np.arange(n))
    reference_found = [reference.window_permute(p, n, 3, A, 2, chunk, chunks) for p in range(n)]
    assert found.tolist() == reference_found


def test_a_window_touches_just_its_chunks() -> None:
    """What the short last chunk must not do is shift where windows begin."""
    n, chunk, chunks = 10_007, 16, 8
    found = Window(chunk, chunks).permute(np.arange(n), n, 1, A, 0)
    size = chunk * chunks
    for begin in range(0, n // size * size - size, size):
        assert len(np.unique(found[begin : begin + size] // chunk)) == chunks
    assert (np.diff(found[:size]) != 1).mean() > 0.9


def test_a_window_of_one_chunk_keeps_its_order() -> None:
    found = Window(4, 1).permute(np.arange(1000), 1000, 1, A, 0).reshape(-1, 4)
    assert (np.diff(found, axis=1) == 1).all()
    assert sorted(found[:, 0].tolist()) == list(range(0, 1000, 4))
    assert found[:, 0].tolist() != sorted(found[:, 0].tolist())


def test_a_window_is_part_of_the_order() -> None:
    sources, stages = [Source(A, 100_000), Source(B, 999)], [Stage(0, {A: 3, B: 1})]
    near = Order(1, sources, stages, Window(64, 4))
    far = Order(1, sources, stages)
    assert near.name == "window/v1/64x4"
    assert far.name == "feistel6/v1"
    assert [d for d, _, _ in sequence(near, 0, 500)] == [d for d, _, _ in sequence(far, 0, 500)]
    mine = [index for digest, _, index in sequence(near, 0, 340) if digest == A]
    assert len({index // 64 for index in mine[:256]}) == 4


@pytest.mark.parametrize("window", [Window(0, 1), Window(1, 0), Window(2**31, 2)])
def test_impossible_windows_are_refused(window: Window) -> None:
    with pytest.raises(SecureTrainError) as refused:
        Order(1, [Source(A, 5)], [Stage(0, {A: 1})], window)
    assert refused.value.code == "ST-D08"


# --- the mixture ---------------------------------------------------------------------------------------

_DICE = random.Random(11)
WEIGHTS = {
    "one": [5],
    "equal": [1, 1, 1],
    "thirds": [2, 1],
    "extreme": [1, 10**9],
    "forty random": [_DICE.randint(1, 10**9) for _ in range(40)],
    "forty powers": [2**n for n in range(40)],
    "forty equal": [7] * 40,
    "heavy first": [10**6] + [1] * 39,
    "fibonacci": [1, 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377, 610],
}


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_never_more_than_two_samples_off(weights: list[int]) -> None:
    mixture, total, dice = Mixture(weights), sum(weights), random.Random(1)
    points = [*range(60), *(dice.randrange(10 ** dice.randint(2, 12)) for _ in range(300)), DAY_LONG]
    for taken in points:
        counts = mixture.counts(taken)
        assert sum(counts) == taken
        assert (
            max(abs(count - Fraction(taken * w, total)) for count, w in zip(counts, weights, strict=True))
            <= 2
        )


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS.keys())
@pytest.mark.parametrize("first", [0, 1, 1023, 10**6 + 7, DAY_LONG])
def test_assign_is_what_counts_count(weights: list[int], first: int) -> None:
    mixture = Mixture(weights)
    sources, ordinals = mixture.assign(first, MAX_COUNT)
    counts = mixture.counts(first)
    for source, ordinal in zip(sources.tolist(), ordinals.tolist(), strict=True):
        assert ordinal == counts[source]
        counts[source] += 1
    assert counts == mixture.counts(first + MAX_COUNT)


# --- the schedule --------------------------------------------------------------------------------------


def test_nothing_is_repeated_or_lost_through_stage_changes() -> None:
    """Also where a stage ends in the middle of anything, a source pauses, and another one joins."""
    stages = [
        (0, {"a": 1, "b": 1}),
        (777, {"a": 1}),
        (1301, {"a": 3, "b": 7, "c": 5}),
        (1302, {"b": 1, "c": 1}),
    ]
    order = order_of(stages, a=1000, b=300, c=70_000)
    seen: dict[str, list[tuple[int, int]]] = {A: [], B: [], C: []}
    for digest, epoch, index in sequence(order, 0, 5000):
        seen[digest].append((epoch, index))
    assert {digest: len(places) for digest, places in seen.items()} == order.given(5000)
    for digest, size in ((A, 1000), (B, 300), (C, 70_000)):
        assert len(set(seen[digest])) == len(seen[digest])
        for start in range(0, len(seen[digest]) - size, size):
            whole = seen[digest][start : start + size]
            assert {epoch for epoch, _ in whole} == {start // size}
            assert {index for _, index in whole} == set(range(size))


def test_epochs_are_shuffled_differently() -> None:
    found = sequence(order_of([(0, {"a": 1})], a=500), 0, 1000)
    first, second = [i for _, _, i in found[:500]], [i for _, _, i in found[500:]]
    assert sorted(first) == sorted(second)
    assert sum(x == y for x, y in zip(first, second, strict=True)) < 10


def test_weights_never_catch_up_with_history() -> None:
    """The loader that counts tokens so far draws thousands from one source after a change of weights."""
    order = order_of([(0, {"a": 1, "b": 1}), (10_000, {"a": 9, "b": 1})], a=10**6, b=10**6)
    after = Counter(digest for digest, _, _ in sequence(order, 10_000, 100))
    assert abs(after[A] - 90) <= 2


def test_another_source_disturbs_no_order() -> None:
    alone = [(e, i) for _, e, i in sequence(order_of([(0, {"a": 1})], a=5000), 0, 300)]
    order = order_of([(0, {"a": 1, "b": 3, "c": 2})], a=5000, b=10, c=77)
    mixed = [(e, i) for digest, e, i in sequence(order, 0, 1800) if digest == A]
    assert mixed == alone[: len(mixed)]


def test_a_later_stage_changes_nothing_before() -> None:
    one = order_of([(0, {"a": 1, "b": 2})], a=500, b=500)
    two = order_of([(0, {"a": 1, "b": 2}), (1000, {"b": 1})], a=500, b=500)
    assert sequence(one, 0, 1000) == sequence(two, 0, 1000)
    assert one.prefix_digest(1000) == two.prefix_digest(1000)
    assert one.prefix_digest(1001) != two.prefix_digest(1001)


def test_the_order_of_naming_does_not_matter() -> None:
    one = Order(1, [Source(A, 50), Source(B, 60)], [Stage(0, {A: 1, B: 1})])
    two = Order(1, [Source(B, 60), Source(A, 50)], [Stage(0, {B: 1, A: 1})])
    assert sequence(one, 0, 200) == sequence(two, 0, 200)
    assert one.prefix_digest(1) == two.prefix_digest(1)


def test_a_source_of_one_sample() -> None:
    found = sequence(order_of([(0, {"a": 1, "b": 1})], a=1, b=3), 0, 12)
    assert [epoch for digest, epoch, _ in found if digest == A] == list(range(6))


def test_far_samples_are_found_like_near_ones() -> None:
    order = order_of([(0, {"a": 1, "b": 10**9}), (DAY_LONG, {"a": 2, "b": 1})], a=10**11, b=10**12)
    together = sequence(order, DAY_LONG - 500, 1000)
    assert together == [sequence(order, g, 1)[0] for g in range(DAY_LONG - 500, DAY_LONG + 500)]


@pytest.mark.parametrize(
    ("stages", "samples"),
    [
        ([], {"a": 5}),
        ([(1, {"a": 1})], {"a": 5}),
        ([(0, {"a": 1}), (0, {"a": 2})], {"a": 5}),
        ([(0, {"a": 1}), (9, {"a": 1}), (4, {"a": 2})], {"a": 5}),
        ([(0, {})], {"a": 5}),
        ([(0, {"b": 1})], {"a": 5}),
        ([(0, {"a": 0})], {"a": 5}),
        ([(0, {"a": -1, "b": 3})], {"a": 5, "b": 5}),
        ([(0, {"a": 2**50, "b": 1})], {"a": 5, "b": 5}),
        ([(0, {"a": 1})], {"a": 0}),
        ([(0, {"a": 1})], {"a": 2**62}),
    ],
)
def test_impossible_schedules_are_refused(
    stages: list[tuple[int, dict[str, int]]], samples: dict[str, int]
) -> None:
    with pytest.raises(SecureTrainError) as refused:
        order_of(stages, **samples)
    assert refused.value.code == "ST-D08"


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_seeds_have_64_bits(seed: int) -> None:
    with pytest.raises(SecureTrainError) as refused:
        order_of([(0, {"a": 1})], seed=seed, a=5)
    assert refused.value.code == "ST-D08"


def test_one_dataset_twice_is_refused() -> None:
    with pytest.raises(SecureTrainError) as refused:
        Order(1, [Source(A, 5), Source(A, 5)], [Stage(0, {A: 1})])
    assert refused.value.code == "ST-D08"


# --- the packing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "seq_len"), [(1000, 10), (1009, 10), (10, 10), (19, 10), (5, 1)])
def test_samples_of_an_epoch_do_not_overlap(tokens: int, seq_len: int) -> None:
    packing = Concat(A, tokens, seq_len, 3)
    left_out = []
    for epoch in range(4):
        firsts = packing.first_tokens(np.full(packing.samples, epoch), np.arange(packing.samples))
        covered = [(first + step) % tokens for first in firsts.tolist() for step in range(seq_len)]
        assert len(set(covered)) == len(covered) == packing.samples * seq_len
        left_out.append(frozenset(range(tokens)) - set(covered))
    assert firsts[0] != 0 or tokens < 20  # later epochs are cut elsewhere
    assert tokens % seq_len == 0 or len(set(left_out)) > 1  # no token is always left out
