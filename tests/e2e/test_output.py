"""How the commands speak: without a terminal, without UTF-8, as JSON, and to somebody who mistypes."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.e2e.site import Site

pytestmark = pytest.mark.e2e


def test_json_is_one_document_on_stdout_and_progress_on_stderr(site: Site, finished: Path) -> None:
    done = site.run("verify", finished, "--json")
    assert json.loads(done.stdout)["schema"] == "urn:secure-train:answer:v1"


def test_errors_are_json_too(site: Site) -> None:
    code, answer = site.json("verify", "nowhere")
    assert code == 2
    assert answer["results"][0]["errors"][0]["code"] == "ST-U01"


def test_ascii_only_where_the_locale_is_c(site: Site, finished: Path) -> None:
    done = site.run("verify", finished, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert "|- " in done.stdout


def test_no_colour_in_pipes(site: Site, finished: Path) -> None:
    done = site.run("verify", finished)
    assert "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["verify", "nowhere"], "ST-U01"),
        (["sign", "nowhere", "--kind", "dataset"], "ST-U01"),
        (["inspect", "nowhere"], "ST-U01"),
        (["run", "--data", "nowhere", "--out", "r1"], "ST-U01"),
        (["run", "--resume", "nowhere"], "ST-U01"),
        (["policy", "show", "nowhere.toml"], "ST-U01"),
        (["env", "verify", "--env", "nowhere"], "ST-E05"),
        (["env", "verify", "--lock", "nowhere.lock"], "ST-U01"),
        (["keys", "new", "../x"], "ST-U03"),
        (["keys", "new", "owner"], "ST-U05"),
        (["keys", "trust", "nowhere.pub"], "ST-S06"),
        (["policy", "new", "policy.toml"], "ST-U05"),
        (["policy", "new", "p2.toml", "--key", "nobody"], "ST-S06"),
        (["data", "prepare", "nowhere.txt", "--out", "d2", "--tokenizer", "tokenizer/tokenizer.json"], "ST-"),
        (["sign", "corpus.txt", "--kind", "dataset"], "ST-U01"),
        (["sign", "data", "--kind", "BAD KIND"], "ST-U03"),
        (["explain", "ST-Z99"], "ST-U03"),
    ],
)
def test_one_clear_error_with_its_code(site: Site, arguments: list[str], code: str) -> None:
    done = site.run(*arguments)
    assert done.returncode in (2, 5), done.stderr
    assert f"error[{code}" in done.stderr
    assert done.stderr.count("error[") == 1
    assert "Traceback" not in done.stderr


def test_a_mistyped_verb_and_a_missing_option_are_usage_errors(site: Site) -> None:
    done = site.run("verfy")
    assert done.returncode == 2
    assert "Did you mean 'verify'?" in done.stderr
    assert site.run("run").returncode == 2


def test_a_mistyped_setting_is_refused_with_the_nearest_name(site: Site, tmp_path: Path) -> None:
    done = site.run(*site.train(tmp_path / "run", "--set", "train.stesp=3"))
    assert done.returncode == 2
    assert "ST-U07" in done.stderr
    assert "train.steps" in done.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(site: Site, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    done = site.run(*site.train(tmp_path / "closed" / "run"))
    assert done.returncode == 2
    assert "ST-U04" in done.stderr


def test_a_run_folder_below_a_file_cannot_be_written(site: Site) -> None:
    done = site.run(*site.train(site.folder / "corpus.txt" / "run"))
    assert done.returncode == 2
    assert "error[ST-U04]" in done.stderr


def test_a_run_is_never_overwritten(site: Site, finished: Path) -> None:
    done = site.run(*site.train(finished))
    assert done.returncode == 2
    assert "error[ST-U05]" in done.stderr


def test_the_gate_never_imports_torch(site: Site, finished: Path) -> None:
    """Not even to verify a run: torch is not in its environment, and nothing of the training environment is
    imported.
    """
    program = (
        "import sys; from supplychain.cli import invoke; code = invoke(sys.argv[1:]); "
        "print(sorted({name.split('.')[0] for name in sys.modules})); sys.exit(code)"
    )
    for arguments in (["--help"], ["verify", str(finished)]):
        done = subprocess.run(
            [str(site.gate / "bin" / "python"), "-I", "-c", program, *arguments],
            env=site.variables,
            capture_output=True,
            text=True,
            check=True,
        )
        modules = done.stdout.splitlines()[-1]
        for heavy in ("torch", "numpy", "sigstore", "trainer"):
            assert f"'{heavy}'" not in modules


def test_doctor_finds_everything_in_place(site: Site) -> None:
    text = site.ok("doctor")
    assert "everything is in place" in text


def test_every_code_can_be_explained(site: Site) -> None:
    _, answer = site.json("explain")
    assert "ST-A03" in answer["codes"]
    assert "exit code 3" in site.ok("explain", "st-a03")
