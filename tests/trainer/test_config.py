"""The configuration is strict, exact and torch-free."""

from __future__ import annotations

import json
import subprocess
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.support import BOOT
from trainer import config, fields
from trainer.config import Config
from trainer.errors import TrainerError
from trainer.flavors import FLAVORS


def resolved(*settings: str, **options: Any) -> Config:
    return config.resolve(settings=settings, device="cpu", **options)[0]


def refused(*settings: str, **options: Any) -> TrainerError:
    with pytest.raises(TrainerError) as caught:
        resolved(*settings, **options)
    assert caught.value.exit_code == 2
    return caught.value


@pytest.mark.parametrize("preset", [None, *config.PRESETS])
@pytest.mark.parametrize("flavor", [None, *FLAVORS])
def test_written_and_read_back_exactly(preset: str | None, flavor: str | None) -> None:
    made = resolved(*([f"model.flavor={flavor}"] if flavor else []), preset=preset)
    data = made.to_json()
    assert Config.from_json(data) == made
    assert Config.from_json(data).to_json() == data
    assert not _floats(json.loads(data))


@given(st.integers(1, 10**20), st.integers(0, 40))
def test_decimals_are_exact(digits: int, places: int) -> None:
    value = Decimal(digits).scaleb(-places)
    made = resolved(f'optimizer.learning_rate="{value}"')
    assert Config.from_json(made.to_json()).optimizer.learning_rate == value


def test_an_unknown_key_names_the_nearest() -> None:
    error = refused("train.step=3")
    assert error.code == "ST-T01"
    assert error.next_step == "did you mean 'train.steps'?"


def test_unknown_names() -> None:
    assert refused("model.flavor=llama3-8").next_step == "did you mean 'llama3-8b'?"
    assert refused(preset="quikstart").next_step == "did you mean 'quickstart'?"
    assert refused("optimizer.schedule=cosin").code == "ST-T02"


@pytest.mark.parametrize(
    "setting",
    [
        "train.steps=0",
        "train.steps=1.5",
        "train.steps=true",
        "train.steps=many",
        "compile=1",
        "optimizer.beta1=2",
        "optimizer.learning_rate=nan",
        "optimizer.learning_rate=inf",
        "optimizer.learning_rate=1e21",
        "optimizer.learning_rate=1e-41",
        "model.heads=3",
        "model.kv_heads=5",
        "model=3",
        "=3",
        "train.steps",
        "precision.compute=float64",
    ],
)
def test_bad_values(setting: str) -> None:
    assert refused(setting).code == "ST-T02"


def test_later_layers_win(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[train]\nsteps = 7\n[optimizer]\nlearning_rate = 0.25\n[model]\nflavor = "tiny"\n')
    made = resolved("train.steps=9", preset="quickstart", file=config.read_file(file))
    assert (made.train.steps, made.optimizer.learning_rate, made.model.dim) == (9, Decimal("0.25"), 64)


def test_the_vocabulary_follows_the_tokenizer_unless_it_is_set() -> None:
    assert resolved(preset="quickstart", vocab_size=777).model.vocab_size == 777
    assert resolved("model.vocab_size=1000", preset="quickstart", vocab_size=777).model.vocab_size == 1000


def test_nothing_automatic_is_left() -> None:
    made, reasons = config.resolve(settings=["compile=auto", "precision.compute=auto"])
    assert made.device in ("cpu", "cuda")
    assert len(reasons) == 3
    with pytest.raises(TrainerError):
        Config.from_document({**json.loads(made.to_json()), "device": "auto"})


def test_a_mesh_must_make_up_the_world() -> None:
    assert resolved("parallel.dp_replicate=2").mesh(8) == (2, 4)
    assert resolved("train.micro_batch=0", "train.global_batch=24").rows(8) == 3
    impossible = (
        (("parallel.dp_replicate=3",), 8),
        (("parallel.dp_shard=4",), 2),
        ((), 3),
        (("train.micro_batch=3",), 2),
        (("train.micro_batch=0", "train.global_batch=8"), 16),
    )
    for settings, world in impossible:
        with pytest.raises(TrainerError) as caught:
            resolved(*settings).mesh(world)
        assert caught.value.code == "ST-T04"


def test_a_resolved_configuration_is_complete() -> None:
    document = json.loads(resolved().to_json())
    del document["train"]["steps"]
    with pytest.raises(TrainerError) as caught:
        Config.from_document(document)
    assert caught.value.code == "ST-T02"


def test_parameters_are_those_of_the_published_models() -> None:
    published = {
        "llama2-7b": 6_738_415_616,
        "llama2-13b": 13_015_864_320,
        "llama2-70b": 68_976_648_192,
        "llama3-1b": 1_235_814_400,
        "llama3-3b": 3_212_749_824,
        "llama3-8b": 8_030_261_248,
        "llama3-70b": 70_553_706_496,
        "llama3-405b": 405_853_388_800,
    }
    assert {name: FLAVORS[name].parameters for name in published} == published
    assert FLAVORS["quickstart"].parameters < 1_000_000


def test_every_field_is_documented() -> None:
    described = list(fields.describe(Config))
    assert len(described) > 40
    assert all(doc and default is not None for _, default, doc in described)


def test_the_command_prints_one_document_without_torch() -> None:
    check = "; assert 'torch' not in sys.modules"
    code = BOOT.replace("sys.exit(main(sys.argv[1:]))", f"main(sys.argv[1:]){check}")
    arguments = ["config", "--preset", "quickstart", "--device", "cpu", "--world-size", "2"]
    command = [sys.executable, "-I", "-c", code, *arguments, "--set", "train.steps=5"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert Config.from_json(done.stdout.encode()).train.steps == 5
    assert "compile:" in done.stderr


def test_the_command_refuses_in_one_message() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-c", BOOT, "config", "--set", "optimizer.lr=1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error[ST-T01]: there is no configuration key 'optimizer.lr'\n")
    assert "Traceback" not in done.stderr


def _floats(document: Any) -> bool:
    if isinstance(document, dict):
        return any(_floats(value) for value in document.values())
    return isinstance(document, float)
