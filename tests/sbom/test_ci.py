"""The CI check, run for real: its shell against a built environment, as the action and the template call
it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sbom.document import load
from tests.conftest import ROOT
from tests.environment.wheelhouse import make_lock, make_wheel

SCRIPT = ROOT / "ci" / "supply-chain"


class Job:
    """A job's folder, with secure-train on its PATH as a runner would have it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        programs = folder / "programs"
        programs.mkdir(parents=True)
        program = programs / "secure-train"
        start = f'{sys.executable} -c "from supplychain.cli import main; main()"'
        program.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {start} "$@"\n')
        program.chmod(0o755)
        self.variables = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "HOME": str(folder / "home"),
            "SECURE_TRAIN_CONFIG": str(folder / "config"),
            "SOURCE_DATE_EPOCH": "1764500000",
            "PYTHONPYCACHEPREFIX": os.environ["PYTHONPYCACHEPREFIX"],
            "GITHUB_ACTIONS": "true",
            "GITHUB_ACTION_PATH": str(ROOT),
            "GITHUB_STEP_SUMMARY": str(folder / "page.md"),
            "GITHUB_OUTPUT": str(folder / "outputs"),
        }

    def run(self, command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.variables | variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


def commands(file: str, key: str) -> list[str]:
    """The shell commands of a workflow file, one line each."""
    found = re.findall(rf"^\s*{key} '(.*)'$", (ROOT / file).read_text(), re.MULTILINE)
    assert found
    return found


@pytest.fixture
def job(tmp_path: Path) -> Job:
    house = tmp_path / "job" / "house"
    made = Job(tmp_path / "job")
    wheels = [make_wheel(house, "alpha"), make_wheel(house, "beta")]
    make_lock(made.folder / "lock", wheels)
    return made


@pytest.mark.slow
def test_the_action_and_the_template_end_to_end(job: Job) -> None:
    (command,) = commands("action.yml", "run:")
    done = job.run(command, ST_LOCK="lock", ST_WHEELHOUSE="house", ST_OUT="out")
    assert done.returncode == 0, done.stdout + done.stderr
    bom = load((job.folder / "out" / "environment.cdx.json").read_bytes(), where="out")
    assert {item["name"] for item in bom["components"]} >= {"alpha", "beta"}
    page = (job.folder / "page.md").read_text()
    for row in (
        "build | passed",
        "verify | passed",
        "sbom | passed",
        "validate | passed",
        "diff | not checked",
    ):
        assert row in page
    outputs = (job.folder / "outputs").read_text()
    assert "exit-code=0\n" in outputs
    assert re.search(r"^digest=sha256:[0-9a-f]{64}$", outputs, re.MULTILINE)
    assert json.loads((job.folder / "out" / "validate.sarif").read_bytes())["runs"][0]["results"] == []

    (command,) = commands("ci/gitlab.yml", "-")
    before = job.folder / "before.json"
    text = (job.folder / "out" / "environment.cdx.json").read_text()
    before.write_text(re.sub(r'"content": "[0-9a-f]{64}"', '"content": "' + "0" * 64 + '"', text))
    environment = (job.folder / "out" / "environment.path").read_text().split()[-1]
    again = job.run(
        command, SECURE_TRAIN=str(ROOT), ST_LOCK="lock", ST_ENVIRONMENT=environment, ST_BASELINE="before.json"
    )
    assert again.returncode == 4, again.stdout + again.stderr
    assert "diff | **failed, exit 4**" in (job.folder / "supply-chain" / "summary.md").read_text()
    (finding, *_) = json.loads((job.folder / "supply-chain" / "diff.sarif").read_bytes())["runs"][0][
        "results"
    ]
    assert finding["ruleId"] == "ST-M05"


@pytest.mark.slow
def test_the_base_branch_is_compared_with_by_its_lock(job: Job) -> None:
    git = "git -c user.name=t -c user.email=t@example.org"
    assert job.run(f"git init -q -b base . && git add lock && {git} commit -qm base").returncode == 0
    wheels = [
        job.folder / "house" / "alpha-1.0-py3-none-any.whl",
        make_wheel(job.folder / "house", "beta", "2.0"),
    ]
    make_lock(job.folder / "lock", wheels)
    done = job.run(f'"{SCRIPT}"', ST_LOCK="lock", ST_WHEELHOUSE="house", ST_OUT="out", ST_BASE_REF="base")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "version  pkg:pypi/beta: 1.0 -> 2.0" in (job.folder / "out" / "diff.log").read_text()


@pytest.mark.slow
def test_a_changed_environment_fails_with_its_code_and_leaves_no_bom(job: Job) -> None:
    built = job.run("secure-train env build --lock lock --store store --wheelhouse house")
    environment = Path(built.stdout.split()[-1])
    (module,) = environment.glob("lib/*/site-packages/alpha/__init__.py")
    module.chmod(0o644)
    module.write_text("evil")
    done = job.run(f'"{SCRIPT}"', ST_LOCK="lock", ST_ENVIRONMENT=str(environment), ST_OUT="out")
    assert done.returncode == 3
    assert not (job.folder / "out" / "environment.cdx.json").exists()
    assert "::error title=supply chain::verify failed with exit code 3" in done.stdout
    assert "exit-code=3\n" in (job.folder / "outputs").read_text()


def test_output_of_tools_is_no_workflow_command(job: Job) -> None:
    (job.folder / "lock").write_text("::error::forged\n")
    done = job.run(f'"{SCRIPT}"', ST_LOCK="lock", ST_OUT="out")
    assert done.returncode == 2
    stop, token = re.search(r"(::stop-commands::(\S+))", done.stdout).groups()  # type: ignore[union-attr]  # asserted by use
    inside = done.stdout.partition(stop)[2].partition(f"::{token}::")[0]
    assert "exit 2" in inside


def test_without_a_lock_nothing_is_done(job: Job) -> None:
    assert job.run(f'"{SCRIPT}"').returncode != 0
    assert not (job.folder / "supply-chain").exists()


def test_actions_are_pinned_and_inputs_are_no_commands() -> None:
    text = (ROOT / "action.yml").read_text()
    for line in re.findall(r"uses:\s*(\S.*)", text):
        assert re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v[0-9.]+", line)
    for line in re.findall(r"run:.*", text):
        assert "${{" not in line
    inputs = set(re.findall(r"\$\{\{ inputs\.([\w-]+) \}\}", text))
    declared = set(re.findall(r"^  ([\w-]+):\n    description:", text.partition("outputs:")[0], re.MULTILINE))
    assert inputs | {"sarif"} == declared


def test_the_workflow_of_this_repository_uses_the_action() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert "uses: ./" in text
