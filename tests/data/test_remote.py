"""Datasets in object stores: verified, cached, prefetched, and never deleted where they are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.data.support import dataset, first_tokens, pack_dataset, refusal, sign, take, write_dataset
from trainer.data import Dataset, Loader, Window
from trainer.data import remote as module
from trainer.data.cache import Cache
from trainer.data.remote import RemoteArtifact

obstore = pytest.importorskip("obstore")

TOKENS = 200_000  # at four bytes: four shards of four blocks
NEAR = Window(32, 4)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 2 * 65536)


class Place:
    """A signed dataset in a local store, and what was asked of it."""

    def __init__(self, folder: Path) -> None:
        self.root = pack_dataset(
            write_dataset(folder / "far", TOKENS, shard_tokens=50_000, document=1000), 500
        )
        self.digest = sign(self.root)
        self.store = obstore.store.LocalStore(self.root)
        self.cache_folder = folder / "cache"

    def open(self, limit: int = 1 << 30, digest: str | None = None) -> Dataset:
        cache = Cache(self.cache_folder, limit)
        return Dataset(RemoteArtifact.open(self.store, digest or self.digest, cache))

    def loader(self, data: Dataset, **options: Any) -> Loader:
        given: dict[str, Any] = {"seq_len": 500, "global_batch": 8, "seed": 3, "window": NEAR} | options
        return Loader([data], **given)

    def chunks(self) -> list[Path]:
        return sorted(path for path in self.cache_folder.glob("??/*") if len(path.name) == 64)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.mark.parametrize("packing", ["concat", "rows"])
def test_the_same_samples_as_from_a_local_disk(place: Place, packing: str) -> None:
    with Dataset.open(place.root, place.digest) as local:
        expected = first_tokens(take(place.loader(local, packing=packing), 60))
    far = place.open()
    assert first_tokens(take(place.loader(far, packing=packing), 60)) == expected
    assert far.document_ends(0, 3000).tolist() == [1000, 2000, 3000]


def test_a_second_run_downloads_no_data(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = first_tokens(take(place.loader(place.open()), 50))
    read: list[str] = []
    real = module.Store.read

    def counted(self: Any, path: str, start: int, length: int) -> bytes:
        read.append(path)
        return real(self, path, start, length)

    monkeypatch.setattr(module.Store, "read", counted)
    assert first_tokens(take(place.loader(place.open()), 50)) == expected
    assert not [path for path in read if path.endswith(".bin") and not path.startswith("secure-train")]


def test_a_shuffle_everywhere_is_refused(place: Place) -> None:
    refusal("ST-D08", lambda: place.loader(place.open(), window=None))


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_chunk_that_rots_here_is_fetched_once_more(place: Place) -> None:
    data = place.open()
    assert np.array_equal(data.read(0, TOKENS), np.arange(TOKENS))
    for chunk in place.chunks():
        flip(chunk, 100)
    assert np.array_equal(data.read(0, TOKENS), np.arange(TOKENS))
    for chunk in place.chunks():
        chunk.write_bytes(b"")
    assert np.array_equal(data.read(0, TOKENS), np.arange(TOKENS))


def test_what_is_wrong_far_away_stops_the_run(place: Place) -> None:
    flip(place.root / "shard-00001.bin", 70_000)
    data = place.open()
    assert data.read(0, 100).tolist() == list(range(100))
    error = refusal("ST-A03", lambda: data.read(50_000 + 17_500, 10))
    assert "shard-00001.bin, block 1" in str(error.where)
    assert "twice" in str(error.found)
    refusal("ST-A03", lambda: data.fetch(50_000 + 17_500, 10))  # so it does not lie in the cache either
    with pytest.raises(Exception, match="ST-A03"):
        list(place.loader(data, end=400, lookahead=100))


def test_a_passing_fault_of_the_store_does_not_stop_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    real, faults = module.Store.read, [1]

    def faulty(self: Any, path: str, start: int, length: int) -> bytes:
        found = real(self, path, start, length)
        if (
            path.endswith("1.bin") and not path.startswith("secure-train") and faults.pop(0)
            if faults
            else False
        ):
            return found[:-1] + b"x"
        return found

    monkeypatch.setattr(module.Store, "read", faulty)
    assert place.open().read(50_000, 50).tolist() == list(range(50_000, 50_050))
    assert not faults


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("shard-00000.bin", "ST-A04"),
        ("secure-train/manifest.json", "ST-A09"),
        ("secure-train/blocks/shard-00000.bin", "ST-A04"),
    ],
)
def test_what_is_missing_far_away(place: Place, name: str, code: str) -> None:
    (place.root / name).unlink()
    refusal(code, lambda: place.open().read(0, 10))


def test_changed_digests_and_manifests_are_refused(place: Place) -> None:
    refusal("ST-A01", lambda: place.open(digest="0" * 64))
    flip(place.root / "secure-train/blocks/shard-00000.bin", 3)
    refusal("ST-A08", lambda: place.open().read(0, 10))
    flip(place.root / "dataset.json", 3)
    refusal("ST-A03", place.open)


def test_a_store_that_refuses_is_one_error(place: Place, tmp_path: Path) -> None:
    store = obstore.store.HTTPStore(
        "http://127.0.0.1:9/", client_options={"allow_http": True, "timeout": "1s"},
        retry_config={"max_retries": 0},
    )  # fmt: skip
    refusal("ST-D18", lambda: RemoteArtifact.open(store, place.digest, Cache(tmp_path / "other", 1)))


# --- prefetch ------------------------------------------------------------------------------------------


def test_the_order_says_what_to_fetch(place: Place) -> None:
    """Everything that the next samples need is here before they are read, and nothing else."""
    loader = place.loader(place.open(), prefetch=0, lookahead=128)
    next(loader)
    assert loader._fetching is not None
    loader._fetching.shutdown()  # when all that it was sent for is here
    loader._lookahead = 0
    here = place.chunks()
    size = sum(path.stat().st_size for path in here)
    assert 0 < size < 4 * TOKENS * 0.8  # 128 samples are 32 % of the data, in four chunks of the order
    shutil.move(place.root, place.root.with_name("gone"))
    assert len(take(loader, 15)) == 15
    assert place.chunks() == here


# --- the cache -----------------------------------------------------------------------------------------


def test_the_cache_stays_below_its_size(place: Place) -> None:
    limit = 4 * 65536
    data = place.open(limit)
    for first in range(0, TOKENS, 10_000):
        assert data.read(first, 10).tolist() == list(range(first, first + 10))
        assert sum(path.stat().st_size for path in place.chunks()) <= limit + 2 * 65536
    assert np.array_equal(np.fromfile(place.root / "shard-00000.bin", "<u4"), np.arange(50_000))


def test_it_deletes_only_what_it_downloaded(place: Place, tmp_path: Path) -> None:
    place.open().read(0, 10)
    others = [place.cache_folder / "notes.txt", place.cache_folder / "ab" / "abc", place.cache_folder / "x"]
    (place.cache_folder / "ab").mkdir(exist_ok=True)
    for path in others:
        path.write_bytes(b"precious" * 100_000)
    (place.cache_folder / "ab" / ("ab" + "0" * 62)).symlink_to(others[0])
    data = place.open(limit=1)
    data.read(0, TOKENS)
    assert all(path.read_bytes() == b"precious" * 100_000 for path in others)
    assert len(place.chunks()) <= 2


def test_a_folder_with_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "shard-00000.bin").write_bytes(b"the only copy")
    refusal("ST-U05", lambda: Cache(tmp_path / "data", 1))
    assert (tmp_path / "data" / "shard-00000.bin").read_bytes() == b"the only copy"


MANY = """
import sys
from pathlib import Path
import obstore
from trainer.data import Dataset, remote
from trainer.data.cache import Cache
remote.CHUNK = 2 * 65536
root, digest, folder = sys.argv[1:]
real = remote.Store.read
def counted(self, path, start, length):
    if path.endswith(".bin") and not path.startswith("secure-train"):
        print("fetched", path, start, flush=True)
    return real(self, path, start, length)
remote.Store.read = counted
artifact = remote.RemoteArtifact.open(obstore.store.LocalStore(root), digest, Cache(Path(folder), 1 << 30))
data = Dataset(artifact)
assert data.read(0, data.tokens).tolist() == list(range(data.tokens))
"""


def test_many_processes_download_each_chunk_once(place: Place) -> None:
    command = [sys.executable, "-c", MANY, str(place.root), place.digest, str(place.cache_folder)]
    root = Path(__file__).parents[2]
    started = [subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    lines = [line for process in started for line in process.communicate(timeout=120)[0].splitlines()]
    assert [process.returncode for process in started] == [0, 0, 0]
    assert len(lines) == len(set(lines)) == 8
    assert not [name for _, _, names in os.walk(place.cache_folder) for name in names if "partial" in name]


def test_a_local_dataset_has_no_lookahead(tmp_path: Path) -> None:
    data = dataset(tmp_path / "data", 5000)
    with Loader([data], seq_len=16, global_batch=8, seed=1, lookahead=100) as loader:
        next(loader)
        assert loader._fetching is None
