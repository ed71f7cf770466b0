"""Every layout trains what one process trains. Real ranks over gloo."""

from __future__ import annotations

from typing import Any

import pytest

from tests.trainer.support import scenario


@pytest.fixture(scope="module")
def one() -> Any:
    return scenario("layouts", 1)


@pytest.fixture(scope="module")
def two() -> Any:
    return scenario("layouts", 2)


def test_initial_weights_do_not_depend_on_the_world_size(one: Any, two: Any) -> None:
    assert len(set(one["initial"])) == 3
    assert two["initial"] == one["initial"]
    assert scenario("initial", 3) == one["initial"]


@pytest.mark.parametrize("layout", ["fsdp", "untied", "compiled", "recompute", "selective", "chunked"])
def test_two_ranks_equal_one(one: Any, two: Any, layout: str) -> None:
    for alone, together in zip(one[layout], two[layout], strict=True):
        assert together == pytest.approx(alone, rel=1e-5)


def test_hybrid_sharding_equals_one_rank(one: Any, two: Any) -> None:
    for alone, together in zip(one["fsdp"], two["hsdp"], strict=True):
        assert together == pytest.approx(alone, rel=1e-5)


def test_variants_equal_the_plain_model(one: Any) -> None:
    for variant in ("recompute", "selective"):
        assert one[variant] == one["fsdp"], "recomputation changes no bit"
    for variant in ("compiled", "chunked"):
        for plain, other in zip(one["fsdp"], one[variant], strict=True):
            assert other == pytest.approx(plain, rel=1e-5)


def test_bfloat16_stays_close(one: Any, two: Any) -> None:
    for plain, low, both in zip(one["fsdp"], one["bfloat16"], two["bfloat16"], strict=True):
        assert low[0] == pytest.approx(plain[0], rel=5e-3)
        assert both[0] == pytest.approx(low[0], rel=5e-3)
        assert low != plain
