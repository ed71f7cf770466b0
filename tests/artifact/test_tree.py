"""What a folder may hold to be an artifact, and how its files are opened."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supplychain.artifact import SecureTrainError, build_manifest, tree
from tests.artifact.support import check_error, make_tree, refused


def test_a_walk_lists_files_by_path_with_size_and_mode(tmp_path: Path) -> None:
    make_tree(tmp_path, {"b": b"12", "a/z": b"", "a/b": b"1", "a.b": b"123", "é": b""})
    (tmp_path / "b").chmod(0o700)
    assert [(file.path, file.size, file.mode) for file in tree.walk(tmp_path)] == [
        ("a.b", 3, 0o644),
        ("a/b", 1, 0o644),
        ("a/z", 0, 0o644),
        ("b", 2, 0o755),
        ("é", 0, 0o644),
    ]


def _link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def _dangling(path: Path) -> None:
    path.symlink_to("nowhere")


def _linked_folder(path: Path) -> None:
    path.symlink_to("/etc")


def _loop(path: Path) -> None:
    path.symlink_to(path.name)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        here = Path.cwd()
        os.chdir(path.parent)  # the name of a socket may have 107 bytes only
        try:
            server.bind(path.name)
        finally:
            os.chdir(here)


def _setuid(path: Path) -> None:
    path.write_bytes(b"")
    path.chmod(0o4755)


def _setgid(path: Path) -> None:
    path.write_bytes(b"")
    path.chmod(0o2755)


def _sticky(path: Path) -> None:
    path.write_bytes(b"")
    path.chmod(0o1644)


def _empty_folder(path: Path) -> None:
    path.mkdir()


SPECIAL = [
    (_link, "link"),
    (_dangling, "link"),
    (_linked_folder, "link"),
    (_loop, "link"),
    (_fifo, "neither a file nor a folder"),
    (_socket, "neither a file nor a folder"),
    (_setuid, "set-uid"),
    (_setgid, "set-uid"),
    (_sticky, "sticky"),
    (_empty_folder, "empty"),
]


@pytest.mark.parametrize("where", ["", "sub/"])
@pytest.mark.parametrize(("make", "reason"), SPECIAL)
def test_special_files_are_refused(tmp_path: Path, make: object, reason: str, where: str) -> None:
    make_tree(tmp_path, {"sub/file": b"1"})
    assert callable(make)
    make(tmp_path / f"{where}strange")
    with refused("ST-U06", reason, f"{where}strange", "next:"):
        build_manifest(tmp_path, "dataset")
    assert not (tmp_path / "secure-train").exists()
    assert not (tmp_path / ".secure-train.partial").exists()


NAMES = [
    (b"back\\slash", "backslash"),
    (b"new\nline", "control"),
    (b"esc\x1b[2Jape", "control"),
    (b"del\x7f", "control"),
    ("right\u202eleft".encode(), "formatting"),
    ("zero\u200bwidth".encode(), "formatting"),
    ("line\u2028separator".encode(), "formatting"),
    (b"latin-\xe9", "UTF-8"),
    (b"overlong-\xc0\xaf", "UTF-8"),
    (b"surrogate-\xed\xa0\x80", "UTF-8"),
    (unicodedata.normalize("NFD", "é").encode(), "normal form"),
    ("\u212b".encode(), "normal form"),  # the Ångström sign is a letter in NFC
]


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.parametrize(("name", "reason"), NAMES)
def test_names_that_differ_between_systems_are_refused(
    tmp_path: Path, name: bytes, reason: str, folder: bool
) -> None:
    make_tree(tmp_path, {"good": b"1"})
    path = os.path.join(os.fsencode(tmp_path), name)
    if folder:
        os.mkdir(path)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY))
    with refused("ST-U06", reason):
        tree.walk(tmp_path)


@pytest.mark.parametrize(
    "names",
    [
        ("readme", "README"),
        ("straße", "STRASSE"),
        ("a/b", "A/c"),
        ("a/B/c", "a/b/d"),
        ("ǅ", "ǆ"),
        ("ﬁle", "file"),  # the ligature folds to two letters
        ("dir/x", "DIR"),
        ("Σ", "ς"),
    ],
)
def test_names_that_collide_elsewhere_are_refused(tmp_path: Path, names: tuple[str, str]) -> None:
    make_tree(tmp_path, dict.fromkeys(names, b""))
    with refused("ST-U06", "one name on another file system"):
        tree.walk(tmp_path)


@pytest.mark.parametrize(
    "paths", [["a", "a/b"], ["a/b", "a"], ["a/b/c", "a/b"], ["A", "a/b"], ["x/Y", "x/y/z"]]
)
def test_a_name_cannot_be_file_and_folder(paths: list[str]) -> None:
    assert tree.collision(paths) is not None


@pytest.mark.parametrize("paths", [[], ["a"], ["a/b", "a/c", "a/d/e", "b/a"], ["é", "e"], ["a.b", "a/b"]])
def test_honest_names_do_not_collide(paths: list[str]) -> None:
    assert tree.collision(paths) is None


@given(st.lists(st.sampled_from("aAbB"), min_size=1, max_size=3), st.data())
@settings(max_examples=100, deadline=None)
def test_collisions_equal_their_definition(first: list[str], data: st.DataObject) -> None:
    """Against a slow statement of the rule: every prefix of every path has one spelling and one type."""
    others = data.draw(
        st.lists(st.lists(st.sampled_from("aAbB"), min_size=1, max_size=3).map("/".join), max_size=4)
    )
    paths = list(dict.fromkeys(["/".join(first), *others]))
    spelled: dict[str, set[tuple[str, bool]]] = {}
    for path in paths:
        parts = path.split("/")
        for end in range(1, len(parts) + 1):
            prefix = "/".join(parts[:end])
            spelled.setdefault(prefix.casefold(), set()).add((prefix, end == len(parts)))
    assert (tree.collision(paths) is not None) == any(len(names) > 1 for names in spelled.values())


NO_PATHS = [
    "",
    "/",
    "/etc/passwd",
    "..",
    ".",
    "../x",
    "a/../b",
    "a/..",
    "a//b",
    "a/",
    "./a",
    "a/./b",
    "\ud800",
    "a\0b",
]
TOO_LONG = ["x" * 256, "é" * 128, "/".join(["d" * 200] * 11), "/".join("a" * (tree.MAX_DEPTH + 1))]


@pytest.mark.parametrize("path", [*NO_PATHS, *TOO_LONG])
def test_paths_that_no_manifest_may_name(path: str) -> None:
    assert tree.path_problem(path)


@pytest.mark.parametrize(
    "path", ["a", "a b/c-d_e.f", "...", "..a", "a..", "x" * 255, "é" * 127, "日本/語", ".git/x"]
)
def test_paths_that_a_manifest_may_name(path: str) -> None:
    assert tree.path_problem(path) is None


def test_a_very_deep_tree_is_refused_not_recursed_into(tmp_path: Path) -> None:
    """1200 levels: more than the interpreter's stack, the descriptors of a process and one path take."""
    descriptor = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=descriptor)
        child = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = child
    os.close(descriptor)
    try:
        with refused("ST-U06", "nested deeper than"):
            tree.walk(tmp_path)
    finally:
        subprocess.run(["rm", "-rf", str(tmp_path / "d")], check=True)


