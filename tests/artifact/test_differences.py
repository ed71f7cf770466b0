"""Comparing a folder with its manifest: every difference at once, each with its own code."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from supplychain.artifact import BLOCK_SIZE, Manifest, build_manifest, check, differences
from tests.artifact.support import BIG, check_error, codes, flip, make_artifact, make_tree

SHARD = "shards/shard-00000.bin"
TABLE = f"secure-train/blocks/{SHARD}"


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return make_artifact(tmp_path)


def test_an_untouched_folder_has_none(tmp_path: Path, manifest: Manifest) -> None:
    assert differences(tmp_path, manifest) == []
    assert differences(tmp_path, manifest, hash_files=False) == []


def test_all_differences_are_reported_at_once(tmp_path: Path, manifest: Manifest) -> None:
    flip(tmp_path / "config.json", 0)
    (tmp_path / "empty").unlink()
    (tmp_path / "shards/one-block.bin").chmod(0o755)
    os.truncate(tmp_path / "shards/deeper/notes é.txt", 5)
    flip(tmp_path / SHARD, 2 * BLOCK_SIZE)
    flip(tmp_path / TABLE, 0)
    make_tree(tmp_path, {"extra": b"", "secure-train/hook.py": b"", "shards/.hidden": b"", "bad\nname": b""})
    (tmp_path / "link").symlink_to("config.json")
    (tmp_path / "void").mkdir()
    os.mkfifo(tmp_path / "fifo")
    found = differences(tmp_path, manifest)
    for error in found:
        check_error(error, error.code, "next:")
    assert codes(found, tmp_path) == [
        ("ST-A05", "bad\\nname"),
        ("ST-A03", "config.json"),
        ("ST-A04", "empty"),
        ("ST-A05", "extra"),
        ("ST-A05", "fifo"),
        ("ST-A05", "link"),
        ("ST-A08", TABLE),
        ("ST-A05", "secure-train/hook.py"),
        ("ST-A05", "shards/.hidden"),
        ("ST-A06", "shards/deeper/notes é.txt"),
        ("ST-A07", "shards/one-block.bin"),
        ("ST-A03", SHARD),
        ("ST-A05", "void"),
    ]
    without_contents = codes(differences(tmp_path, manifest, hash_files=False), tmp_path)
    assert {code for code, _ in without_contents} == {"ST-A04", "ST-A05", "ST-A06", "ST-A07"}


Change = Callable[[Path], object]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda root: flip(root / SHARD, len(BIG) - 1), [("ST-A03", SHARD)]),
        (lambda root: os.truncate(root / SHARD, len(BIG) - 1), [("ST-A06", SHARD)]),
        (lambda root: os.truncate(root / SHARD, len(BIG) + 1), [("ST-A06", SHARD)]),
        (lambda root: (root / SHARD).unlink(), [("ST-A04", SHARD)]),
        (lambda root: (root / SHARD).chmod(0o644 | 0o100), [("ST-A07", SHARD)]),
        (lambda root: (root / SHARD).chmod(0o4644), [("ST-A05", SHARD)]),
        (lambda root: (root / SHARD).chmod(0o400), []),
        (lambda root: (root / TABLE).unlink(), [("ST-A05", "secure-train/blocks/shards"), ("ST-A04", TABLE)]),
        (lambda root: flip(root / TABLE, 40), [("ST-A08", TABLE)]),
        (lambda root: os.truncate(root / TABLE, 1 << 40), [("ST-A08", TABLE)]),
        (lambda root: make_tree(root, {f"{TABLE}.py": b""}), [("ST-A05", f"{TABLE}.py")]),
        (
            lambda root: make_tree(root, {"secure-train/blocks/empty": b""}),
            [("ST-A05", "secure-train/blocks/empty")],
        ),
        (lambda root: make_tree(root, {"secure-train/x": b""}), [("ST-A05", "secure-train/x")]),
        (lambda root: (root / "empty").write_bytes(b"x"), [("ST-A06", "empty")]),
        (
            lambda root: (root / "empty").rename(root / "EMPTY"),
            [("ST-A05", "EMPTY"), ("ST-A04", "empty")],
        ),
        (
            lambda root: ((root / "empty").unlink(), (root / "empty").symlink_to("config.json")),
            [("ST-A04", "empty"), ("ST-A05", "empty")],
        ),
        (
            lambda root: ((root / "empty").unlink(), make_tree(root / "empty", {"x": b""})),
            [("ST-A04", "empty"), ("ST-A05", "empty/x")],
        ),
    ],
)
def test_one_change(
    tmp_path: Path, manifest: Manifest, change: Change, expected: list[tuple[str, str]]
) -> None:
    change(tmp_path)
    found = differences(tmp_path, manifest)
    assert codes(found, tmp_path) == expected
    for error in found:
        check_error(error, error.code)


def test_missing_block_digests_are_noticed_without_hashing(tmp_path: Path, manifest: Manifest) -> None:
    (tmp_path / TABLE).unlink()
    found = codes(differences(tmp_path, manifest, hash_files=False), tmp_path)
    assert ("ST-A04", TABLE) in found


def test_a_moved_folder_names_every_file(tmp_path: Path, manifest: Manifest) -> None:
    (tmp_path / "shards").rename(tmp_path / "moved")
    found = codes(differences(tmp_path, manifest), tmp_path)
    assert [code for code, _ in found] == ["ST-A05"] * 3 + ["ST-A04"] * 3


def test_bundles_alone_may_lie_among_the_signatures(tmp_path: Path, manifest: Manifest) -> None:
    make_tree(
        tmp_path / "secure-train/signatures",
        {"me.sigstore.json": b"", "me.sigstore.json.py": b"", "deeper/me.sigstore.json": b"", "run.sh": b""},
    )
    assert codes(differences(tmp_path, manifest), tmp_path) == [
        ("ST-A05", "secure-train/signatures/deeper/me.sigstore.json"),
        ("ST-A05", "secure-train/signatures/me.sigstore.json.py"),
        ("ST-A05", "secure-train/signatures/run.sh"),
    ]


@pytest.fixture
def small_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files above 64 KiB count as big, so that the tests need no gigabytes."""
    monkeypatch.setattr(check, "BIG_FILE", 0)


