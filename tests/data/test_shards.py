"""Datasets on disk: the writer's form, verified reads of it, and what is refused before a token reaches a
model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from supplychain.artifact import BLOCK_SIZE, SecureTrainError, build_manifest, canonical_json
from tests.data.support import first_tokens, sign, take, write_dataset
from trainer.data import Dataset, Description, Loader, Writer
from trainer.data.shards import DESCRIPTION, TOKENIZER

TOKENS = 60_000  # at four bytes: two shards of two blocks each


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_dataset(tmp_path / "data", TOKENS, shard_tokens=30_000, document=1000)


# --- the form ------------------------------------------------------------------------------------------


def test_the_files_are_what_other_tools_read(root: Path) -> None:
    assert sorted(file.name for file in root.iterdir()) == [
        "dataset.json",
        "shard-00000.bin",
        "shard-00000.idx",
        "shard-00001.bin",
        "shard-00001.idx",
        "tokenizer.json",
    ]
    assert np.fromfile(root / "shard-00001.bin", "<u4").tolist() == list(range(30_000, 60_000))
    assert np.fromfile(root / "shard-00001.idx", "<u8").tolist() == list(range(1000, 30_001, 1000))


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_the_token_type_follows_the_vocabulary(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    root = write_dataset(tmp_path / "data", 100, vocab_size=vocab_size)
    assert json.loads((root / DESCRIPTION).read_bytes())["dtype"] == dtype


def test_a_document_is_never_cut_by_a_shard(tmp_path: Path) -> None:
    tmp_path.joinpath(TOKENIZER).write_bytes(b"{}")
    writer = Writer(tmp_path, vocab_size=100, tokenizer="0" * 64, shard_tokens=10)
    for lengths in ([3, 3, 3, 3], [25], [1], [10, 10], [4]):
        writer.add("train", np.zeros(sum(lengths)), np.array(lengths))
    shards = writer.finish().shards
    found = [(shard.tokens, shard.documents) for shard in shards]
    assert found == [(9, 3), (3, 1), (25, 1), (1, 1), (10, 1), (10, 1), (4, 1)]


def test_batches_of_documents_do_not_matter(tmp_path: Path) -> None:
    lengths = np.random.default_rng(1).integers(1, 40, 300)
    tokens = np.arange(lengths.sum())
    ends = np.cumsum(lengths)
    for name, cuts in (("one", [300]), ("many", [*range(0, 300, 7), 300])):
        folder = tmp_path / name
        folder.mkdir()
        writer = Writer(folder, vocab_size=10**5, tokenizer="0" * 64, shard_tokens=500)
        done = 0
        for cut in cuts:
            if cut > done:
                begin = int(ends[done - 1]) if done else 0
                writer.add("train", tokens[begin : ends[cut - 1]], lengths[done:cut])
                done = cut
        writer.finish()
    files = sorted(file.name for file in (tmp_path / "one").iterdir())
    assert files == sorted(file.name for file in (tmp_path / "many").iterdir())
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "many" / file).read_bytes()


# --- reads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["always", "once", "off"])
def test_reads_go_over_shards_and_round_the_ring(root: Path, verify: Any) -> None:
    with Dataset.open(root, sign(root), verify=verify) as data:
        assert data.tokens == TOKENS
        for first in (0, 16_383, 29_990, TOKENS - 7):
            assert data.read(first, 20).tolist() == [(first + step) % TOKENS for step in range(20)]
        assert np.array_equal(data.read(0, TOKENS), np.arange(TOKENS))


def test_document_ends(root: Path) -> None:
    with Dataset.open(root, sign(root)) as data:
        assert data.document_ends(0, 999).tolist() == []
        assert data.document_ends(0, 1000).tolist() == [1000]
        assert data.document_ends(1000, 1000).tolist() == [1000]
        assert data.document_ends(29_500, 1600).tolist() == [500, 1500]
        assert data.document_ends(TOKENS - 10, 1020).tolist() == [10, 1010]


def test_more_shards_than_may_be_open(tmp_path: Path) -> None:
    root = write_dataset(tmp_path / "data", 2000, shard_tokens=10, document=10)
    with Dataset.open(root, sign(root)) as data:
        for _ in range(2):
            assert np.array_equal(data.read(0, 2000), np.arange(2000))


def test_shards_beyond_32_bits(tmp_path: Path) -> None:
    """A sparse shard of 2^33 tokens: positions, sizes and offsets need 64 bits."""
    root, tokens = tmp_path / "data", 2**33
    root.mkdir()
    (root / TOKENIZER).write_bytes(b"{}")
    with open(root / "shard-00000.bin", "wb") as file:
        file.truncate(2 * tokens)
        file.seek(2 * (tokens - 3))
        file.write(np.array([7, 8, 9], "<u2").tobytes())
    np.array([tokens], "<u8").tofile(root / "shard-00000.idx")
    description = {
        "schema": "urn:secure-train:dataset:v1",
        "dtype": "uint16",
        "vocab_size": "10",
        "tokens": str(tokens),
        "documents": "1",
        "tokenizer": "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a",
        "shards": [{"name": "shard-00000", "split": "train", "tokens": str(tokens), "documents": "1"}],
    }
    (root / DESCRIPTION).write_bytes(canonical_json(description))
    # Hashing 16 GiB of zeros is no test of ours: the manifest is made without block digests.
    manifest = _manifest_without_hashing(root)
    with Dataset.open(root, manifest, verify="off") as data:
        assert data.read(tokens - 4, 6).tolist() == [0, 7, 8, 9, 0, 0]


def _manifest_without_hashing(root: Path) -> str:
    from supplychain.artifact import MANIFEST, FileEntry, Manifest

    small = {}
    for file in sorted(root.iterdir()):
        copy = root.parent / "small" / file.name
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(file.read_bytes() if file.stat().st_size < 2**20 else b"x")
        small[file.name] = file.stat().st_size
    entries = [
        FileEntry(entry.path, small[entry.path], entry.mode, entry.sha256, None)
        for entry in build_manifest(root.parent / "small", "dataset", blocks=False).files
    ]
    manifest = Manifest("dataset", tuple(entries))
    (root / MANIFEST).parent.mkdir()
    (root / MANIFEST).write_bytes(manifest.data)
    return manifest.digest


# --- tampering -----------------------------------------------------------------------------------------


def edit(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def flip(place: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def swap(root: Path) -> None:
    one, two = (root / f"shard-0000{number}.bin" for number in range(2))
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)


def link(root: Path) -> None:
    (root / "shard-00000.bin").rename(root.parent / "moved")
    (root / "shard-00000.bin").symlink_to(root.parent / "moved")


def exchange(data: bytes) -> bytes:
    return data[1024:2048] + data[:1024] + data[2048:]


TAMPERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "first bit": ("ST-A03", lambda root: edit(root / "shard-00000.bin", flip(0))),
    "last bit": ("ST-A03", lambda root: edit(root / "shard-00001.bin", flip(-1 % 120_000))),
    "block edge": ("ST-A03", lambda root: edit(root / "shard-00001.bin", flip(BLOCK_SIZE))),
    "truncated": ("ST-A06", lambda root: edit(root / "shard-00000.bin", lambda data: data[:-1])),
    "extended": ("ST-A06", lambda root: edit(root / "shard-00000.bin", lambda data: data + b"\0")),
    "emptied": ("ST-A06", lambda root: edit(root / "shard-00000.bin", lambda data: b"")),
    "removed": ("ST-A04", lambda root: (root / "shard-00001.bin").unlink()),
    "renamed": ("ST-A04", lambda root: (root / "shard-00001.bin").rename(root / "shard-00009.bin")),
    "swapped": ("ST-A03", swap),
    "rows exchanged": ("ST-A03", lambda root: edit(root / "shard-00000.bin", exchange)),
    "link": ("ST-U06", link),
    "description": ("ST-A03", lambda root: edit(root / DESCRIPTION, lambda d: d.replace(b"60000", b"60001"))),
    "block digests": ("ST-A08", lambda root: edit(root / "secure-train/blocks/shard-00000.bin", flip(5))),
    "no block digests": ("ST-A04", lambda root: (root / "secure-train/blocks/shard-00000.bin").unlink()),
    "manifest": ("ST-A01", lambda root: edit(root / "secure-train/manifest.json", flip(20))),
    "unsigned": ("ST-A09", lambda root: shutil.rmtree(root / "secure-train")),
}


def read_epoch(root: Path, digest: str, threads: int, found: list[int]) -> None:
    data = Dataset.open(root, digest)
    with Loader([data], seq_len=500, global_batch=10, seed=3, threads=threads) as loader:
        for _ in range(12):
            found += first_tokens(take(loader, 1))


@pytest.mark.parametrize(("code", "tamper"), TAMPERS.values(), ids=TAMPERS.keys())
@pytest.mark.parametrize("threads", [0, 1])
def test_tampering_is_caught_before_a_token_is_used(
    root: Path, code: str, tamper: Callable[[Path], object], threads: int
) -> None:
    """Every batch that comes out before the error is right, and the damaged sample never comes out."""
    digest = sign(root)
    with Loader([Dataset.open(root, digest)], seq_len=500, global_batch=10, seed=3) as loader:
        expected = first_tokens(take(loader, 12))
    tamper(root)
    found: list[int] = []
    with pytest.raises(SecureTrainError) as refused:
        read_epoch(root, digest, threads, found)
    assert refused.value.code == code
    assert found == expected[: len(found)]


@pytest.mark.parametrize("change", ["cut", "longer"])
def test_sizes_are_checked_even_where_nothing_is_hashed(root: Path, change: str) -> None:
    digest = sign(root)
    edit(root / "shard-00000.bin", lambda data: data[:-4] if change == "cut" else data + b"more")
    with Dataset.open(root, digest, verify="off") as data, pytest.raises(SecureTrainError) as refused:
        data.read(0, 5)
    assert refused.value.code == "ST-A06"


def test_an_older_manifest_is_not_the_one_that_was_planned(root: Path, tmp_path: Path) -> None:
    """A replay: the old dataset is whole and was signed, and is not what the plan names."""
    old = tmp_path / "old"
    sign(root)
    shutil.copytree(root, old)
    edit(root / "shard-00000.bin", flip(0))
    digest = sign(root)
    shutil.rmtree(root)
    old.rename(root)
    with pytest.raises(SecureTrainError) as refused:
        Dataset.open(root, digest)
    assert refused.value.code == "ST-A01"


def test_once_does_not_hash_again_and_always_does(root: Path) -> None:
    digest = sign(root)
    with Dataset.open(root, digest, verify="once") as once, Dataset.open(root, digest) as always:
        once.read(0, 10), always.read(0, 10)
        edit(root / "shard-00000.bin", flip(1))
        assert once.read(0, 1).tolist() == [256]
        with pytest.raises(SecureTrainError) as refused:
            always.read(0, 1)
    assert refused.value.code == "ST-A03"


# --- signed, and still wrong ---------------------------------------------------------------------------


def stale(root: Path, ends: list[int]) -> None:
    np.array(ends, "<u8").tofile(root / "shard-00000.idx")


@pytest.mark.parametrize(
    "ends",
    [
        [*range(1000, 29_001, 1000), 29_999],
        [*range(1000, 29_001, 1000), 2**63],
        [0, *range(2000, 30_001, 1000)],
        [2000, 1000, *range(3000, 30_001, 1000)],
        [1000, 1000, *range(3000, 30_001, 1000)],
    ],
    ids=["ends early", "beyond", "empty document", "unsorted", "twice"],
)
def test_a_stale_index_is_refused(root: Path, ends: list[int]) -> None:
    stale(root, ends)
    with Dataset.open(root, sign(root)) as data:
        assert data.read(0, 5).tolist() == [0, 1, 2, 3, 4]
        with pytest.raises(SecureTrainError) as refused:
            data.document_ends(0, 2000)
    assert refused.value.code == "ST-D07"


def test_a_token_outside_the_vocabulary_is_refused(root: Path) -> None:
    edit(root / DESCRIPTION, lambda data: data.replace(b'"1048576"', b'"59999"'))
    digest = sign(root)
    with Dataset.open(root, digest) as data:
        assert data.read(TOKENS - 3, 2).tolist() == [TOKENS - 3, TOKENS - 2]
        for call in (
            lambda: data.read(TOKENS - 3, 3),
            lambda: take(Loader([data], seq_len=500, global_batch=10, seed=3), 12),
        ):
            with pytest.raises(SecureTrainError) as refused:
                call()
            assert refused.value.code == "ST-D11"


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "schema": lambda d: d.update(schema="urn:secure-train:dataset:v2"),
    "unknown key": lambda d: d.update(extra="1"),
    "no shards": lambda d: d.update(shards=[]),
    "shards are no list": lambda d: d.update(shards=7),
    "shard is no object": lambda d: d.update(shards=["shard-00000"]),
    "missing key": lambda d: d.pop("vocab_size"),
    "token type": lambda d: d.update(dtype="float16"),
    "token type is a list": lambda d: d.update(dtype=["uint32"]),
    "vocabulary does not fit": lambda d: d.update(vocab_size=str(2**33)),
    "no vocabulary": lambda d: d.update(vocab_size="0"),
    "negative count": lambda d: d["shards"][0].update(tokens="-1"),
    "count as a number": lambda d: d["shards"][0].update(tokens=30000),
    "leading zero": lambda d: d["shards"][0].update(tokens="030000"),
    "empty shard": lambda d: d["shards"][0].update(tokens="0"),
    "huge count": lambda d: d["shards"][0].update(tokens="9" * 40),
    "more tokens than 60 bits": lambda d: (
        d["shards"][0].update(tokens=str(2**60)),
        d.update(tokens=str(2**60 + 30000)),
    ),
    "wrong sum": lambda d: d.update(tokens="60001"),
    "wrong size": lambda d: (d["shards"][0].update(tokens="29999"), d.update(tokens="59999")),
    "wrong documents": lambda d: (d["shards"][0].update(documents="29"), d.update(documents="59")),
    "more documents than tokens": lambda d: d["shards"][0].update(documents="30001"),
    "one name twice": lambda d: d["shards"][1].update(name="shard-00000"),
    "one name in two cases": lambda d: d["shards"][1].update(name="SHARD-00000"),
    "absolute name": lambda d: d["shards"][0].update(name="/etc/passwd"),
    "name that leads out": lambda d: d["shards"][0].update(name="../shard-00000"),
    "split": lambda d: d["shards"][0].update(split="Train!"),
    "shard left out": lambda d: (d["shards"].pop(), d.update(tokens="30000", documents="30")),
    "tokenizer": lambda d: d.update(tokenizer="0" * 64),
    "tokenizer is no digest": lambda d: d.update(tokenizer="none"),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_description_is_refused(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((root / DESCRIPTION).read_bytes())
    change(document)
    (root / DESCRIPTION).write_bytes(canonical_json(document))
    with pytest.raises(SecureTrainError) as refused:
        Dataset.open(root, sign(root))
    assert refused.value.code == "ST-D06"


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"[]", b"\xff", b'{"schema": 1.5}', b"[" * 10**5, b'{"a":1,"a":1}']
)
def test_what_is_no_description_is_refused(data: bytes) -> None:
    with pytest.raises(SecureTrainError) as refused:
        Description.parse(data)
    assert refused.value.code == "ST-D06"


def test_a_file_that_the_description_names_is_missing(root: Path) -> None:
    (root / "shard-00001.idx").unlink()
    with pytest.raises(SecureTrainError) as refused:
        Dataset.open(root, sign(root))
    assert refused.value.code == "ST-A04"


def test_another_kind_of_artifact_is_refused(root: Path) -> None:
    digest = build_manifest(root, "checkpoint").digest
    with pytest.raises(SecureTrainError) as refused:
        Dataset.open(root, digest)
    assert refused.value.code == "ST-D06"


def test_a_split_that_does_not_exist(root: Path) -> None:
    with pytest.raises(SecureTrainError) as refused:
        Dataset.open(root, sign(root), split="validation")
    assert refused.value.code == "ST-D03"
