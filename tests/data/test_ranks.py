"""The global order on real processes: each rank is a program, stopped and continued in other numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.support import first_tokens, sign, take, write_dataset
from trainer.data import Dataset, Loader, Stage

RANK = """
import json, pathlib, sys
from trainer.data import Dataset, Loader, Stage
rank, world, steps, folder = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), pathlib.Path(sys.argv[4])
state = json.loads(sys.argv[5])
data = [Dataset.open(folder / name, (folder / f"{name}.digest").read_text()) for name in ("big", "small")]
big, small = (one.digest for one in data)
stages = [Stage(0, {big: 3, small: 1}), Stage(150, {big: 1, small: 1})]
with Loader(data, seq_len=16, global_batch=24, seed=5, stages=stages, rank=rank, world=world,
            threads=rank % 3, prefetch=rank % 4) as loader:
    if state:
        loader.load_state_dict(state)
    rows = [next(loader) for _ in range(steps)]
    print(json.dumps([[batch.tokens[: batch.real].tolist() for batch in rows], loader.state_dict()]))
"""
CUTS = (2, 5, 1, 8)  # steps between stops: inside a stage, over its edge, inside an epoch and over its end


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ranks")
    for name, tokens, offset in (("big", 5003, 0), ("small", 333, 100_000)):
        (folder / f"{name}.digest").write_text(sign(write_dataset(folder / name, tokens, offset=offset)))
    return folder


def run(world: int, steps: int, folder: Path, state: dict[str, str]) -> tuple[list[int], dict[str, str]]:
    """The first token of every sample, in the global order, and the state, which all ranks have alike."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, *map(str, (rank, world, steps, folder)), json.dumps(state)],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    answers = [json.loads(process.communicate(timeout=120)[0]) for process in started]
    assert all(answer[1] == answers[0][1] for answer in answers)
    found = [row[0] for step in range(steps) for answer in answers for row in answer[0][step]]
    return found, answers[0][1]


@pytest.mark.parametrize("worlds", [(1, 1, 1, 1), (2, 3, 4, 8), (8, 1, 3, 2), (3, 4, 1, 5)], ids=str)
def test_one_order_on_any_ranks_through_any_resumes(folder: Path, worlds: tuple[int, ...]) -> None:
    data = [Dataset.open(folder / name, (folder / f"{name}.digest").read_text()) for name in ("big", "small")]
    big, small = (one.digest for one in data)
    stages = [Stage(0, {big: 3, small: 1}), Stage(150, {big: 1, small: 1})]
    with Loader(data, seq_len=16, global_batch=24, seed=5, stages=stages) as whole:
        expected = first_tokens(take(whole, sum(CUTS)))
        final = whole.state_dict()
    found: list[int] = []
    state: dict[str, str] = {}
    for world, steps in zip(worlds, CUTS, strict=True):
        part, state = run(world, steps, folder, state)
        found += part
    assert found == expected
    assert state == final
