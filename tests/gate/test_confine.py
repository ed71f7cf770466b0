"""What a launched program can still reach, tried from inside with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from supplychain import confine

pytestmark = pytest.mark.skipif(confine.landlock_abi() == 0, reason="this kernel has no Landlock")
SYSTEM = ["/usr", "/lib", "/lib64", "/bin", "/etc", "/proc", "/dev", sys.base_prefix]


def confined(
    code: str, read: list[Path], write: list[Path], level: str = "required"
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(code, read, write, level), capture_output=True, text=True, check=False, timeout=60
    )


def command(code: str, read: list[Path], write: list[Path], level: str) -> list[str]:
    paths = [item for path in [*SYSTEM, *read] for item in ("--read", str(path))] + [
        item for path in write for item in ("--write", str(path))
    ]
    program = [
        sys.executable,
        "-I",
        "-S",
        confine.__file__,
        *paths,
        "--level",
        level,
        "--launcher",
        str(os.getpid()),
    ]
    return [*program, "--", os.path.realpath(sys.executable), "-I", "-S", "-c", code]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("keys", "data", "out", "statements"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    return tmp_path


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("open('{0}/data/file').read()", True),
        ("open('{0}/out/new', 'w').write('x')", True),
        ("import os; os.rename('{0}/out/file', '{0}/out/other')", True),
        ("open('{0}/keys/file').read()", False),
        ("open('{0}/statements/file').read()", False),
        ("open('{0}/data/file', 'w')", False),
        ("open('{0}/data/new', 'w')", False),
        ("import os; os.truncate('{0}/data/file', 0)", False),
        ("import os; os.unlink('{0}/data/file')", False),
        ("import os; os.rename('{0}/out/file', '{0}/data/file')", False),
        ("import os; os.link('{0}/keys/file', '{0}/out/key')", False),
        ("import os; os.symlink('{0}/keys/file', '{0}/out/key'); open('{0}/out/key').read()", False),
        ("import subprocess; subprocess.run(['/bin/cat', '{0}/keys/file'], check=True)", False),
    ],
)
def test_only_given_paths_can_be_reached(place: Path, code: str, allowed: bool) -> None:
    done = confined(code.format(place), [place / "data"], [place / "out"])
    assert (done.returncode == 0) == allowed, done.stderr
    if not allowed:
        assert "Permission denied" in done.stderr or "cross-device" in done.stderr
    assert (place / "keys" / "file").read_text() == "keys"
    assert (place / "data" / "file").read_text() == "data"


def test_off_leaves_the_fence_out(place: Path) -> None:
    assert confined(f"open('{place}/keys/file').read()", [], [], "off").returncode == 0


def test_the_memory_of_the_launcher_is_out_of_reach(place: Path) -> None:
    done = confined(f"open('/proc/{os.getpid()}/mem', 'rb')", [], [])
    assert "Permission denied" in done.stderr


def test_a_program_ends_with_its_launcher(place: Path) -> None:
    """The launcher is killed, so it can tell nobody; the kernel tells the program."""
    inner = f"import os, time; open('{place}/out/pid', 'w').write(str(os.getpid())); time.sleep(60)"
    words = command(inner, [], [place / "out"], "required")
    words[words.index("--launcher") + 1] = "PARENT"
    code = f"import os, subprocess as s; s.run([w if w != 'PARENT' else str(os.getpid()) for w in {words!r}])"
    with subprocess.Popen([sys.executable, "-c", code]) as launcher:
        pid_file = place / "out" / "pid"
        deadline = time.monotonic() + 30
        while not pid_file.exists() or not pid_file.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        launcher.send_signal(signal.SIGKILL)
    pid = int(pid_file.read_text())
    while _alive(pid):
        assert time.monotonic() < deadline, "the program outlived its launcher"
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