def test_every_problem_is_surveyed(tmp_path: Path) -> None:
    make_tree(tmp_path, {"good": b"1", "Good": b"1"})
    (tmp_path / "link").symlink_to("good")
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "fifo")
    files, problems = tree.survey(tmp_path)
    assert [file.path for file in files] == ["Good", "good"]
    assert len(problems) == 4
    for problem in problems:
        check_error(problem, "ST-U06")


def test_the_root_may_be_reached_through_a_link(tmp_path: Path) -> None:
    make_tree(tmp_path / "real", {"a": b"1"})
    (tmp_path / "link").symlink_to("real")
    assert [file.path for file in tree.walk(tmp_path / "link")] == ["a"]


def test_a_missing_root_or_a_file_as_root(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with refused("ST-U01", "does not exist", str(tmp_path / "missing")):
        tree.walk(tmp_path / "missing")
    with refused("ST-U01", "this is a file"):
        tree.walk(tmp_path / "file")
    with refused("ST-U01"):
        build_manifest(tmp_path / "file", "dataset")
    (tmp_path / "loop").symlink_to("loop")
    with refused("ST-A10", "symbolic links"):
        tree.walk(tmp_path / "loop")
    with refused("ST-A10", "too long"):
        tree.walk(tmp_path / ("x" * 300))


def test_no_link_is_followed_below_the_root(tmp_path: Path) -> None:
    make_tree(tmp_path, {"outside/secret": b"1", "root/a": b"1"})
    root = tmp_path / "root"
    (root / "file").symlink_to("../outside/secret")
    (root / "folder").symlink_to("../outside")
    with refused("ST-U06", "link"):
        tree.open_file(root, "file")
    with pytest.raises(FileNotFoundError):
        tree.open_file(root, "folder/secret")
    os.mkfifo(root / "fifo")
    with refused("ST-U06", "not a regular file"):
        tree.open_file(root, "fifo")  # and does not wait for a writer
    _socket(root / "socket")
    with refused("ST-U06", "not a regular file"):
        tree.open_file(root, "socket")
    with refused("ST-U06", "not a regular file"):
        tree.open_file(tmp_path, "outside")
    with pytest.raises(FileNotFoundError):
        tree.open_file(root, "a/b")


_SWAP = """
import os, sys
os.chdir(sys.argv[1])
while os.path.exists("go"):
    os.rename("root/swapped", "aside")
    os.rename("link", "root/swapped")
    os.rename("root/swapped", "link")
    os.rename("aside", "root/swapped")
"""


def test_a_folder_swapped_for_a_link_during_a_walk_is_not_entered(tmp_path: Path) -> None:
    """A race with another process that the walk wins each time: what lies behind the link is not listed."""
    make_tree(tmp_path, {"outside/leaked": b"1", "root/swapped/mine": b"1", "go": b""})
    (tmp_path / "link").symlink_to(tmp_path / "outside")
    with subprocess.Popen([sys.executable, "-c", _SWAP, str(tmp_path)]) as process:
        try:
            end = time.monotonic() + 1
            while time.monotonic() < end:
                files, problems = tree.survey(tmp_path / "root")
                assert [file.path for file in files] in ([], ["swapped/mine"])
                assert {problem.code for problem in problems} <= {"ST-U06", "ST-A10"}
        finally:
            (tmp_path / "go").unlink()
        assert process.wait(timeout=30) == 0


def test_an_error_of_the_storage_is_told_as_such() -> None:
    """Page 0 of a process's memory cannot be read (EIO), as on a failing disk."""
    with (
        refused("ST-A10", "Input/output error", "/proc/self/mem"),
        tree.reading(Path("/proc/self"), "mem") as file,
    ):
        os.pread(file, 1, 0)


def test_descriptors_are_closed_after_refusals(tmp_path: Path) -> None:
    make_tree(tmp_path, {"a/b/file": b"1"})
    (tmp_path / "a/b/link").symlink_to("file")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        tree.survey(tmp_path)
        for path in ("a/b/link", "a/b", "a/b/none", "none/none"):
            with pytest.raises((SecureTrainError, FileNotFoundError)):
                tree.open_file(tmp_path, path)
    assert len(os.listdir("/proc/self/fd")) == before


_AS_NOBODY = """
import os, sys
from pathlib import Path
from supplychain.artifact import SecureTrainError, build_manifest, tree
os.setgroups([]); os.setgid(65534); os.setuid(65534)
root = Path(sys.argv[1])
files, problems = tree.survey(root)
print([file.path for file in files], sorted((problem.code, problem.where) for problem in problems))
for attempt in (lambda: build_manifest(root, "dataset"), lambda: tree.walk(root / "closed"),
                lambda: tree.open_file(root, "unreadable"), lambda: build_manifest(root / "open", "dataset")):
    try:
        attempt()
    except SecureTrainError as error:
        print(error.code, error.where)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody without permissions")
def test_missing_permissions_are_named(tmp_path: Path) -> None:
    root = make_tree(tmp_path / "artifact", {"closed/file": b"1", "unreadable": b"1", "open/file": b"1"})
    for folder in (root, *root.parents):
        if str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    (root / "closed").chmod(0o700)
    (root / "unreadable").chmod(0o600)
    result = subprocess.run(
        [sys.executable, "-c", _AS_NOBODY, str(root)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [
        f"['open/file', 'unreadable'] [('ST-A10', '{root}/closed')]",
        f"ST-A10 {root}/closed",
        f"ST-A10 {root}/closed",
        f"ST-A10 {root}/unreadable",
        f"ST-U04 {root}/open/.secure-train.partial",
    ]
