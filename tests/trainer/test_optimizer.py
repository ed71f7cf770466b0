"""Schedules are pure functions of the step; groups and state are named."""

from __future__ import annotations

from itertools import pairwise

import pytest

from tests.trainer.test_model import batch, make
from trainer import config, optimizer
from trainer.config import OptimizerConfig
from trainer.model import named_parameters


def options(*settings: str) -> OptimizerConfig:
    return config.resolve(settings=settings, device="cpu")[0].optimizer


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd"])
def test_schedules(schedule: str) -> None:
    made = options(
        f"optimizer.schedule={schedule}",
        "optimizer.learning_rate=1",
        "optimizer.warmup_steps=10",
        "optimizer.decay_steps=20",
        "optimizer.final_ratio=0.1",
    )
    rates = [optimizer.learning_rate(made, 100, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == max(rates) == 1
    assert rates[-1] == pytest.approx(0.1)
    assert all(before >= after for before, after in pairwise(rates[10:]))
    if schedule == "wsd":
        assert set(rates[9:81]) == {1}
    if schedule == "linear":
        assert rates[55] == pytest.approx(1 - 0.9 * 45 / 89)


@pytest.mark.parametrize("steps", [1, 2, 10])
def test_a_warm_up_as_long_as_the_run_is_no_error(steps: int) -> None:
    made = options("optimizer.warmup_steps=10")
    assert all(0 < optimizer.learning_rate(made, steps, step) <= 3e-4 for step in range(steps))


@pytest.mark.parametrize("embeddings", [True, False])
def test_norms_never_decay(embeddings: bool) -> None:
    made = make()
    adam = optimizer.build(made, options(f"optimizer.decay_embeddings={str(embeddings).lower()}"))
    decays = {id(p): group["weight_decay"] for group in adam.param_groups for p in group["params"]}
    for name, parameter in named_parameters(made).items():
        matrix = parameter.ndim == 2 and (embeddings or name != "embed_tokens.weight")
        assert decays[id(parameter)] == (0.1 if matrix else 0.0), name


@pytest.mark.parametrize("implementation", ["foreach", "fused", "for-loop"])
def test_state_has_names_before_and_after_the_first_step(implementation: str) -> None:
    made = make()
    before = {name: value.clone() for name, value in named_parameters(made).items()}
    adam = optimizer.build(made, options(f"optimizer.implementation={implementation}"))
    state = optimizer.state_tensors(made, adam)
    assert all((value == before[name]).all() for name, value in named_parameters(made).items())
    assert set(state) == {f"{n}.{q}" for n in before for q in ("step", "exp_avg", "exp_avg_sq")}
    assert [group["lr"] for group in adam.param_groups] == [3e-4, 3e-4]
    made(*batch()).backward()
    adam.step()
    assert set(optimizer.state_tensors(made, adam)) == set(state)


def test_clipping_scales_the_whole_gradient() -> None:
    made = make()
    made(*batch()).backward()
    norm = optimizer.clip(made, 0.0)
    assert float(optimizer.clip(made, float(norm) / 4)) == pytest.approx(float(norm))
    assert float(optimizer.clip(made, 0.0)) == pytest.approx(float(norm) / 4, rel=1e-4)
