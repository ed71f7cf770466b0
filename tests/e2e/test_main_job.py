"""The main job through the command line: what a run leaves, and that changed bytes are refused with the right
code.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from supplychain.artifact import canonical_json
from tests.e2e.site import Site

pytestmark = pytest.mark.e2e


def flip(path: Path, offset: int = 100) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def copy(folder: Path, target: Path) -> Path:
    shutil.copytree(folder, target)
    return target


def payload(bundle: Path) -> Any:
    """The statement that a bundle signs."""
    return json.loads(base64.b64decode(json.loads(bundle.read_bytes())["dsseEnvelope"]["payload"]))


# --- what a run leaves --------------------------------------------------------------------------------------


def test_a_run_leaves_signed_checkpoints_statements_and_a_result(site: Site, finished: Path) -> None:
    result = json.loads((finished / "result.json").read_bytes())
    assert (result["status"], result["phase"], result["exit_code"], result["step"]) == (
        "completed",
        "done",
        0,
        6,
    )
    assert sorted(path.name for path in (finished / "checkpoints").iterdir()) == [
        "step-00000002",
        "step-00000004",
        "step-00000006",
    ]
    names = {path.name for path in (finished / "statements").iterdir()}
    steps = {f"checkpoint-{step:08d}.sigstore.json" for step in (2, 4, 6)}
    assert names == {"decision-0001.sigstore.json", "plan-0001.json", "provenance.sigstore.json"} | steps
    losses = [
        json.loads(line)["loss"]
        for line in (finished / "metrics.jsonl").read_text().splitlines()
        if '"loss"' in line
    ]
    assert len(losses) >= 6


def test_plan_and_statements_hold_digests_only_and_are_canonical(finished: Path) -> None:
    data = (finished / "plan.json").read_bytes()
    assert canonical_json(json.loads(data)) == data
    provenance = payload(finished / "statements" / "provenance.sigstore.json")
    assert provenance["predicateType"] == "https://slsa.dev/provenance/v1"
    materials = {
        item["name"].split(":")[0]
        for item in provenance["predicate"]["buildDefinition"]["resolvedDependencies"]
    }
    assert {"dataset", "tokenizer", "environment", "policy", "plan", "decision", "code"} <= materials


def test_no_checkpoint_holds_a_pickle(finished: Path) -> None:
    files = [path for path in (finished / "checkpoints").rglob("*") if path.is_file()]
    kinds = {path.suffix for path in files if "secure-train" not in path.parts}
    assert kinds == {".safetensors", ".json"}


def test_verify_walks_the_whole_graph(site: Site, finished: Path) -> None:
    code, answer = site.json("verify", finished)
    assert code == 0
    titles = json.dumps(answer)
    for part in (
        "policy development",
        "decision",
        "dataset data",
        "tokenizer tokenizer",
        "environment",
        "step-00000006",
        "provenance",
    ):
        assert part in titles
    assert '"failed"' not in titles
    assert '"not checked"' not in titles


def test_the_result_writes_text(site: Site, finished: Path) -> None:
    text = site.ok(
        "generate", finished / "checkpoints" / "step-00000006", "--prompt", "Scene", "--tokens", "20"
    )
    assert text.startswith("Scene")


def test_a_dataset_that_moved_away_is_shown_as_not_checked(site: Site, finished: Path) -> None:
    aside = site.folder / "aside"
    site.data.rename(aside)
    try:
        code, answer = site.json("verify", finished)
    finally:
        aside.rename(site.data)
    assert code == 0
    assert '"not checked"' in json.dumps(answer)


# --- break it -----------------------------------------------------------------------------------------------


def refusal(done: subprocess.CompletedProcess[str], code: str, exit_code: int, name: str) -> None:
    assert done.returncode == exit_code, done.stderr
    assert f"error[{code}]" in done.stderr
    assert name in done.stderr
    assert "Traceback" not in done.stderr


def test_a_changed_byte_in_a_shard_is_refused(site: Site, tmp_path: Path) -> None:
    data = copy(site.data, tmp_path / "data")
    shard = next(data.glob("*.bin"))
    flip(shard)
    refusal(site.run("verify", data), "ST-A03", 3, shard.name)


def test_a_changed_byte_in_a_shard_stops_training_when_it_is_read(site: Site, tmp_path: Path) -> None:
    """The gate is lazy with data: names and sizes. The loader that reads the block refuses it, and the
    launcher knows why.
    """
    data = copy(site.data, tmp_path / "data")
    for shard in data.glob("*.bin"):
        for offset in range(0, shard.stat().st_size, 65536):
            flip(shard, offset)
    arguments = site.train(tmp_path / "run")
    arguments[arguments.index(site.data)] = data
    done = site.run(*arguments)
    refusal(done, "ST-A03", 3, ".bin")
    result = json.loads((tmp_path / "run" / "result.json").read_bytes())
    assert (result["phase"], result["status"], result["exit_code"]) == ("attest", "failed", 3)
    assert (
        not list((tmp_path / "run" / "checkpoints").glob("*"))
        if (tmp_path / "run" / "checkpoints").exists()
        else True
    )


def test_a_truncated_shard_is_refused_by_the_gate(site: Site, tmp_path: Path) -> None:
    data = copy(site.data, tmp_path / "data")
    shard = next(data.glob("*.bin"))
    with open(shard, "r+b") as file:
        file.truncate(shard.stat().st_size - 2)
    arguments = site.train(tmp_path / "run")
    arguments[arguments.index(site.data)] = data
    refusal(site.run(*arguments), "ST-A06", 3, shard.name)
    assert not (tmp_path / "run" / "plan.json").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert len(list((tmp_path / "run" / "statements").glob("refused-*.sigstore.json"))) == 1


def test_a_changed_byte_in_a_checkpoint_is_refused(site: Site, finished: Path, tmp_path: Path) -> None:
    run = copy(finished, tmp_path / "run")
    weights = next((run / "checkpoints" / "step-00000004").rglob("*.safetensors"))
    flip(weights, weights.stat().st_size - 5)
    refusal(site.run("verify", run), "ST-A03", 3, weights.name)


def test_a_changed_installed_package_is_refused_before_anything_runs(site: Site, tmp_path: Path) -> None:
    module = next(site.environment.glob("lib/python*/site-packages/numpy/version.py"))
    before = module.read_bytes()
    module.write_bytes(before + b"\n# changed\n")
    try:
        refusal(site.run(*site.train(tmp_path / "run")), "ST-E03", 3, "numpy/version.py")
        refusal(site.run("env", "verify"), "ST-E03", 3, "numpy/version.py")
    finally:
        module.write_bytes(before)
    assert not (tmp_path / "run" / "plan.json").exists()


def test_a_start_up_file_in_the_environment_is_refused_and_not_executed(site: Site, tmp_path: Path) -> None:
    witness = tmp_path / "executed"
    payload = next(site.environment.glob("lib/python*/site-packages")) / "helper.pth"
    payload.write_text(f"import pathlib; pathlib.Path({str(witness)!r}).touch()\n")
    try:
        refusal(site.run(*site.train(tmp_path / "run")), "ST-E04", 3, "helper.pth")
    finally:
        payload.unlink()
    assert not witness.exists()


@pytest.mark.parametrize(
    "victim",
    [
        "plan.json",
        "statements/plan-0001.json",
        "statements/decision-0001.sigstore.json",
        "statements/checkpoint-00000004.sigstore.json",
        "statements/provenance.sigstore.json",
        "policy.toml",
    ],
)
def test_an_edited_file_of_the_run_is_noticed(
    site: Site, finished: Path, tmp_path: Path, victim: str
) -> None:
    run = copy(finished, tmp_path / "run")
    data = (run / victim).read_bytes()
    if victim == "policy.toml":  # the copy is for people; under it nothing can be verified any more
        (run / victim).write_bytes(data.replace(b"threshold = 1", b"threshold = 1 "))
        done = site.run("verify", run, "--policy", run / victim)
        assert done.returncode == 3
        return
    middle = len(data) // 2
    (run / victim).write_bytes(data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :])
    done = site.run("verify", run)
    assert done.returncode in (2, 3), done.stderr
    assert "error[ST-" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_removed_checkpoint_is_noticed(site: Site, finished: Path, tmp_path: Path) -> None:
    run = copy(finished, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "step-00000006")
    (run / "statements" / "checkpoint-00000006.sigstore.json").unlink()
    done = site.run("verify", run)
    refusal(done, "ST-S04", 3, "provenance")


# --- whose word it is ---------------------------------------------------------------------------------------


def test_unsigned_data_cannot_be_decided(site: Site, tmp_path: Path) -> None:
    data = copy(site.data, tmp_path / "data")
    shutil.rmtree(data / "secure-train")
    arguments = site.train(tmp_path / "run")
    arguments[arguments.index(site.data)] = data
    refusal(site.run(*arguments), "ST-A09", 5, "data")


def test_data_signed_by_a_stranger_is_refused(site: Site, tmp_path: Path) -> None:
    data = copy(site.data, tmp_path / "data")
    foreign = str(tmp_path / "foreign")
    site.ok("keys", "new", "stranger", SECURE_TRAIN_CONFIG=foreign)
    site.ok("sign", data, "--kind", "dataset", SECURE_TRAIN_CONFIG=foreign)
    arguments = site.train(tmp_path / "run")
    arguments[arguments.index(site.data)] = data
    refusal(site.run(*arguments), "ST-S02", 4, "data")


def test_an_expired_policy_is_refused(site: Site, tmp_path: Path) -> None:
    policy = tmp_path / "old.toml"
    text = site.policy.read_text()
    expires = next(line for line in text.splitlines() if line.startswith("expires"))
    policy.write_text(text.replace(expires, 'expires = "2020-01-01T00:00:00Z"'))
    site.ok("policy", "sign", policy)
    refusal(site.run(*site.train(tmp_path / "run", "--policy", str(policy))), "ST-P01", 4, "old.toml")


def test_another_lock_than_the_environments_is_refused(site: Site, tmp_path: Path) -> None:
    lock = tmp_path / "other.lock"
    lock.write_text(f"numpy==2.0.0 --hash=sha256:{'a' * 64}\n")
    refusal(site.run(*site.train(tmp_path / "run", "--lock", str(lock))), "ST-E02", 3, "environment")
    refusal(site.run("env", "verify", "--lock", lock), "ST-E02", 3, "environment")


def test_every_refusal_is_in_the_signed_decision(site: Site, tmp_path: Path) -> None:
    """All rules are evaluated: two things wrong, two refusals; the gravest decides the exit code."""
    data = copy(site.data, tmp_path / "data")
    (data / "extra.py").write_text("print('hello')")
    arguments = site.train(tmp_path / "run", "--reads", "off")
    arguments[arguments.index(site.data)] = data
    done = site.run(*arguments)
    assert done.returncode == 3
    statement = payload(next((tmp_path / "run" / "statements").glob("refused-*")))
    verdicts = statement["predicate"]["urn:secure-train:verdicts:v1"]
    failed = {verdict["code"] for verdict in verdicts if verdict["result"] == "fail"}
    assert failed == {"ST-A05", "ST-P07"}
    assert {verdict["rule"] for verdict in verdicts if verdict["result"] == "not checked"} >= {
        "dataset.formats",
        "config",
    }
