"""What ranks leave is foreign: the launcher, which can reach the key, must not be led to it, held up or
spoken for.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from supplychain import confine, launch, ranks
from supplychain.errors import SecureTrainError


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """The logs of a segment, as torchrun lays them."""
    (tmp_path / "none_x" / "attempt_0" / "0").mkdir(parents=True)
    return tmp_path


def stderr(logs: Path) -> Path:
    return logs / "none_x" / "attempt_0" / "0" / "stderr.log"


def shown(logs: Path) -> list[str]:
    lines: list[str] = []
    tail = ranks._Tail(logs, lines.append)
    tail.show()
    tail.close()
    return lines


def test_lines_are_shown_whole_and_once(logs: Path) -> None:
    lines: list[str] = []
    tail = ranks._Tail(logs, lines.append)
    tail.show()
    stderr(logs).write_text("one\ntw")
    tail.show()
    with open(stderr(logs), "a") as file:
        file.write("o\nthree\n")
    tail.show()
    tail.close()
    assert lines == ["one", "two", "three"]


def test_a_link_in_place_of_a_log_is_not_followed(logs: Path) -> None:
    """The ranks cannot read the key; the launcher must not read it to them."""
    secret = logs / "secret"
    secret.write_text("the key\n")
    stderr(logs).symlink_to(secret)
    assert shown(logs) == []
    assert "the key" not in ranks.last_words(logs)


def test_a_pipe_in_place_of_a_log_does_not_hang(logs: Path) -> None:
    os.mkfifo(stderr(logs))
    assert shown(logs) == []
    assert ranks.last_words(logs) == ""


def test_output_does_not_steer_the_terminal(logs: Path) -> None:
    stderr(logs).write_bytes(b"\x1b]0;title\x07loss 1\x1b[2J\n")
    assert shown(logs) == ["\\x1b]0;title\\x07loss 1\\x1b[2J"]


def test_a_line_without_end_is_shown_in_pieces(logs: Path) -> None:
    stderr(logs).write_bytes(b"x" * (3 * ranks.SHOWN_AT_ONCE))
    assert [len(line) for line in shown(logs)] == [ranks.SHOWN_AT_ONCE] * 3


@pytest.mark.parametrize("kind", ["link", "pipe", "large", "list", "words"])
def test_a_report_that_is_no_report_is_refused(tmp_path: Path, kind: str) -> None:
    report = tmp_path / "rank-0.json"
    if kind == "link":
        (tmp_path / "other").write_text("{}")
        report.symlink_to(tmp_path / "other")
    elif kind == "pipe":
        os.mkfifo(report)
    elif kind == "large":
        with open(report, "wb") as file:
            file.truncate(1 << 40)
    else:
        report.write_text("[]" if kind == "list" else "no JSON")
    with pytest.raises(SecureTrainError) as caught:
        launch._read_report(tmp_path, "rank-0.json")
    assert caught.value.code in ("ST-R07", "ST-U06")


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux")
def test_a_daemon_that_forks_away_is_adopted(tmp_path: Path) -> None:
    """It leaves its session, loses its parent, empties its environment; it is still found."""
    daemon = (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        f"        open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)\n"
        "    os._exit(0)\n"
    )
    program = (
        "import os, subprocess, sys, time, pathlib\n"
        "from supplychain import confine, ranks\n"
        "confine.adopt_orphans()\n"
        f"subprocess.run([sys.executable, '-c', {daemon!r}], env={{}}, stdout=subprocess.DEVNULL, "
        f"stderr=subprocess.DEVNULL)\npid = pathlib.Path({str(tmp_path / 'pid')!r})\nwhile not "
        "(pid.exists() and pid.read_text()): time.sleep(0.05)\nprint(int(pid.read_text()) in "
        "ranks.descendants(os.getpid()))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(confine.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "True"
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, 9)
    deadline = time.monotonic() + 10
    while (
        Path(f"/proc/{pid}").exists()
        and "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2][:3]
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
