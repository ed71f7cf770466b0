"""The bugs of other loaders, one test each: public threads first, in the order of the list in which they were
collected, then what was found by running them. Each test names the thread and does what was done there.
"""

from __future__ import annotations

import itertools
import json
import resource
import time
from pathlib import Path
from typing import Any

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
from trainer.data import Dataset, Loader, Order, Source, Stage, Window, Writer
from trainer.data.adapters import TorchLoader
from trainer.data.shards import TOKENIZER

OFFSET = 100_000


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[Dataset]:
    folder = tmp_path_factory.mktemp("data")
    return [dataset(folder / "big", 3003), dataset(folder / "small", 333, offset=OFFSET)]


def loader(data: list[Dataset], **options: Any) -> Loader:
    given: dict[str, Any] = {"seq_len": 16, "global_batch": 12, "seed": 5} | options
    return Loader(data, **given)


def one_row(tmp_path: Path, lengths: list[int], shard_tokens: int = 1000) -> Dataset:
    root = tmp_path / f"data-{len(lengths)}"
    root.mkdir()
    (root / TOKENIZER).write_bytes(b"{}")
    digest = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
    writer = Writer(root, vocab_size=2**20, tokenizer=digest, shard_tokens=shard_tokens)
    writer.add("train", np.arange(sum(lengths)), np.array(lengths))
    writer.finish()
    return Dataset.open(root, sign(root))


# --- public threads ------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [True, False])
def test_torchtitan_3907_datasets_8308_the_second_resume_goes_on(data: list[Dataset], at_once: bool) -> None:
    expected = first_tokens(take(loader(data), 40))
    found, state = [], loader(data).state_dict()
    for count in (5, 3, 1, 0, 31):
        with loader(data) as resumed:
            resumed.load_state_dict(state)
            if at_once:  # saved immediately after it was loaded
                resumed.load_state_dict(resumed.state_dict())
            found += first_tokens(take(resumed, count))
            state = resumed.state_dict()
    assert found == expected


def test_prime_rl_3332_loading_after_iter_takes_effect(data: list[Dataset]) -> None:
    with loader(data) as one:
        take(one, 6)
        state, expected = one.state_dict(), first_tokens(take(one, 4))
    for made in (loader(data, prefetch=8, threads=3), TorchLoader(loader(data), num_workers=1)):
        iterator: Any = iter(made)
        next(iterator)
        made.load_state_dict(state)
        items = [next(iterator) for _ in range(4)]
        found = (
            [int(t) for item in items for t in item["inputs"][:, 0]]
            if isinstance(items[0], dict)
            else first_tokens(items)
        )
        assert found == expected


@pytest.mark.parametrize("world", [2, 3, 8])
def test_torchtitan_816_megatron_bridge_5637_fewer_ranks_lose_nothing(
    data: list[Dataset], world: int
) -> None:
    expected = first_tokens(take(loader(data), 25))
    four = [loader(data, rank=rank, world=4) for rank in range(4)]
    found = [
        t for batches in zip(*(take(rank, 10) for rank in four), strict=True) for t in first_tokens(batches)
    ]
    state = four[3].state_dict()
    other = [loader(data, rank=rank, world=world) for rank in range(world)]
    for rank in other:
        rank.load_state_dict(state)
    found += [t for bs in zip(*(take(rank, 15) for rank in other), strict=True) for t in first_tokens(bs)]
    assert found == expected


@pytest.mark.parametrize("where", [-1, 0, 1])
def test_data_1437_datasets_7447_torchtitan_1357_a_state_at_the_end_of_an_epoch(
    data: list[Dataset], where: int
) -> None:
    samples = 3003 // 16
    with loader(data[:1], global_batch=1) as one:
        take(one, samples + where)
        state, expected = one.state_dict(), first_tokens(take(one, samples + 5))
    with loader(data[:1], global_batch=1) as two:
        two.load_state_dict(state)
        assert first_tokens(take(two, samples + 5)) == expected


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_data_1251_a_state_soon_after_a_resume_is_complete(data: list[Dataset], steps: int) -> None:
    with loader(data) as one:
        take(one, 7)
        state = one.state_dict()
        take(one, steps)
        expected = one.state_dict()
    with loader(data, prefetch=6, threads=2) as two:
        two.load_state_dict(state)
        take(two, steps)
        assert two.state_dict() == expected


