"""The model: numerics, compilation, initialisation and generation. One process."""

from __future__ import annotations

import math
from dataclasses import replace
from decimal import Decimal

import pytest
import torch
from torch._dynamo.utils import counters
from torch.nn import functional

from trainer import generate, model, parallelize
from trainer.flavors import FLAVORS, Shape
from trainer.model import IGNORE, Cache, Llama, named_parameters, token_loss

TINY = FLAVORS["tiny"]


def make(shape: Shape = TINY, length: int = 32, chunk: int = 2048, seed: int = 1) -> Llama:
    with torch.device("meta"):
        made = Llama(shape, length, chunk)
    made.to_empty(device="cpu")
    made.initialise(seed)
    return made


def batch(rows: int = 2, length: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, TINY.vocab_size, (rows, length + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def gradients(made: Llama) -> dict[str, torch.Tensor]:
    return {
        name: parameter.grad
        for name, parameter in named_parameters(made).items()
        if parameter.grad is not None
    }


@pytest.mark.parametrize("flavor", FLAVORS)
def test_no_graph_breaks(flavor: str) -> None:
    """Forward and backward of every flavor's block at its real size, traced on the meta device."""
    torch._dynamo.reset()
    counters.clear()
    shape = FLAVORS[flavor]
    with torch.device("meta"):
        block = model.Block(shape)
        x = torch.empty(2, 64, shape.dim, requires_grad=True)
        cos, sin = torch.empty(64, shape.head_dim // 2), torch.empty(64, shape.head_dim // 2)
    block.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    block(x, cos, sin).sum().backward()
    assert counters["graph_break"] == {}
    assert counters["stats"]["unique_graphs"] == 1


def test_the_loss_compiles_without_graph_breaks() -> None:
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(token_loss, backend="aot_eager", fullgraph=True)
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(32, 8, requires_grad=True)
    compiled(hidden, weight, torch.arange(6)).backward()
    assert counters["graph_break"] == {}


def test_blocks_share_one_graph_and_are_not_compiled_again() -> None:
    torch._dynamo.reset()
    counters.clear()
    made = make()
    parallelize.compile_blocks(made, "aot_eager")
    for _ in range(4):
        made(*batch()).backward()
    assert counters["stats"]["unique_graphs"] == 2  # the block and the loss
    assert counters["graph_break"] == {}


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled_equals_eager(backend: str) -> None:
    torch._dynamo.reset()
    eager, compiled = make(), make()
    parallelize.compile_blocks(compiled, backend)
    losses = [made(*batch()) for made in (eager, compiled)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    for name, gradient in gradients(eager).items():
        torch.testing.assert_close(gradients(compiled)[name], gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 7, 16, 64])
def test_chunked_loss_equals_the_plain_one(chunk: int) -> None:
    tokens, targets = batch()
    targets[0, :5] = IGNORE
    plain, chunked = make(), make(chunk=chunk)
    wanted = functional.cross_entropy(plain(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    loss = chunked(tokens, targets)
    torch.testing.assert_close(loss, wanted)
    loss.backward()
    wanted.backward()
    for name, gradient in gradients(plain).items():
        torch.testing.assert_close(gradients(chunked)[name], gradient, rtol=1e-4, atol=1e-5)


def test_the_first_loss_is_that_of_guessing() -> None:
    tokens, targets = batch()
    assert make()(tokens, targets).item() / targets.numel() == pytest.approx(
        math.log(TINY.vocab_size), abs=0.1
    )


def test_attention_is_causal() -> None:
    made, (tokens, _) = make(), batch()
    changed = tokens.clone()
    changed[:, 20] = (changed[:, 20] + 1) % TINY.vocab_size
    before, after = made(tokens), made(changed)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])


def test_rotary_scaling_is_llama_3s() -> None:
    """Against the formula as published, written with its branches."""
    shape = replace(FLAVORS["llama3-8b"], rope_scaling=Decimal(8))
    cos, _ = model.rope_tables(shape, 2)
    for index in range(shape.head_dim // 2):
        frequency = 500000.0 ** (-2 * index / shape.head_dim)
        wavelength = 2 * math.pi / frequency
        if wavelength > 8192 / 1:
            frequency /= 8
        elif wavelength > 8192 / 4:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            frequency = (1 - smooth) * frequency / 8 + smooth * frequency
        assert cos[1, index].item() == pytest.approx(math.cos(frequency), abs=1e-6)


def test_initial_weights_depend_on_seed_and_name_only() -> None:
    first, again, other = make(seed=1), make(seed=1, length=64), make(seed=2)
    for name, value in named_parameters(first).items():
        assert torch.equal(value, named_parameters(again)[name])
        assert value.ndim == 1 or not torch.equal(value, named_parameters(other)[name])
    deeper = make(replace(TINY, layers=3))
    name = "layers.1.mlp.gate_proj.weight"
    assert torch.equal(named_parameters(first)[name], named_parameters(deeper)[name])


def test_initial_spread() -> None:
    weights = named_parameters(make(replace(TINY, dim=256, hidden=512)))
    assert weights["layers.0.mlp.gate_proj.weight"].std().item() == pytest.approx(0.02, rel=0.02)
    assert weights["layers.0.mlp.down_proj.weight"].std().item() == pytest.approx(0.02 / 2, rel=0.02)
    assert weights["embed_tokens.weight"].mean().item() == pytest.approx(0, abs=1e-3)


def test_tied_heads_share_their_weight() -> None:
    made = make()
    assert made.lm_head.weight is made.embed_tokens.weight
    assert "lm_head.weight" not in named_parameters(made)
    untied = make(replace(TINY, tied=False))
    assert untied.lm_head.weight is not untied.embed_tokens.weight


def test_the_cache_changes_nothing() -> None:
    made, (tokens, _) = make(), batch(1)
    whole = made(tokens)
    caches = [Cache(1, 32, TINY, device=torch.device("cpu"), dtype=torch.float32) for _ in made.layers]
    parts = [made(part, caches=caches) for part in (tokens[:, :10], *tokens[:, 10:].split(1, dim=1))]
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)


def test_sampling_is_repeatable() -> None:
    made = make(length=24)
    texts = [
        list(generate.sample(made, [1, 2], 20, temperature, seed))
        for temperature, seed in ((1, 5), (1, 5), (1, 6), (0, 5), (0, 6))
    ]
    assert texts[0] == texts[1] != texts[2]
    assert texts[3] == texts[4]
