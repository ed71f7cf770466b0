"""The loader's contract, by the numbers of its docstring: one global order, exact state, refusals,
transcript."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.support import SEQ_LEN, dataset, first_tokens, refusal, sign, take, write_dataset
from trainer.data import IGNORED, Dataset, Loader, Stage, validation_batches
from trainer.data.samples import SPAN
from trainer.data.state import Transcript

GLOBAL_BATCH = 12
OFFSET = 100_000  # of the second dataset's tokens, so that the two can be told apart


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[Dataset]:
    folder = tmp_path_factory.mktemp("data")
    return [dataset(folder / "big", 5003), dataset(folder / "small", 333, offset=OFFSET)]


@pytest.fixture
def make(data: list[Dataset]) -> Callable[..., Loader]:
    """A loader over both datasets, whose mixture changes after 150 samples. The small one has 20 samples,
    so it goes through many epochs; two spans of the transcript are crossed after 86 and 171 batches.
    """

    def made(**options: Any) -> Loader:
        big, small = (one.digest for one in data)
        stages = [Stage(0, {big: 3, small: 1}), Stage(150, {big: 1, small: 1})]
        given: dict[str, Any] = {
            "seq_len": SEQ_LEN,
            "global_batch": GLOBAL_BATCH,
            "seed": 5,
            "stages": stages,
        } | options
        return Loader(data, **given)

    return made


# --- 1. one global order -------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8, 12, 13])
def test_the_global_order_is_the_same_on_any_number_of_ranks(make: Callable[..., Loader], world: int) -> None:
    with make() as alone:
        expected = take(alone, 30)
    ranks = [take(make(rank=rank, world=world), 30) for rank in range(world)]
    for step, batch in enumerate(expected):
        parts = [rank[step] for rank in ranks]
        assert len({part.tokens.shape for part in parts}) == 1
        assert np.array_equal(np.concatenate([part.tokens[: part.real] for part in parts]), batch.tokens)


@pytest.mark.parametrize(
    "options", [{"threads": 0}, {"prefetch": 0}, {"threads": 4, "prefetch": 9}, {"threads": 2}]
)
def test_threads_and_reading_ahead_change_nothing(
    make: Callable[..., Loader], options: dict[str, int]
) -> None:
    with make() as one, make(**options) as other:
        for _ in range(40):
            assert np.array_equal(next(one).tokens, next(other).tokens)
        assert one.state_dict() == other.state_dict()


def test_the_batch_size_changes_nothing(make: Callable[..., Loader]) -> None:
    with make() as one, make(global_batch=GLOBAL_BATCH * 4) as other:
        assert first_tokens(take(one, 40)) == first_tokens(take(other, 10))
        assert one.state_dict() == other.state_dict()


def test_rows_are_what_the_order_says(make: Callable[..., Loader]) -> None:
    with make() as loader:
        for batch in take(loader, 30):
            steps = np.diff(batch.tokens, axis=1)
            assert set(np.unique(steps)) <= {1, 1 - 5003, 1 - 333}  # successive, or over the ring's end
            assert np.array_equal(batch.inputs[:, 1:], batch.labels[:, :-1])


def test_an_epoch_has_every_sample_once(data: list[Dataset]) -> None:
    samples = 5003 // SEQ_LEN
    with Loader(data[:1], seq_len=SEQ_LEN, global_batch=8, seed=1, end=samples * 3) as loader:
        found = first_tokens(loader)
    assert len(found) == samples * 3
    assert sorted(found[:samples]) == list(range(0, samples * SEQ_LEN, SEQ_LEN))
    for epoch in (1, 2):
        places = sorted(found[epoch * samples : (epoch + 1) * samples])
        assert all(after - before >= SEQ_LEN for before, after in pairwise(places))
        assert places != list(range(0, samples * SEQ_LEN, SEQ_LEN))


# --- 2. the state --------------------------------------------------------------------------------------


def test_the_state_is_small_json_and_the_same_on_every_rank(make: Callable[..., Loader]) -> None:
    states = []
    for rank in range(3):
        with make(rank=rank, world=3) as loader:
            take(loader, 100)
            states.append(loader.state_dict())
    assert states[0] == states[1] == states[2]
    assert states[0]["consumed"] == str(100 * GLOBAL_BATCH)
    assert json.loads(json.dumps(states[0])) == states[0]
    assert len(json.dumps(states[0])) < 1024


@pytest.mark.parametrize("stop", [0, 1, 2, 12, 13, 85, 86, 87, 171])  # edges of a stage, of spans, of epochs
@pytest.mark.parametrize("world", [1, 3])
def test_resuming_is_exact(make: Callable[..., Loader], stop: int, world: int) -> None:
    with make() as whole:
        take(whole, stop)
        expected = first_tokens(take(whole, 20))
        final = whole.state_dict()
    with make(rank=world - 1, world=world) as before:
        take(before, stop)
        state = before.state_dict()
    parts = []
    for rank in range(4):  # other ranks than those that wrote the state
        with make(rank=rank, world=4) as after:
            after.load_state_dict(state)
            parts.append(take(after, 20))
            assert after.state_dict() == final
    together = [
        token for step in range(20) for part in parts for token in first_tokens(part[step : step + 1])
    ]
    assert together == expected


def test_resuming_again_and_again_is_exact(make: Callable[..., Loader]) -> None:
    """Loaders are known whose state stands still after the first resume, or lacks what was read ahead."""
    with make() as whole:
        expected = first_tokens(take(whole, 60))
    found, state = [], None
    for stop in (1, 0, 0, 2, 7, 1, 49):
        with make(prefetch=7, threads=2) as loader:
            if state is not None:
                loader.load_state_dict(state)
                assert loader.state_dict() == state
            found += first_tokens(take(loader, stop))
            state = loader.state_dict()
    assert found == expected


def test_a_state_loaded_while_iterating_takes_effect(make: Callable[..., Loader]) -> None:
    with make(prefetch=5) as loader:
        take(loader, 3)
        state = loader.state_dict()
        expected = first_tokens(take(loader, 5))
        take(loader, 4)
        loader.load_state_dict(state)
        assert first_tokens(take(loader, 5)) == expected


def test_the_batch_size_may_change_on_the_way(make: Callable[..., Loader]) -> None:
    with make() as whole:
        expected = first_tokens(take(whole, 50))
    with make() as first, make(global_batch=30) as second:
        found = first_tokens(take(first, 10))
        second.load_state_dict(first.state_dict())
        assert found + first_tokens(take(second, 16)) == expected


def test_what_was_read_ahead_is_not_counted(make: Callable[..., Loader]) -> None:
    with make(prefetch=50) as loader:
        take(loader, 2)
        assert loader.consumed == 2 * GLOBAL_BATCH


KILLED = """
import json, os, pathlib, signal, sys
from trainer.data import Dataset, Loader
root, digest, state, stop, rank = sys.argv[1:]
data, state = Dataset.open(pathlib.Path(root), digest), pathlib.Path(state)
loader = Loader([data], seq_len=16, global_batch=12, seed=5, prefetch=8, threads=2, rank=int(rank), world=2)
if state.exists():
    loader.load_state_dict(json.loads(state.read_text()))