def test_llm_foundry_1277_packed_samples_are_what_is_counted(tmp_path: Path) -> None:
    root = pack_dataset(write_dataset(tmp_path / "data", 4000, document=7), 16)
    with Dataset.open(root, sign(root)) as packed:
        given = {"packing": "rows", "threads": 2}
        expected = rows_of(take(loader([packed], **given), 30))
        first = loader([packed], **given)
        found = rows_of(take(first, 11))
        assert first.state_dict()["consumed"] == str(11 * 12)
        second = loader([packed], threads=0, packing="rows")
        second.load_state_dict(first.state_dict())
        assert found + rows_of(take(second, 19)) == expected


@pytest.mark.parametrize("steps", [20, 21, 187, 188, 400])
def test_streaming_700_869_resume_at_and_beyond_epochs_of_a_mixture(data: list[Dataset], steps: int) -> None:
    stages = [Stage(0, {data[0].digest: 9, data[1].digest: 1})]
    with loader(data, stages=stages, global_batch=1) as one:
        take(one, steps)
        state, expected = one.state_dict(), first_tokens(take(one, 60))
    with loader(data, stages=stages, global_batch=1) as two:
        two.load_state_dict(state)
        assert first_tokens(take(two, 60)) == expected


def test_streaming_988_eviction_keeps_the_only_copy(tmp_path: Path) -> None:
    from trainer.data.cache import Cache

    root = write_dataset(tmp_path / "data", 500)
    before = {path.name: path.read_bytes() for path in root.iterdir()}
    refusal("ST-U05", lambda: Cache(root, 1))
    assert {path.name: path.read_bytes() for path in root.iterdir()} == before


@pytest.mark.parametrize("damage", ["cut", "longer", "flipped", "index", "manifest"])
def test_streaming_759_399_litdata_720_nanochat_344_broken_shards_are_named(
    tmp_path: Path, damage: str
) -> None:
    root = write_dataset(tmp_path / "data", 3003)
    digest = sign(root)
    name = {"index": "shard-00001.idx", "manifest": "secure-train/manifest.json"}.get(
        damage, "shard-00001.bin"
    )
    content = bytearray((root / name).read_bytes())
    if damage in ("cut", "manifest"):
        del content[-1]
    elif damage == "longer":
        content += b"\0"
    else:
        content[5] ^= 4
    (root / name).write_bytes(content)

    def read() -> None:
        with Dataset.open(root, digest) as broken:
            take(loader([broken], boundaries=True), 60)

    code = {"cut": "ST-A06", "longer": "ST-A06", "manifest": "ST-A01"}.get(damage, "ST-A03")
    assert name in str(refusal(code, read).where)


