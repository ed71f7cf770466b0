"""Checkpoints in one process: what is written, what is refused when read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from supplychain.artifact import SecureTrainError, VerifiedArtifact, build_manifest
from trainer import checkpoint
from trainer.checkpoint import MODEL, OPTIMIZER, TrainingState
from trainer.errors import TrainerError

pytestmark = pytest.mark.usefixtures("alone")

DOCUMENTS = {"state.json": b"{}\n", "config.json": b"{}\n"}


def tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "layers.0.weight": torch.randn(300, 70, generator=generator),
        "half": torch.randn(5, 3, 2, generator=generator).bfloat16(),
        "step": torch.tensor(7.0),
        "count": torch.arange(10),
    }


def save(folder: Path, step: int = 5) -> Path:
    return checkpoint.save(folder, step, tensors(), {"a.exp_avg": torch.ones(4)}, DOCUMENTS)


def sign(folder: Path) -> VerifiedArtifact:
    return VerifiedArtifact.open(folder, build_manifest(folder, "checkpoint").digest)


def empty() -> dict[str, Tensor]:
    return {name: torch.zeros_like(value) for name, value in tensors().items()}


def refused(artifact: VerifiedArtifact, template: dict[str, Tensor]) -> TrainerError | SecureTrainError:
    with pytest.raises((TrainerError, SecureTrainError)) as caught:
        checkpoint.load(artifact, MODEL, template)
    assert isinstance(caught.value, TrainerError | SecureTrainError)
    return caught.value


def test_a_checkpoint_is_safetensors_and_json(tmp_path: Path) -> None:
    folder = save(tmp_path)
    assert folder.name == "step-00000005"
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    assert {path.suffix for path in files.values()} == {".safetensors", ".json"}
    assert {name.split("/")[0] for name in files} == {MODEL, OPTIMIZER, *DOCUMENTS}
    found: dict[str, Tensor] = {}
    for path in (folder / MODEL).iterdir():
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    assert all(torch.equal(found[name], value) for name, value in tensors().items())


def test_what_was_saved_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = sign(save(tmp_path))
    for piece in (16 << 20, 1000, 1):  # bytes read at once; a row at least
        monkeypatch.setattr(checkpoint, "PIECE_BYTES", piece)
        template = empty()
        checkpoint.load(artifact, MODEL, template)
        assert all(torch.equal(template[name], value) for name, value in tensors().items())


def test_every_changed_byte_is_refused_and_named(tmp_path: Path) -> None:
    folder = save(tmp_path)
    artifact = sign(folder)
    path = next((folder / MODEL).iterdir())
    original = path.read_bytes()
    for at in (0, 20, len(original) // 2, len(original) - 1):
        path.write_bytes(original[:at] + bytes([original[at] ^ 1]) + original[at + 1 :])
        error = refused(artifact, empty())
        assert error.code == "ST-A03"
        assert str(path) in str(error.where)
    path.write_bytes(original[:-1])
    assert refused(artifact, empty()).code == "ST-A06"
    path.unlink()
    assert refused(artifact, empty()).code == "ST-A04"


def _lack(template: dict[str, Tensor]) -> None:
    del template["half"]


def _more(template: dict[str, Tensor]) -> None:
    template["other"] = torch.zeros(2)


def _shape(template: dict[str, Tensor]) -> None:
    template["half"] = template["half"][:4]


def _type(template: dict[str, Tensor]) -> None:
    template["half"] = template["half"].float()


@pytest.mark.parametrize("change", [_lack, _more, _shape, _type])
def test_names_shapes_and_types_must_be_the_models(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], None]
) -> None:
    template = empty()
    change(template)
    assert refused(sign(save(tmp_path)), template).code == "ST-C02"


def test_a_missing_shard_is_noticed_though_it_was_signed(tmp_path: Path) -> None:
    """A subset, signed as if it were all: the rest would keep its initial values."""
    folder = save(tmp_path)
    next((folder / MODEL).iterdir()).rename(folder / MODEL / "moved.bin")
    assert refused(sign(folder), empty()).code == "ST-C02"


def test_signed_checkpoints_are_never_replaced(tmp_path: Path) -> None:
    folder = save(tmp_path)
    artifact = sign(folder)
    with pytest.raises(TrainerError) as caught:
        save(tmp_path)
    assert caught.value.code == "ST-C04"
    checkpoint.load(artifact, MODEL, empty())


def test_leftovers_of_a_killed_run_are_in_nobodys_way(tmp_path: Path) -> None:
    (tmp_path / ".step-00000005.partial/model").mkdir(parents=True)
    (tmp_path / ".step-00000005.partial/model/x.safetensors").write_bytes(b"half")
    unsigned = save(tmp_path, step=5)
    (unsigned / "state.json").write_bytes(b"old")
    folder = save(tmp_path, step=5)
    assert (folder / "state.json").read_bytes() == DOCUMENTS["state.json"]
    assert (tmp_path / ".step-00000005.unsigned-0/state.json").read_bytes() == b"old"
    checkpoint.load(sign(folder), MODEL, empty())


def test_a_checkpoint_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(TrainerError) as caught:
        save(tmp_path / "file")
    assert caught.value.code == "ST-C03"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


STATE = TrainingState(
    step=7,
    tokens=1000,
    loss="1.25",
    loader={"consumed": "9"},
    plan="00" * 32,
    facts={"torch": "2"},
    world_size=2,
)


def test_the_state_is_read_back_exactly() -> None:
    assert TrainingState.from_json(STATE.to_json()) == STATE


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"step":"7"', b'"step":"x"'),
        (b'"step":"7",', b""),
        (b'"step"', b'"stop"'),
        (b"state:v1", b"state:v2"),
        (b"}", b',"x":1}'),
    ],
)
def test_a_malformed_state_is_refused(old: bytes, new: bytes) -> None:
    data = STATE.to_json()
    assert old in data
    head, _, tail = data.rpartition(old)
    with pytest.raises(TrainerError) as caught:
        TrainingState.from_json(head + new + tail)
    assert caught.value.code == "ST-C05"
