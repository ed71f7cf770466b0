"""Signing again: what is read, what is not, and who cannot make it believe that nothing changed."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from supplychain.artifact import Manifest, build_manifest, differences
from supplychain.trust import again
from supplychain.trust.again import sign_again
from supplychain.trust.keys import SigningKey
from supplychain.trust.signers import LocalSigner
from tests.artifact.support import flip, make_tree
from tests.trust.support import bundle_path, check, key

SHARD = "shards/shard-00000.bin"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that alice signed, at a time when its files had long been settled."""
    monkeypatch.setattr(again, "GRAIN", 50_000_000)
    folder = make_tree(tmp_path / "artifact")
    time.sleep(0.1)
    _, same = again_by(folder)
    assert same == 0
    return folder


def again_by(root: Path, signer: SigningKey | None = None, *, paranoid: bool = False) -> tuple[int, int]:
    """(bytes that were read, files that were not)."""
    sizes: list[int] = []
    manifest, same = sign_again(
        root, "dataset", LocalSigner(signer or key("alice")), paranoid=paranoid, progress=sizes.append
    )
    assert differences(root, manifest) == []
    assert Manifest.parse(manifest.data) == manifest
    check(root, signer or key("alice"))
    return sum(sizes), same


def test_nothing_changed_and_nothing_is_read(root: Path) -> None:
    before = (root / "secure-train/manifest.json").read_bytes()
    assert again_by(root) == (0, 5)
    assert (root / "secure-train/manifest.json").read_bytes() == before


def test_only_what_changed_is_read(root: Path) -> None:
    (root / "config.json").write_bytes(b'{"a":1}\n')
    assert again_by(root) == (8, 4)
    make_tree(root, {"new.txt": b"12345"})
    (root / "empty").unlink()
    read, same = again_by(root)
    assert (read, same) in [(5, 4), (13, 3)]  # config.json may still be too young to have been kept


def test_a_change_that_hides_its_time_is_seen(root: Path) -> None:
    """The same size, and the time of contents put back: the time of state cannot be."""
    path = root / SHARD
    status = path.stat()
    flip(path, 70_000)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_mtime_ns == status.st_mtime_ns
    assert again_by(root)[1] == 4


def test_another_file_in_its_place_is_seen(root: Path) -> None:
    data = (root / SHARD).read_bytes()
    (root / "x").write_bytes(data[::-1])
    os.replace(root / "x", root / SHARD)
    assert again_by(root)[1] == 4


def test_only_the_signers_own_manifest_vouches(root: Path) -> None:
    assert again_by(root, key("bob"))[1] == 0  # alice's signature is nothing to bob
    build_manifest(root, "dataset")
    assert again_by(root)[1] == 0  # unsigned


def test_a_forged_manifest_or_signature_vouches_for_nothing(root: Path) -> None:
    flip(bundle_path(root), 300)
    assert again_by(root)[1] == 0


def test_damaged_block_digests_are_made_anew(root: Path) -> None:
    flip(root / "secure-train/blocks" / SHARD, 5)
    assert again_by(root)[0] == (root / SHARD).stat().st_size


def test_a_young_file_is_not_remembered(tmp_path: Path) -> None:
    """A change within the clock's grain would not show."""
    folder = make_tree(tmp_path / "artifact")
    assert again_by(folder)[1] == 0
    assert again_by(folder)[1] == 0


def test_lost_or_damaged_stamps_mean_hashing(root: Path) -> None:
    (path,) = again._path("x").parent.iterdir()
    for data in (b"", b"{}", b"[]", b'{"schema":"urn:secure-train:stamps:v1","files":{"a":1}}'):
        path.write_bytes(data)
        assert again_by(root)[1] == 0


def test_paranoid_reads_all(root: Path) -> None:
    read, same = again_by(root, paranoid=True)
    assert same == 0
    assert read == sum(entry.size for entry in check(root).manifest.files)