@pytest.mark.usefixtures("small_stripes")
@pytest.mark.parametrize("blocks", [2, 3, 7, 16, 17, 65])
def test_a_big_file_is_hashed_in_stripes_without_gaps(tmp_path: Path, blocks: int) -> None:
    data = os.urandom(blocks * BLOCK_SIZE - 5)
    counts: list[int] = []
    manifest = make_artifact(tmp_path, {"big": data, "small": b"1"})
    assert differences(tmp_path, manifest, progress=counts.append) == []
    assert sum(counts) == manifest.total_bytes
    for block in range(blocks):
        offset = min(block * BLOCK_SIZE + 77, len(data) - 1)
        flip(tmp_path / "big", offset)
        (error,) = differences(tmp_path, manifest)
        check_error(error, "ST-A03", f"big, block {block} ")
        flip(tmp_path / "big", offset)


@pytest.mark.usefixtures("small_stripes")
def test_differences_of_big_files_are_all_reported(tmp_path: Path) -> None:
    manifest = make_artifact(tmp_path, {f"{index}.bin": BIG for index in range(5)})
    for index in (1, 3):
        flip(tmp_path / f"{index}.bin", 3)
    (tmp_path / "4.bin").unlink()
    assert codes(differences(tmp_path, manifest), tmp_path) == [
        ("ST-A03", "1.bin"),
        ("ST-A03", "3.bin"),
        ("ST-A04", "4.bin"),
    ]


def test_a_file_without_blocks_is_hashed_whole(tmp_path: Path) -> None:
    manifest = build_manifest(make_tree(tmp_path), "environment", blocks=False)
    flip(tmp_path / SHARD, len(BIG) - 1)
    assert codes(differences(tmp_path, manifest), tmp_path) == [("ST-A03", SHARD)]


def test_paranoid_compares_both_digests_that_a_signer_stated(tmp_path: Path) -> None:
    """A signer whose sha256 and blocks are of different bytes: one reader would see one file, one another."""
    manifest = make_artifact(tmp_path)
    lying = [
        dataclasses.replace(entry, sha256="0" * 64) if entry.path == "shards/shard-00000.bin" else entry
        for entry in manifest.files
    ]
    forged = Manifest(manifest.kind, tuple(lying))
    assert differences(tmp_path, manifest, paranoid=True) == []
    assert differences(tmp_path, forged) == []
    (error,) = differences(tmp_path, forged, paranoid=True)
    check_error(error, "ST-A03", "0" * 64)
