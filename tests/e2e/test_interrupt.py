"""Interruptions: a run that is stopped, or killed, goes on bit for bit; nothing half-made has a final name;
nothing is left running.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from supplychain.artifact import Manifest
from tests.e2e.site import SHORT, Site, children, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

_OPEN = tuple(item for item in SHORT if not item.startswith(("train.steps", "checkpoint")))
LONG = (*_OPEN, "train.steps=12", "checkpoint.every=2")
ENDLESS = (*_OPEN, "train.steps=100000", "checkpoint.every=20")


def weights(run: Path, step: int) -> dict[str, str]:
    """sha256 of every file of a checkpoint but those that name the run itself."""
    folder = run / "checkpoints" / f"step-{step:08d}"
    manifest = Manifest.parse((folder / "secure-train" / "manifest.json").read_bytes())
    return {file.path: file.sha256 for file in manifest.files if file.path.endswith(".safetensors")}


def state(run: Path, step: int) -> dict[str, object]:
    found: dict[str, object] = json.loads(
        (run / "checkpoints" / f"step-{step:08d}" / "state.json").read_bytes()
    )
    return {name: value for name, value in found.items() if name != "plan"}


def no_half_checkpoints(run: Path) -> None:
    """Whatever has a final name is whole: it can be parsed, and all its files are there."""
    for folder in (run / "checkpoints").glob("step-*"):
        assert (folder / "state.json").is_file()
        assert list((folder / "model").glob("*.safetensors"))


@pytest.mark.parametrize("processes", [1, 2])
def test_a_resumed_run_equals_one_that_never_stopped(site: Site, tmp_path: Path, processes: int) -> None:
    """What came after the checkpoint of step 6 is taken away, as a crash would."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    site.ok(*site.train(whole, settings=LONG, processes=processes))
    shutil.copytree(whole, broken)
    for step in (8, 10, 12):
        shutil.rmtree(broken / "checkpoints" / f"step-{step:08d}")
        (broken / "statements" / f"checkpoint-{step:08d}.sigstore.json").unlink()
    (broken / "statements" / "provenance.sigstore.json").unlink()
    (broken / "result.json").unlink()
    site.ok("run", "--resume", broken)
    assert weights(broken, 12) == weights(whole, 12)
    assert state(broken, 12) == state(whole, 12)
    code, answer = site.json("verify", broken)
    assert code == 0
    assert "segment 2" in json.dumps(answer)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops_and_the_run_goes_on(
    site: Site, tmp_path: Path, number: signal.Signals
) -> None:
    run = tmp_path / "run"
    process = site.start(*site.train(run, settings=ENDLESS))
    wait_for(
        lambda: (run / "metrics.jsonl").is_file() and (run / "metrics.jsonl").stat().st_size > 0, process
    )
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 128 + number, stderr
    assert "Traceback" not in stderr
    result = json.loads((run / "result.json").read_bytes())
    assert result["status"] == "stopped"
    assert result["signal"] == number.name
    assert f"saved {run}/checkpoints/{result['checkpoint']}" in stdout
    assert (run / "statements" / f"checkpoint-{result['step']:08d}.sigstore.json").is_file()
    no_half_checkpoints(run)
    assert not children(process.pid)

    again = site.start("run", "--resume", run)
    wait_for(lambda: f'"step": {result["step"] + 2}' in (run / "metrics.jsonl").read_text(), again)
    again.send_signal(number)
    again.communicate(timeout=120)
    assert json.loads((run / "result.json").read_bytes())["step"] > result["step"]
    assert site.run("verify", run).returncode == 0