for step in range(int(stop)):
    print(*next(loader).tokens[:, 0].tolist(), flush=True)
    state.write_text(json.dumps(loader.state_dict()))
next(loader)  # handed out, never trained on
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_killed_between_reading_ahead_and_the_step(tmp_path: Path) -> None:
    """Two real processes, killed twice, each time with batches read ahead and one handed out but not
    counted."""
    root = write_dataset(tmp_path / "data", 5003)
    digest = sign(root)
    states = [tmp_path / "state-0", tmp_path / "state-1"]
    lines: list[list[str]] = [[], []]
    for stop in (3, 2):
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", KILLED, root, digest, states[rank], str(stop), str(rank)],
                stdout=subprocess.PIPE,
                text=True,
                cwd=Path(__file__).parents[2],
            )
            for rank in range(2)
        ]
        for rank, process in enumerate(processes):
            lines[rank] += process.communicate(timeout=60)[0].splitlines()
            assert process.returncode == -signal.SIGKILL
        assert states[0].read_text() == states[1].read_text()
    found = [int(token) for step in zip(*lines, strict=True) for token in " ".join(step).split()]
    with Loader([Dataset.open(root, digest)], seq_len=16, global_batch=12, seed=5) as whole:
        assert found == first_tokens(take(whole, 5))


