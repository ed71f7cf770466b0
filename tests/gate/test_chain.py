"""The chain of checkpoints: whatever is removed, reordered, exchanged, edited or rolled back is noticed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from supplychain import chain
from supplychain.chain import Link
from supplychain.errors import SecureTrainError
from supplychain.trust.verify import verify_artifact
from tests.gate.workshop import Workshop

RUN, DECISION = "pretrain-1", "d" * 64


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    return Workshop.create(tmp_path / "shop")


@pytest.fixture
def run(tmp_path: Path, shop: Workshop) -> Path:
    """Three checkpoints, signed and linked."""
    return make_run(tmp_path / "run", shop, RUN)


def make_run(run: Path, shop: Workshop, run_id: str) -> Path:
    (run / chain.STATEMENTS).mkdir(parents=True)
    last: Link | None = None
    for step in (10, 20, 30):
        folder = run / chain.CHECKPOINTS / chain.step_name(step)
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(f'{{"step":"{step}","of":"{run_id}"}}')
        last = chain.append(run, run_id, step, DECISION, last, shop.signer("owner"))
    return run


def load(run: Path, shop: Workshop, decisions: list[str] | None = None) -> list[Link]:
    return chain.load(run, RUN, shop.load().trust, "checkpoint", decisions or [DECISION])


def statement(run: Path, step: int) -> Path:
    return run / chain.STATEMENTS / f"checkpoint-{step:08d}.sigstore.json"


def refusal(run: Path, shop: Workshop) -> str:
    with pytest.raises(SecureTrainError) as caught:
        load(run, shop)
    return caught.value.code


def test_the_chain_holds(run: Path, shop: Workshop) -> None:
    links = load(run, shop)
    assert [(link.index, link.step) for link in links] == [(0, 10), (1, 20), (2, 30)]
    for link in links:
        signed = verify_artifact(
            run / chain.CHECKPOINTS / link.name, shop.load().trust, "checkpoint", kinds={"checkpoint"}
        )
        assert signed.manifest.digest == link.manifest


@pytest.mark.parametrize("step", [10, 20])
def test_a_removed_link_is_noticed(run: Path, shop: Workshop, step: int) -> None:
    statement(run, step).unlink()
    assert refusal(run, shop) == "ST-R03"


def test_reordered_links_are_noticed(run: Path, shop: Workshop) -> None:
    first, second = statement(run, 10), statement(run, 20)
    data = first.read_bytes()
    shutil.copy(second, first)
    second.write_bytes(data)
    assert refusal(run, shop) == "ST-R03"


def test_a_link_of_another_run_is_noticed(run: Path, shop: Workshop, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", shop, "pretrain-2")
    shutil.copy(statement(other, 20), statement(run, 20))
    assert refusal(run, shop) == "ST-R03"


def test_a_forked_chain_is_noticed(run: Path, shop: Workshop, tmp_path: Path) -> None:
    """The same step made twice, from the same parent, with another content: its successor belongs to the
    other one.
    """
    fork = tmp_path / "fork"
    shutil.copytree(run, fork)
    for step in (20, 30):
        shutil.rmtree(fork / chain.CHECKPOINTS / chain.step_name(step))
        statement(fork, step).unlink()
    folder = fork / chain.CHECKPOINTS / chain.step_name(20)
    folder.mkdir()
    (folder / "state.json").write_text('{"step":"20","of":"the fork"}')
    chain.append(fork, RUN, 20, DECISION, load(fork, shop)[-1], shop.signer("owner"))
    shutil.copy(statement(fork, 20), statement(run, 20))
    assert refusal(run, shop) == "ST-R03"


def test_an_edited_link_is_noticed(run: Path, shop: Workshop) -> None:
    path = statement(run, 30)
    data = path.read_bytes()
    path.write_bytes(data.replace(b'"sig":"M', b'"sig":"N') if b'"sig":"M' in data else data[:-30])
    assert refusal(run, shop) in ("ST-S01", "ST-S03")


def test_a_link_signed_by_a_stranger_is_refused(run: Path, shop: Workshop) -> None:
    shop.key("stranger")
    statement(run, 30).unlink()
    previous = load(run, shop)[-1]
    chain.append(run, RUN, 30, DECISION, previous, shop.signer("stranger"))
    assert refusal(run, shop) == "ST-S02"


def test_a_link_of_an_unknown_decision_is_noticed(run: Path, shop: Workshop) -> None:
    with pytest.raises(SecureTrainError) as caught:
        load(run, shop, decisions=["e" * 64])
    assert caught.value.code == "ST-R03"


def test_a_link_under_a_wrong_name_is_noticed(run: Path, shop: Workshop) -> None:
    """Renaming a statement to a later step would make an old checkpoint the newest: a rollback."""
    statement(run, 20).rename(statement(run, 40))
    assert refusal(run, shop) == "ST-R03"


@pytest.mark.parametrize("name", ["step-000000020", "step-0000002０", "step-20", "best"])
def test_only_exact_names_are_checkpoints(run: Path, shop: Workshop, name: str) -> None:
    """A look-alike would neither be verified nor be missed."""
    shutil.copytree(run / chain.CHECKPOINTS / chain.step_name(20), run / chain.CHECKPOINTS / name)
    assert [step for step, _ in chain.checkpoint_folders(run)] == [10, 20, 30]
    assert [path.name for path in chain.strangers(run)] == [name]


def test_a_link_is_no_checkpoint(run: Path, shop: Workshop, tmp_path: Path) -> None:
    """The launcher would sign, and write into, a folder that the ranks cannot reach themselves."""
    (tmp_path / "elsewhere").mkdir()
    (run / chain.CHECKPOINTS / chain.step_name(40)).symlink_to(tmp_path / "elsewhere")
    assert [step for step, _ in chain.checkpoint_folders(run)] == [10, 20, 30]
    assert [path.name for path in chain.strangers(run)] == [chain.step_name(40)]
