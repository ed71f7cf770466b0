"""What bootstrap.py says when the machine is not as it needs it: one sentence, the step that mends it, the
exit code.
"""

from __future__ import annotations

import errno
import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "bootstrap.py"


@pytest.fixture
def bootstrap() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap_under_test", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def said(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert "  next: " in captured.err
    return captured.err


def test_an_old_python_is_told_so(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 9, 2, "final", 0))
    assert bootstrap.main(["build"]) == 2
    assert "needs Python 3.11 or newer, and this is Python 3.9" in said(capsys)


@pytest.mark.parametrize("version", ["3.8", "3.9", "3.10"])
def test_a_real_old_python_reaches_that_sentence(version: str) -> None:
    found = [*Path(sys.base_prefix).parent.glob(f"{version}.*/bin/python{version}")]  # where several are kept
    python = str(found[0]) if found else shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "--version"], capture_output=True).returncode:
        pytest.skip(f"there is no Python {version} here")
    done = subprocess.run([python, str(SCRIPT), "quickstart"], capture_output=True, text=True)
    assert done.returncode == 2
    assert f"this is Python {version}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("module", ["venv", "ensurepip"])
def test_a_python_without_venv_is_told_what_to_install(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], module: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find(name))
    assert bootstrap.main(["build"]) == 2
    assert f"has no {module} module" in said(capsys)