# --- 3. refusals ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"seed": "6"},
        {"seq_len": "17"},
        {"order": "feistel6/v2"},
        {"packing": "rows/v1"},
        {"schema": "urn:secure-train:loader-state:v2"},
        {"schedule": "0" * 64},
        {"transcript": "0" * 64},
        {"chain": "0" * 64},
        {"consumed": "241"},
        {"consumed": "-1"},
        {"consumed": "0240"},
        {"consumed": "9" * 19},
        {"consumed": 240},
        {"transcript": "A" * 64},
        {"extra": "1"},
        {"seed": None},
    ],
    ids=str,
)
def test_a_state_that_does_not_fit_is_refused(make: Callable[..., Loader], change: dict[str, Any]) -> None:
    with make() as loader:
        take(loader, 20)
        state: dict[str, Any] = loader.state_dict() | change
        loader.load_state_dict(loader.state_dict())
        refusal("ST-D10", lambda: loader.load_state_dict(state))
        assert loader.consumed == 240  # and the loader is where it was


def test_a_state_without_a_field_is_refused(make: Callable[..., Loader]) -> None:
    with make() as loader:
        state = loader.state_dict()
        del state["chain"]
        refusal("ST-D10", lambda: loader.load_state_dict(state))


def test_other_data_or_weights_before_the_resumed_sample_are_refused(
    make: Callable[..., Loader], data: list[Dataset], tmp_path: Path
) -> None:
    with make() as loader:
        take(loader, 20)
        state = loader.state_dict()
    big, small = (one.digest for one in data)
    for stages in (
        [Stage(0, {big: 3, small: 2}), Stage(150, {big: 1, small: 1})],
        [Stage(0, {big: 3, small: 1}), Stage(151, {big: 1, small: 1})],
        [Stage(0, {big: 3, small: 1})],
    ):
        refusal("ST-D10", lambda stages=stages: make(stages=stages).load_state_dict(state))  # type: ignore[misc]  # default argument
    other = dataset(tmp_path / "other", 5003, offset=1)
    loader = Loader([other, data[1]], seq_len=SEQ_LEN, global_batch=GLOBAL_BATCH, seed=5)
    refusal("ST-D10", lambda: loader.load_state_dict(state))


def test_what_comes_after_the_resumed_sample_may_change(
    make: Callable[..., Loader], data: list[Dataset], tmp_path: Path
) -> None:
    """A third dataset joins at the resumed sample, and no sample of the others is lost or repeated."""
    with make() as loader:
        take(loader, 20)
        state = loader.state_dict()
        without = first_tokens(take(loader, 30))
    big, small = (one.digest for one in data)
    third = dataset(tmp_path / "third", 2000, offset=2 * OFFSET)
    stages = [
        Stage(0, {big: 3, small: 1}),
        Stage(150, {big: 1, small: 1}),
        Stage(240, {third.digest: 1, big: 1}),
    ]
    with Loader([*data, third], seq_len=SEQ_LEN, global_batch=GLOBAL_BATCH, seed=5, stages=stages) as loader:
        loader.load_state_dict(state)
        after = first_tokens(take(loader, 30))
    assert abs(sum(token >= 2 * OFFSET for token in after) - 180) <= 2
    expected = [token for token in without if token < OFFSET]
    found = [token for token in after if token < OFFSET]
    assert found[: len(expected)] == expected[: len(found)]


def test_a_state_past_the_end_is_refused(make: Callable[..., Loader]) -> None:
    with make() as loader:
        take(loader, 20)
        refusal("ST-D10", lambda: make(end=239).load_state_dict(loader.state_dict()))


