"""Schedules as text, and what changing one on the way does."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.support import dataset, first_tokens, refusal, take
from trainer.data import Loader, Stage, parse_schedule

DIGESTS = {"web": "aa" * 32, "code": "bb" * 32, "math": "cc" * 32}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("web=3", [(0, {"web": 3})]),
        ("web=3,code=1", [(0, {"web": 3, "code": 1})]),
        (" web = 3 , code = 1 ", [(0, {"web": 3, "code": 1})]),
        ("0: web=3; 1_000_000: math=2, web=1", [(0, {"web": 3}), (10**6, {"math": 2, "web": 1})]),
        ("web=3; 5: code=1; 9: math=1", [(0, {"web": 3}), (5, {"code": 1}), (9, {"math": 1})]),
    ],
)
def test_schedules(text: str, expected: list[tuple[int, dict[str, int]]]) -> None:
    assert parse_schedule(text, DIGESTS) == [
        Stage(start, {DIGESTS[name]: weight for name, weight in weights.items()})
        for start, weights in expected
    ]


def test_an_empty_schedule_is_by_size() -> None:
    assert parse_schedule(" ", DIGESTS) is None


@pytest.mark.parametrize(
    "text",
    [
        "web",
        "web=",
        "web=x",
        "web=-1",
        "web=1.5",
        "wep=1",
        "web=1,web=2",
        "web=1;",
        "web=1; code=1",
        ":web=1",
        "web=1; x: code=1",
        "web=1,,code=1",
        "web=99999999999999999999",
        "web=¹",
    ],
)
def test_what_is_no_schedule_is_refused(text: str) -> None:
    refusal("ST-D08", lambda: parse_schedule(text, DIGESTS))


def test_a_stage_is_added_on_the_way(tmp_path: Path) -> None:
    """The configuration of a resumed run says more than the one it began with: no sample is lost, none
    comes twice, and what contradicts the samples consumed is refused."""
    web, code = dataset(tmp_path / "web", 4000), dataset(tmp_path / "code", 3000, offset=10**5)
    digests = {"web": web.digest, "code": code.digest}

    def loader(text: str, *data: object) -> Loader:
        given = {"seq_len": 16, "global_batch": 10, "seed": 1, "stages": parse_schedule(text, digests)}
        return Loader(data, **given)  # type: ignore[arg-type]  # the tests give what fits

    first = loader("web=1", web)
    before = first_tokens(take(first, 10))
    state = first.state_dict()
    second = loader("web=1; 100: web=1, code=1", web, code)
    second.load_state_dict(state)
    after = first_tokens(take(second, 20))
    assert 99 <= sum(token >= 10**5 for token in after) <= 101
    whole = first_tokens(take(loader("web=1", web), 25))
    assert (before + [token for token in after if token < 10**5])[:190] == whole[:190]
    for text in ("web=1; 99: web=1, code=1", "web=2, code=1"):
        refusal("ST-D10", lambda text=text: loader(text, web, code).load_state_dict(state))  # type: ignore[misc]  # default argument