def test_a_second_signal_kills(site: Site, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = site.start(*site.train(run, settings=ENDLESS))
    wait_for(lambda: bool(children(process.pid)), process)
    below = set(children(process.pid))
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    process.communicate(timeout=60)
    assert process.returncode in (130, 137)
    gone(below)


@pytest.mark.parametrize("moment", [0.1, 0.7, 1.5, 4.0])
def test_ctrl_c_at_any_moment_before_training(site: Site, tmp_path: Path, moment: float) -> None:
    run = tmp_path / "run"
    process = site.start(*site.train(run, settings=ENDLESS))
    time.sleep(moment)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 130 or process.returncode == -signal.SIGINT, stderr
    assert "Traceback" not in stderr or moment < 0.3  # the interpreter itself is starting
    assert not children(process.pid)


def test_kill_9_of_the_launcher_leaves_no_orphans_and_the_run_goes_on(site: Site, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = site.start(*site.train(run, settings=ENDLESS))
    first = run / "statements" / "checkpoint-00000020.sigstore.json"
    wait_for(first.is_file, process)
    below = set(children(process.pid))
    assert below
    process.kill()
    process.communicate()
    gone(below)
    no_half_checkpoints(run)
    again = site.start("run", "--resume", run)
    wait_for(lambda: (run / "statements" / "decision-0002.sigstore.json").is_file(), again)
    wait_for(lambda: len(list((run / "statements").glob("checkpoint-*"))) > 1, again)
    again.send_signal(signal.SIGTERM)
    again.communicate(timeout=120)
    assert site.run("verify", run).returncode == 0


def test_kill_9_of_a_rank_ends_the_run_with_a_reason(site: Site, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = site.start(*site.train(run, settings=ENDLESS))
    wait_for((run / "statements" / "checkpoint-00000020.sigstore.json").is_file, process)
    below = children(process.pid)
    ranks = ranks_of(below)
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode not in (0, 3, 4, 5), stderr
    assert "error[ST-" in stderr
    gone(set(below))
    no_half_checkpoints(run)
    assert json.loads((run / "result.json").read_bytes())["status"] == "failed"


def ranks_of(below: dict[int, str]) -> list[int]:
    """The training processes; torchrun's command line holds theirs."""
    return [
        pid for pid, line in below.items() if " -m trainer " in line and "torch.distributed.run" not in line
    ]


def gone(pids: set[int]) -> None:
    """All of these processes end by themselves, soon."""
    deadline = time.monotonic() + 60
    while alive := [pid for pid in pids if _alive(pid)]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# --- what is resumed must be what was signed ----------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was interrupted after a few checkpoints."""
    run = tmp_path_factory.mktemp("stopped") / "run"
    process = site.start(*site.train(run, settings=(*ENDLESS, "checkpoint.every=2")))
    wait_for((run / "statements" / "checkpoint-00000004.sigstore.json").is_file, process)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=120)
    return run


def last_checkpoint(run: Path) -> Path:
    return max((run / "checkpoints").glob("step-*"))


def test_a_tampered_checkpoint_is_not_resumed_from(site: Site, stopped: Path) -> None:
    """The gate compares names and sizes; the ranks verify every range that they read."""
    weights = next((last_checkpoint(stopped) / "model").glob("*.safetensors"))
    before = weights.read_bytes()
    weights.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    try:
        done = site.run("run", "--resume", stopped)
    finally:
        weights.write_bytes(before)
    assert done.returncode == 3, done.stderr
    assert "error[ST-A03]" in done.stderr
    assert weights.name in done.stderr


def test_an_edited_plan_is_not_resumed(site: Site, stopped: Path) -> None:
    plan = stopped / "plan.json"
    before = plan.read_bytes()
    plan.write_bytes(before.replace(b'"seed":"1234"', b'"seed":"1235"'))
    try:
        done = site.run("run", "--resume", stopped)
    finally:
        plan.write_bytes(before)
    assert done.returncode == 3, done.stderr
    assert "error[ST-R06]" in done.stderr


def test_a_checkpoint_rolled_back_in_the_chain_is_not_resumed(site: Site, stopped: Path) -> None:
    """The newest checkpoint's folder replaced by an older, validly signed one."""
    newest = last_checkpoint(stopped)
    aside = newest.with_name("aside")
    newest.rename(aside)
    shutil.copytree(min((stopped / "checkpoints").glob("step-*")), newest)
    try:
        done = site.run("run", "--resume", stopped)
    finally:
        shutil.rmtree(newest)
        aside.rename(newest)
    assert done.returncode == 3, done.stderr
    assert "error[ST-R03]" in done.stderr


# --- the key is never in the training process ---------------------------------------------------------------


def test_no_process_of_the_training_can_reach_the_key(site: Site, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = site.start(*site.train(run, settings=ENDLESS))
    wait_for((run / "statements" / "checkpoint-00000020.sigstore.json").is_file, process)
    key = (site.folder / "config" / "keys" / "owner.key").read_bytes()
    secret = key.split(b"-----")[2].replace(b"\n", b"")[20:60]
    below = children(process.pid)
    try:
        assert len(ranks_of(below)) == 2
        for pid in below:
            entry = Path(f"/proc/{pid}")
            variables, arguments = (entry / "environ").read_bytes(), (entry / "cmdline").read_bytes()
            for data in (variables, arguments):
                assert secret not in data
                assert b"owner.key" not in data
                assert b"SECURE_TRAIN" not in data
                assert str(site.folder / "config").encode() not in data
            opened = [os.readlink(item) for item in (entry / "fd").iterdir()]
            assert not [path for path in opened if "/keys/" in path or "config" in path]
            assert hashlib.sha256(key).hexdigest() not in variables.decode(errors="replace")
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)


def test_a_complete_run_is_not_resumed(site: Site, finished: Path) -> None:
    done = site.run("run", "--resume", finished)
    assert done.returncode == 2
    assert "error[ST-R02]" in done.stderr


def test_a_run_that_trained_but_was_not_attested_gets_its_provenance_on_resume(
    site: Site, finished: Path, tmp_path: Path
) -> None:
    """As after Ctrl-C, or a full disk, between the last step and the provenance: nothing is trained again."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    (run / "statements" / "provenance.sigstore.json").unlink()
    result = run / "result.json"
    result.write_text(result.read_text().replace('"phase": "done"', '"phase": "attest"'))
    before = weights(run, 6)
    site.ok("run", "--resume", run)
    assert weights(run, 6) == before
    assert site.run("verify", run).returncode == 0
    assert (run / "statements" / "provenance.sigstore.json").is_file()