def test_a_folder_that_cannot_be_written(
    bootstrap: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert bootstrap.main(["build", "--home", str(tmp_path / "file" / "home")]) == 2
    assert "cannot be written" in said(capsys)


@pytest.mark.skipif(os.getuid() == 0, reason="root writes everywhere")
def test_a_read_only_folder(
    bootstrap: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp_path.chmod(0o555)
    assert bootstrap.main(["build", "--home", str(tmp_path / "home")]) == 2
    assert "cannot be written" in said(capsys)


def test_too_little_space(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    assert bootstrap.main(["build", "--home", str(tmp_path)]) == 2
    assert "GB are needed" in said(capsys)


def test_a_disk_that_fills_up_on_the_way(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "x"))

    monkeypatch.setattr(bootstrap, "build", full)
    assert bootstrap.main(["build", "--home", str(tmp_path)]) == 2
    assert "No space left on device" in said(capsys)


@pytest.mark.parametrize("kind", ["missing", "empty", "file"])
def test_a_bad_wheelhouse(
    bootstrap: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    house = tmp_path / "house"
    if kind == "empty":
        house.mkdir()
    if kind == "file":
        house.write_text("")
    assert bootstrap.main(["build", "--home", str(tmp_path / "home"), "--wheelhouse", str(house)]) == 2
    assert "is no folder with wheels" in said(capsys)


def test_a_wheelhouse_that_lacks_packages(tmp_path: Path) -> None:
    """The real thing: a real interpreter, a real venv, pip's own words turned into ours."""
    house = tmp_path / "house"
    house.mkdir()
    with zipfile.ZipFile(house / "other-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("other.py", "")
    command = [
        sys.executable,
        str(SCRIPT),
        "build",
        "--home",
        str(tmp_path / "home"),
        "--wheelhouse",
        str(house),
    ]
    environment = {**os.environ, "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 5, done.stderr
    assert "cannot be had" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_without_an_index_it_says_so(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "build", "--home", str(tmp_path / "home")]
    environment = {
        **os.environ,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": "",
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_RETRIES": "1",
    }
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 5, done.stderr
    assert "no package index could be reached" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("output", "code", "words"),
    [
        (
            "ERROR: Could not install: [Errno 28] No space left on device",
            2,
            "disk is full",
        ),
        (
            "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE FILE.\n    click==8.5.1 from x",
            3,
            "click==8.5.1",
        ),
        ("ERROR: No matching distribution found for click==8.5.1", 5, "click==8.5.1 cannot be had"),
        (
            "WARNING: Retrying ... NewConnectionError\nERROR: No matching distribution found for x",
            5,
            "no package index",
        ),
        ("ERROR: something new", 5, "something new"),
    ],
)
def test_the_words_of_pip_become_one_sentence(
    bootstrap: ModuleType, output: str, code: int, words: str
) -> None:
    with pytest.raises(bootstrap.Failure) as caught:
        bootstrap.explain_pip(output, "the gate's environment")
    assert caught.value.code == code
    assert words in caught.value.what


def test_the_profile_and_its_reason(
    bootstrap: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = bootstrap.Home(tmp_path)
    options = SimpleNamespace(profile="auto", wheelhouse=None)
    monkeypatch.setattr(bootstrap, "nvidia_driver", lambda: "an NVIDIA driver is loaded")
    assert bootstrap.choose_profile(home, options) == ("default", "an NVIDIA driver is loaded")
    monkeypatch.setattr(bootstrap, "nvidia_driver", lambda: None)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(bootstrap, "obtain_cpu_torch", lambda *_: True)
    assert bootstrap.choose_profile(home, options)[0] == "cpu"
    monkeypatch.setattr(bootstrap, "obtain_cpu_torch", lambda *_: False)
    assert bootstrap.choose_profile(home, options)[0] == "cpu"  # remembered
    assert bootstrap.choose_profile(home, SimpleNamespace(profile="default", wheelhouse=None))[0] == "default"
    home.forget("profile")
    profile, why = bootstrap.choose_profile(home, options)
    assert (profile, "on no configured index" in why) == ("default", True)


def test_an_unknown_benchmark_names_those_that_exist(
    bootstrap: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bootstrap.main(["bench", "nonsense", "--home", str(tmp_path)]) == 2
    assert "there is no benchmark nonsense" in said(capsys)


def test_unknown_arguments_are_refused(
    bootstrap: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bootstrap.main(["build", "--home", str(tmp_path), "--hopme"]) == 2
    assert "--hopme" in said(capsys)


def test_the_pointer_to_the_environment_is_replaced_in_one_step(
    bootstrap: ModuleType, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        bootstrap.point(tmp_path / "training", tmp_path / name)
        assert (tmp_path / "training").resolve() == tmp_path / name
        assert os.readlink(tmp_path / "training") == name  # the state folder can be moved as a whole


@pytest.mark.e2e
@pytest.mark.slow
def test_our_wheel_is_reproducible_and_complete(built: Path, tmp_path: Path, bootstrap: ModuleType) -> None:
    digests = set()
    for name in ("first", "second"):
        home = bootstrap.Home(tmp_path / name)
        (home.path / "tools").symlink_to(built / "tools")
        home_tools = bootstrap.digest(
            bootstrap.python_identity(),
            str(home.tools).encode(),
            (ROOT / "requirements/bootstrap.lock").read_bytes(),
        )
        home.set_stamp("tools", {"built_from": home_tools})
        stamp = bootstrap.project_wheel(home, SimpleNamespace(editable=False, wheelhouse=None))
        digests.add(stamp["sha256"])
        with zipfile.ZipFile(stamp["path"]) as archive:
            names = archive.namelist()
            bad = [info.filename for info in archive.infolist() if info.external_attr >> 16 & 0o777 != 0o644]
    assert len(digests) == 1
    tops = {name.split("/")[0] for name in names}
    assert {"supplychain", "trainer"} <= tops
    assert "tests" not in tops
    assert not [name for name in names if name.endswith(".pyc")]
    assert bad in ([], [name for name in names if name.endswith("RECORD")])


@pytest.mark.e2e
@pytest.mark.slow
def test_a_second_build_reuses_everything_in_a_second(built: Path) -> None:
    command = [sys.executable, str(SCRIPT), "build", "--home", str(built)]
    before = os.times()
    done = subprocess.run(command, capture_output=True, text=True)
    after = os.times()
    assert done.returncode == 0, done.stderr
    assert "building" not in done.stderr
    assert after.children_user + after.children_system - before.children_user - before.children_system < 1.0
