"""Building a manifest: what it replaces, what a kill leaves, and what it does when the storage fails."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from supplychain.artifact import (
    Manifest,
    VerifiedArtifact,
    build_manifest,
    differences,
    read_manifest,
    write_durably,
)
from tests.artifact.support import FILES, make_artifact, make_tree, refused

ROOT = Path(__file__).parents[2]

_BUILD = """
import sys
from pathlib import Path
from supplychain.artifact import build_manifest
def progress(count):
    print(count, flush=True)
build_manifest(Path(sys.argv[1]), "dataset", progress=progress)
"""


def _start_build(root: Path) -> subprocess.Popen[bytes]:
    """A real process, returned in the middle of its hashing."""
    process = subprocess.Popen([sys.executable, "-c", _BUILD, str(root)], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


def _make_slow_tree(root: Path) -> Path:
    make_tree(root)
    with open(root / "big.bin", "wb") as file:
        file.truncate(1 << 30)  # sparse: takes seconds to hash and no room
    return root


@pytest.mark.parametrize("signed_before", [False, True])
def test_a_kill_leaves_a_tree_that_can_be_built_again(tmp_path: Path, signed_before: bool) -> None:
    root = _make_slow_tree(tmp_path)
    if signed_before:
        os.truncate(root / "big.bin", 1 << 20)
        before = build_manifest(root, "dataset")
    process = _start_build(root)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    os.truncate(root / "big.bin", 1 << 20)
    assert (root / ".secure-train.partial").is_dir()
    if signed_before:
        assert read_manifest(root) == before.data  # the old one stands until the new one is complete
        assert {error.code for error in differences(root, before)} <= {"ST-A05"}
    else:
        with refused("ST-A09"):
            read_manifest(root)
    manifest = build_manifest(root, "dataset")
    assert differences(root, manifest) == []
    assert sorted(os.listdir(root)) == ["big.bin", "config.json", "empty", "secure-train", "shards"]


def test_ctrl_c_ends_a_build_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    root = _make_slow_tree(tmp_path)
    os.truncate(root / "big.bin", 1 << 36)  # a minute
    process = _start_build(root)
    started = time.monotonic()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert time.monotonic() - started < 20
    assert not (root / ".secure-train.partial").exists()
    assert not (root / "secure-train").exists()


@pytest.mark.parametrize("name", [".secure-train.partial", ".secure-train.old", "secure-train"])
@pytest.mark.parametrize("kind", ["file", "link", "folder", "empty folder"])
def test_whatever_stands_at_our_own_names_is_replaced(tmp_path: Path, name: str, kind: str) -> None:
    outside = make_tree(tmp_path / "outside", {"precious": b"1"})
    root = make_tree(tmp_path / "root")
    target = root / name
    if kind == "file":
        target.write_bytes(b"1")
    elif kind == "link":
        target.symlink_to(outside)
    elif kind == "folder":
        make_tree(target, {"a/b": b"1"})
    else:
        target.mkdir()
    manifest = build_manifest(root, "dataset")
    assert [file.path for file in manifest.files] == sorted(FILES, key=str.encode)
    assert differences(root, manifest) == []
    assert (outside / "precious").read_bytes() == b"1"


def test_a_reserved_name_in_another_case_is_refused(tmp_path: Path) -> None:
    make_tree(tmp_path, {"Secure-Train/x": b"1"})
    with refused("ST-U06", "reserved", "Secure-Train/x"):
        build_manifest(tmp_path, "dataset")


def test_a_new_manifest_removes_the_old_signatures(tmp_path: Path) -> None:
    make_artifact(tmp_path)
    make_tree(tmp_path, {"secure-train/signatures/me.sigstore.json": b"{}", "secure-train/stale": b""})
    build_manifest(tmp_path, "dataset")
    assert sorted(os.listdir(tmp_path / "secure-train")) == ["blocks", "manifest.json"]


def test_an_empty_folder_holds_nothing_to_sign(tmp_path: Path) -> None:
    with refused("ST-U06", "nothing to sign"):
        build_manifest(tmp_path, "dataset")


def test_the_longest_names_can_be_signed(tmp_path: Path) -> None:
    """255 bytes leave no room for the suffix of a temporary name."""
    name = "x" * 255
    manifest = make_artifact(tmp_path, {f"{name}/{name}": FILES["shards/shard-00000.bin"]})
    assert differences(tmp_path, manifest) == []


def test_without_blocks(tmp_path: Path) -> None:
    manifest = build_manifest(make_tree(tmp_path), "environment", blocks=False)
    assert all(file.blocks is None for file in manifest.files)
    assert os.listdir(tmp_path / "secure-train") == ["manifest.json"]
    assert differences(tmp_path, manifest) == []
    artifact = VerifiedArtifact.open(tmp_path, manifest.digest)
    assert artifact.read_bytes("config.json") == FILES["config.json"]
    with refused("ST-A02", "without block digests"):
        artifact.open_file("config.json")


def test_progress_counts_each_byte_once(tmp_path: Path) -> None:
    counts: list[int] = []
    manifest = build_manifest(make_tree(tmp_path), "dataset", progress=counts.append)
    assert sum(counts) == manifest.total_bytes
    counts.clear()
    differences(tmp_path, manifest, progress=counts.append)
    assert sum(counts) == manifest.total_bytes


def test_an_error_in_the_progress_callback_ends_the_build(tmp_path: Path) -> None:
    def fail(count: int) -> None:
        raise RuntimeError(count)

    with pytest.raises(RuntimeError):
        build_manifest(make_tree(tmp_path), "dataset", progress=fail)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "empty", "shards"]


def test_a_full_disk_is_told(tmp_path: Path) -> None:
    """The limit on the size of files stands in for a full disk: the kernel refuses the write."""
    make_tree(tmp_path, {f"{index}": b"1" for index in range(100)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        with refused("ST-U04", "File too large"):
            build_manifest(tmp_path, "dataset")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert len(os.listdir(tmp_path)) == 100


def test_too_few_descriptors_are_told(tmp_path: Path) -> None:
    make_tree(tmp_path, {"/".join("abcdefghij" * 4): b"1"})
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 15, limits[1]))
    try:
        with refused("ST-A10", "Too many open files"):
            build_manifest(tmp_path, "dataset")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_tree_that_changes_meanwhile_ends_in_a_refusal_or_in_a_true_manifest(tmp_path: Path) -> None:
    """Files come, go, and turn into links and folders while ten builds run."""
    root = make_tree(tmp_path / "root")
    victim = root / "shards/victim"
    stop = threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            victim.write_bytes(b"x" * 1000)
            victim.unlink()
            victim.symlink_to("/etc/passwd")
            victim.unlink()
            make_tree(victim, {"inner": b"1"})
            (victim / "inner").unlink()
            victim.rmdir()

    thread = threading.Thread(target=disturb)
    thread.start()
    secret = Path("/etc/passwd").stat().st_size
    try:
        for _ in range(10):
            try:
                manifest = build_manifest(root, "dataset")
            except Exception as error:
                assert getattr(error, "code", None) in ("ST-U06", "ST-A04", "ST-A10"), repr(error)  # noqa: PT017
            else:
                assert all(file.size != secret for file in manifest.files)
                Manifest.parse(read_manifest(root))
    finally:
        stop.set()
        thread.join()


def test_two_builds_at_once_leave_a_whole_manifest_or_say_so(tmp_path: Path) -> None:
    root = _make_slow_tree(tmp_path)
    os.truncate(root / "big.bin", 64 << 20)
    first, second = _start_build(root), _start_build(root)
    for process in (first, second):
        process.communicate(timeout=60)
    manifest = build_manifest(root, "dataset")
    assert differences(root, manifest) == []


def test_a_durable_write_is_never_made_through_a_link(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"1")
    (tmp_path / ".file.partial").symlink_to(precious)
    (tmp_path / "file").symlink_to(precious)
    write_durably(tmp_path / "file", b"2")
    assert precious.read_bytes() == b"1"
    assert (tmp_path / "file").read_bytes() == b"2"
    assert not (tmp_path / "file").is_symlink()
    assert not (tmp_path / ".file.partial").exists()