@pytest.mark.parametrize("samples", [10**9, 10**12])
def test_streaming_792_771_a_trillion_samples_start_at_once(samples: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.process_time()
    order = Order(1, [Source("aa" * 32, samples)], [Stage(0, {"aa" * 32: 1})])
    for first in (0, samples - 1024, samples * 3 + 17):
        order.locate(first, 1024)
    assert time.process_time() - begun < 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # kB


def test_grain_1178_a_state_at_every_place_of_a_window(data: list[Dataset]) -> None:
    given: dict[str, Any] = {"window": Window(4, 2), "global_batch": 1}
    with loader(data[:1], **given) as one:
        expected = first_tokens(take(one, 40))
    for stop in range(20):
        with loader(data[:1], **given) as one, loader(data[:1], **given) as two:
            take(one, stop)
            two.load_state_dict(one.state_dict())
            assert first_tokens(take(two, 20)) == expected[stop : stop + 20]


@pytest.mark.parametrize("weights", [(1, 10**9), (10**9, 1), (1, 1)])
@pytest.mark.parametrize("start", [1, 100, 1023, 1025])
def test_megatron_457_1002_705_a_changed_blend_loses_and_repeats_nothing(
    data: list[Dataset], weights: tuple[int, int], start: int
) -> None:
    big, small = (one.digest for one in data)
    stages = [Stage(0, {big: 3, small: 1}), Stage(start, {big: weights[0], small: weights[1]})]
    samples = {big: 3003 // 16, small: 333 // 16}
    order = Order(5, [Source(digest, count) for digest, count in samples.items()], stages)
    seen: dict[str, list[tuple[int, int]]] = {big: [], small: []}
    for first in (0, 1000):
        located = order.locate(first, 1000)
        for source, epoch, index in zip(located.source, located.epoch, located.index, strict=True):
            seen[order.sources[source].digest].append((int(epoch), int(index)))
    for digest, found in seen.items():
        size = samples[digest]
        assert len(set(found)) == len(found)
        for begin in range(0, len(found) - size, size):
            assert {index for _, index in found[begin : begin + size]} == set(range(size))


def test_megatron_705_a_dataset_of_one_sample(data: list[Dataset], tmp_path: Path) -> None:
    tiny = one_row(tmp_path, [17])
    stages = [
        Stage(0, {data[0].digest: 10**9, tiny.digest: 1}),
        Stage(24, {data[0].digest: 1, tiny.digest: 1}),
    ]
    with loader([data[0], tiny], stages=stages) as one:
        assert len(first_tokens(take(one, 10))) == 120


def test_megatron_1672_598_positions_beyond_32_bits() -> None:
    """Places in datasets; bytes in shards are in test_shards.test_shards_beyond_32_bits."""
    from trainer.data.order import Concat

    packing = Concat("aa" * 32, 2**45 + 3, 4096, 1)
    places = packing.first_tokens(np.zeros(2, np.int64), np.array([0, packing.samples - 1]))
    assert places.tolist() == [0, (2**33 - 1) * 4096]
    order = Order(1, [Source("aa" * 32, 2**40)], [Stage(0, {"aa" * 32: 1})])
    assert order.locate(2**40 - 5, 5).index.max() > 2**32


def test_megatron_907_bridge_5107_no_index_is_written_when_training(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "data", 3003)
    digest = sign(root)
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    with Dataset.open(root, digest) as one, loader([one], boundaries=True) as reading:
        take(reading, 30)
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


def test_nemo_rl_2519_another_dataset_is_refused(data: list[Dataset], tmp_path: Path) -> None:
    with loader(data[:1]) as one:
        take(one, 5)
        state = one.state_dict()
    other = dataset(tmp_path / "other", 3003, offset=1)
    refusal("ST-D10", lambda: loader([other]).load_state_dict(state))


def test_olmo_650_bridge_4601_three_epochs_after_a_resume_inside_one(data: list[Dataset]) -> None:
    samples = 333 // 16
    with loader(data[1:], global_batch=1) as one:
        take(one, samples // 2)
        state = one.state_dict()
    with loader(data[1:], global_batch=1) as two:
        two.load_state_dict(state)
        take(two, samples - samples // 2)
        for _ in range(3):
            places = sorted(first_tokens(take(two, samples)))
            assert all(after - before >= 16 for before, after in itertools.pairwise(places))


def test_olmo_core_617_435_no_flag_lifts_a_mismatch(data: list[Dataset]) -> None:
    with loader(data) as one:
        take(one, 5)
        state = one.state_dict()
    for key in ("schedule", "seed", "seq_len", "order", "packing"):
        for value in ("", "0", "ignore"):
            refusal("ST-D10", lambda k=key, v=value: loader(data).load_state_dict(state | {k: v}))  # type: ignore[misc]  # default arguments


def test_litdata_363_694_a_mixture_resumes_after_an_epoch(data: list[Dataset]) -> None:
    stages = [Stage(0, {one.digest: 1 for one in data})]
    with loader(data, stages=stages) as one:
        take(one, 50)  # fifteen epochs of the small one
        state, expected = one.state_dict(), first_tokens(take(one, 10))
    with loader(data, stages=stages) as two:
        two.load_state_dict(state)
        assert first_tokens(take(two, 10)) == expected


def test_fms_fsdp_144_one_document_and_more_ranks_than_samples(tmp_path: Path) -> None:
    one = one_row(tmp_path, [40])  # two samples
    ranks = [take(loader([one], rank=rank, world=16, global_batch=16, end=2), 1) for rank in range(16)]
    assert sum(batch.real for (batch,) in ranks) == 2
    assert {batch.tokens.shape for (batch,) in ranks} == {(1, 17)}
    found = [token for batches in ranks for token in first_tokens(batches)]
    assert sorted(found) == [0, 16]


def test_fms_fsdp_144_empty_documents_and_shards(tmp_path: Path) -> None:
    """They cannot be written, and a dataset that says it has them is refused: none is drawn for ever."""
    from trainer.data.prepare import Request, prepare
    from trainer.data.tokenization import train

    (tmp_path / "tokenizer.json").write_bytes(train(["some text"] * 9, 300))
    texts = ["", "some text", "", "", "text " * 30, ""] * 20
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    counts = prepare(
        Request((tmp_path / "a.jsonl",), tmp_path / "out", tokenizer=tmp_path / "tokenizer.json")
    )
    assert (counts["documents"], counts["empty_documents"]) == (40, 80)
    with Dataset.open(tmp_path / "out", sign(tmp_path / "out")) as made:
        ends = made.document_ends(0, made.tokens)
        assert (np.diff(ends, prepend=0) > 1).all()
        assert len(take(loader([made], end=500), 41)) == 41


def test_streaming_437_nothing_is_given_twice(data: list[Dataset]) -> None:
    """The state holds no batch size, so a resume cannot be ignored for lack of one."""
    with loader(data, global_batch=12) as one:
        take(one, 5)
        state, expected = one.state_dict(), first_tokens(take(one, 7))
    assert not [key for key in state if "batch" in key or "rank" in key or "world" in key]
    with loader(data, global_batch=7) as two:
        two.load_state_dict(state)
        assert first_tokens(take(two, 12)) == expected


# --- found by running them -----------------------------------------------------------------------------


def test_olmo_core_no_stale_index_of_another_mixture(tmp_path: Path) -> None:
    """40 + 60 and 60 + 40 of two sources: an index that is keyed by their sum is another mixture's."""
    sizes = [(640, 960), (960, 640)]
    found = []
    for number, (a, b) in enumerate(sizes):
        pair = [dataset(tmp_path / f"a{number}", a), dataset(tmp_path / f"b{number}", b, offset=OFFSET)]
        with loader(pair, end=100) as one:
            tokens = first_tokens(one)
        found.append(sum(token >= OFFSET for token in tokens))
    assert found == [60, 40]


def test_ibm_a_the_defaults_work(data: list[Dataset]) -> None:
    assert len(take(Loader(data, seq_len=16, global_batch=4, seed=0), 3)) == 3


def test_ibm_c_epochs_differ(data: list[Dataset]) -> None:
    with loader(data[1:], global_batch=1) as one:
        first, second = (first_tokens(take(one, 20)) for _ in range(2))
    assert first != second


def test_ibm_d_the_seed_reaches_everything(data: list[Dataset]) -> None:
    found = [tuple(first_tokens(take(loader(data, seed=seed), 5))) for seed in range(4)]
    assert len(set(found)) == 4


def test_ibm_e_weights_do_not_catch_up(data: list[Dataset]) -> None:
    big, small = (one.digest for one in data)
    stages = [Stage(0, {big: 1, small: 1}), Stage(1200, {big: 9, small: 1})]
    with loader(data, stages=stages) as one:
        take(one, 100)
        after = first_tokens(take(one, 10))
    assert abs(sum(token < OFFSET for token in after) - 108) <= 2


def test_ibm_f_a_dataset_is_added_on_resume(data: list[Dataset]) -> None:
    big, small = (one.digest for one in data)
    with loader(data[:1], stages=[Stage(0, {big: 1})]) as one:
        take(one, 5)
        state = one.state_dict()
    with loader(data, stages=[Stage(0, {big: 1}), Stage(60, {big: 1, small: 1})]) as two:
        two.load_state_dict(state)
        assert sum(token >= OFFSET for token in first_tokens(take(two, 10))) == 60


def test_ibm_g_a_state_is_not_ahead_of_the_trainer(data: list[Dataset]) -> None:
    for made in (loader(data, prefetch=30, threads=3), TorchLoader(loader(data), num_workers=2)):
        iterator: Any = iter(made)
        for _ in range(9):
            next(iterator)
        assert made.state_dict()["consumed"] == str(9 * 12)


def test_ibm_j_the_order_of_naming_does_not_matter(data: list[Dataset]) -> None:
    one, two = loader(data), loader(data[::-1])
    assert first_tokens(take(one, 10)) == first_tokens(take(two, 10))
    two.load_state_dict(one.state_dict())


def test_ibm_filtered_documents_cause_no_repeats(tmp_path: Path) -> None:
    """Short documents are part of samples like all others; an epoch has each token once."""
    short = one_row(tmp_path, [1, 2, 50, 1, 1, 40, 2, 63])
    with loader([short], seq_len=8, global_batch=1, end=20) as one:
        tokens = [token for batch in one for token in batch.inputs[0].tolist()]
    assert sorted(tokens) == list(range(160))


def test_megatron_a_longer_run_has_the_same_beginning(data: list[Dataset]) -> None:
    with loader(data, end=120) as short, loader(data, end=10**6) as long:
        assert first_tokens(short) == first_tokens(take(long, 10))


def test_state_is_small_wherever_it_is(data: list[Dataset]) -> None:
    stages = [Stage(n * 10**9, {one.digest: n + 1 for one in data}) for n in range(200)]
    with loader(data, stages=stages) as one:
        take(one, 100)
        assert len(json.dumps(one.state_dict())) < 1024
