"""The loader under torch's DataLoader and torchdata's StatefulDataLoader, with real worker processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.support import dataset, first_tokens, refusal, take
from trainer.data import Dataset, Loader
from trainer.data.adapters import Batches, Steps, TorchLoader


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    return dataset(tmp_path / "data", 5003)


def loader(data: Dataset, **options: Any) -> Loader:
    return Loader([data], **({"seq_len": 16, "global_batch": 12, "seed": 5} | options))


def firsts(items: list[dict[str, torch.Tensor]]) -> list[int]:
    return [int(token) for item in items for token in item["inputs"][:, 0]]


def some(items: Any, count: int) -> list[dict[str, torch.Tensor]]:
    iterator = iter(items)
    return [next(iterator) for _ in range(count)]


@pytest.mark.parametrize("workers", [0, 2])
def test_under_a_data_loader(data: Dataset, workers: int) -> None:
    expected = first_tokens(take(loader(data), 20))
    first = TorchLoader(loader(data), num_workers=workers)
    found = firsts(some(first, 7))
    state = json.loads(json.dumps(first.state_dict()))
    assert state["consumed"] == str(7 * 12)  # not what workers read ahead
    second = TorchLoader(loader(data), num_workers=2 - workers)
    second.load_state_dict(state)
    assert found + firsts(some(second, 13)) == expected
    plain = loader(data)
    plain.load_state_dict(state)  # and the loader alone goes on from it as well
    assert first_tokens(take(plain, 13)) == expected[84:]


def test_a_state_loaded_while_iterating_takes_effect(data: Dataset) -> None:
    torch_loader = TorchLoader(loader(data))
    some(torch_loader, 2)
    state = torch_loader.state_dict()
    expected = firsts(some(torch_loader, 3))
    torch_loader.load_state_dict(state)
    assert firsts(some(torch_loader, 3)) == expected


def test_it_ends_where_the_run_ends(data: Dataset) -> None:
    items = list(TorchLoader(loader(data, end=30, rank=1, world=2, boundaries=True)))
    assert [int(item["size"]) for item in items] == [12, 12, 6]
    assert {item["inputs"].shape for item in items} == {(6, 16)}
    assert (items[-1]["labels"][3:] == -100).all()
    assert all(item["cu_seqlens"][-1] == 96 for item in items)


@pytest.mark.parametrize("workers", [0, 2])
def test_under_torchdata(data: Dataset, workers: int) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")

    def made(source: Loader) -> Any:
        return torchdata.StatefulDataLoader(
            Batches(source), sampler=Steps(source), batch_size=None, num_workers=workers
        )

    expected = first_tokens(take(loader(data), 30))
    found: list[int] = []
    state = None
    for count in (5, 1, 9, 15):  # resumed again and again
        stateful = made(loader(data))
        if state is not None:
            stateful.load_state_dict(state)
        found += firsts(some(stateful, count))
        state = stateful.state_dict()
    assert found == expected


def test_a_sampler_refuses_another_runs_state(data: Dataset) -> None:
    state = loader(data, seed=6).state_dict()
    refusal("ST-D10", lambda: Steps(loader(data)).load_state_dict(state))
    refusal("ST-D10", lambda: TorchLoader(loader(data)).load_state_dict(state))