def test_after_an_error_the_same_batch_comes_again(tmp_path: Path) -> None:
    """A changed byte stops the run; going on regardless does not skip what was damaged."""
    root = write_dataset(tmp_path / "data", 5003)
    digest = sign(root)
    with Loader([Dataset.open(root, digest)], seq_len=SEQ_LEN, global_batch=GLOBAL_BATCH, seed=5) as loader:
        expected = first_tokens(take(loader, 3))
    good = {file: file.read_bytes() for file in root.glob("*.bin")}
    with Loader([Dataset.open(root, digest)], seq_len=SEQ_LEN, global_batch=GLOBAL_BATCH, seed=5) as loader:
        for file, data in good.items():
            file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        for _ in range(3):
            refusal("ST-A03", lambda: next(loader))
        assert loader.consumed == 0
        for file, data in good.items():
            file.write_bytes(data)
        assert first_tokens(take(loader, 3)) == expected


def test_datasets_of_two_tokenizers_are_refused(data: list[Dataset], tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "other", 500, tokenizer=b'{"other": true}')
    other = Dataset.open(root, sign(root))
    refusal("ST-D09", lambda: Loader([data[0], other], seq_len=8, global_batch=4, seed=1))


def test_a_dataset_shorter_than_a_sample_is_refused(data: list[Dataset]) -> None:
    refusal("ST-D09", lambda: Loader(data, seq_len=334, global_batch=4, seed=1))
    refusal("ST-D09", lambda: next(validation_batches(data[1], seq_len=333, global_batch=4)))


@pytest.mark.parametrize(
    "change", [{"seq_len": 0}, {"global_batch": 0}, {"rank": 1}, {"rank": -1}, {"world": 0}]
)
def test_impossible_batches_are_refused(make: Callable[..., Loader], change: dict[str, int]) -> None:
    refusal("ST-D08", lambda: make(**change))


# --- 4. the transcript ---------------------------------------------------------------------------------


def test_the_transcript_is_what_its_docstring_says(make: Callable[..., Loader], data: list[Dataset]) -> None:
    """Computed again from nothing but what was consumed, one sample at a time, over three spans."""
    digests = [one.digest for one in data]
    transcript = Transcript(digests, SEQ_LEN)
    with make() as loader:
        tokens = first_tokens(take(loader, 200))
        found = loader.transcript
    sources = np.array([int(token >= OFFSET) for token in tokens])
    firsts = np.array(tokens) - sources * OFFSET
    chain = transcript.start
    for begin in range(0, len(tokens), SPAN):
        chain = transcript.extend(chain, sources[begin : begin + SPAN], firsts[begin : begin + SPAN])
    assert chain.hex() == found


def test_another_order_has_another_transcript(make: Callable[..., Loader]) -> None:
    found = set()
    for options in ({}, {"seed": 6}, {"seq_len": 8}):
        with make(**options) as loader:
            take(loader, 100)
            found.add(loader.transcript)
    assert len(found) == 3


# --- shapes at the end ---------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 3, 5])
def test_the_last_batch_is_padded_without_a_loss(make: Callable[..., Loader], world: int) -> None:
    ranks = []
    for rank in range(world):
        with make(end=GLOBAL_BATCH + 2, rank=rank, world=world) as loader:
            ranks.append(list(loader))
    assert all(len(batches) == 2 for batches in ranks)
    assert {batch.tokens.shape for batches in ranks for batch in batches} == {(-(-12 // world), SEQ_LEN + 1)}
    last = [batches[1] for batches in ranks]
    assert [batch.size for batch in last] == [2] * world
    assert sum(batch.real for batch in last) == 2
    for batch in last:
        assert (batch.labels[batch.real :] == IGNORED).all()
        assert (batch.labels[: batch.real] != IGNORED).all()


def test_validation_is_the_same_every_time_and_complete(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", 1000, splits=("train", "validation"))
    held = Dataset.open(tmp_path / "data", sign(tmp_path / "data"), split="validation")
    for world in (1, 2, 5):
        ranks = [
            list(validation_batches(held, seq_len=16, global_batch=10, rank=rank, world=world))
            for rank in range(world)
        ]
        found = [token for step in zip(*ranks, strict=True) for token in first_tokens(step)]
        assert found == list(range(0, 999 // 16 * 16, 16))
    assert len(list(validation_batches(held, seq_len=16, global_batch=10, batches=2))) == 2
