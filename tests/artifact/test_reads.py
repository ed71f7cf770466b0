"""Verified reads: equal to plain slices on honest files, and never a wrong byte on dishonest ones."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from supplychain.artifact import BLOCK_SIZE, VerifiedArtifact, VerifiedFile, build_manifest, reads
from supplychain.artifact.reads import Verify
from tests.artifact.support import BIG, FILES, flip, make_artifact, refused

SHARD = "shards/shard-00000.bin"
TABLE = f"secure-train/blocks/{SHARD}"
SIZES = [0, 1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 17]


@pytest.fixture
def artifact(tmp_path: Path) -> VerifiedArtifact:
    return VerifiedArtifact.open(tmp_path, make_artifact(tmp_path).digest)


@pytest.mark.parametrize("verify", ["always", "once", "off"])
@pytest.mark.parametrize("size", SIZES)
def test_reads_equal_plain_slices(tmp_path: Path, size: int, verify: Verify) -> None:
    data = (b"0123456789abcdefg" * (size // 17 + 1))[:size]
    artifact = VerifiedArtifact.open(tmp_path, make_artifact(tmp_path, {"file": data}).digest)
    edges = sorted(
        {edge for n in (0, 1, 2, 3) for edge in (n * BLOCK_SIZE - 1, n * BLOCK_SIZE, n * BLOCK_SIZE + 1)}
    )
    with artifact.open_file("file", verify=verify) as file:
        assert file.size == size
        for start in (edge for edge in [*edges, size] if 0 <= edge <= size):
            for end in (edge for edge in [*edges, size] if start <= edge <= size):
                view = file.read(start, end - start)
                assert view == data[start:end]
                assert view.readonly
    assert artifact.read_bytes("file") == data


@given(st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_ranges(artifact: VerifiedArtifact, data: st.DataObject) -> None:
    with artifact.open_file(SHARD) as file:
        start = data.draw(st.integers(0, len(BIG)))
        length = data.draw(st.integers(0, len(BIG) - start))
        assert file.read(start, length) == BIG[start : start + length]
        first, last = start // BLOCK_SIZE, -(-(start + length) // BLOCK_SIZE)
        leaves = file.leaves(start, length)
        assert len(leaves) == (32 * (last - first) if length else 0)
        assert leaves == file.leaves(0, len(BIG))[32 * first : 32 * last] or not length


@pytest.mark.parametrize("offset", [0, 1, BLOCK_SIZE - 1, BLOCK_SIZE, 2 * BLOCK_SIZE + 7, len(BIG) - 1])
def test_a_flipped_bit_is_found_wherever_it_is(artifact: VerifiedArtifact, offset: int) -> None:
    flip(artifact.root / SHARD, offset)
    block = offset // BLOCK_SIZE
    with artifact.open_file(SHARD) as file:
        start = block * BLOCK_SIZE
        end = min(start + BLOCK_SIZE, len(BIG))
        # Any range that touches the block is refused, even if it does not hold the changed byte.
        for place in {start, end - 1, offset}:
            with refused("ST-A03", SHARD, f"block {block} (bytes {start} to {end - 1})", "expected", "found"):
                file.read(place, 1)
        with refused("ST-A03"):
            file.read(0, len(BIG))
        # The other blocks are still good.
        assert file.read(0, start) == BIG[:start]
        assert file.read(end, len(BIG) - end) == BIG[end:]
    with refused("ST-A03", SHARD):
        artifact.read_bytes(SHARD)


@pytest.mark.parametrize("path", ["config.json", "shards/one-block.bin"])
def test_a_small_file_vouches_for_itself(artifact: VerifiedArtifact, path: str) -> None:
    flip(artifact.root / path, 2)
    with artifact.open_file(path) as file, refused("ST-A03", path):
        file.read(0, 1)
    with refused("ST-A03", path):
        artifact.read_bytes(path)


def test_blocks_cannot_be_exchanged(artifact: VerifiedArtifact) -> None:
    """Leaves bind positions: a valid block in another place is no valid block."""
    swapped = BIG[BLOCK_SIZE : 2 * BLOCK_SIZE][::-1] + BIG[BLOCK_SIZE:]
    (artifact.root / SHARD).write_bytes(swapped)
    with artifact.open_file(SHARD) as file, refused("ST-A03", "block 0"):
        file.read(0, 1)


def test_block_digests_are_checked_before_use(artifact: VerifiedArtifact) -> None:
    original = (artifact.root / TABLE).read_bytes()
    for table in (original[:-1], original + b"\0", original[32:] + original[:32], b"", b"\0" * len(original)):
        (artifact.root / TABLE).write_bytes(table)
        with artifact.open_file(SHARD) as file, refused("ST-A08", TABLE):
            file.read(0, 1)
    (artifact.root / TABLE).unlink()
    with artifact.open_file(SHARD) as file, refused("ST-A04", TABLE):
        file.read(0, 1)
    (artifact.root / TABLE).symlink_to("/dev/zero")
    with artifact.open_file(SHARD) as file, refused("ST-U06", "link"):
        file.read(0, 1)
    assert artifact.read_bytes(SHARD) == BIG  # the whole file's digest does not need them


@pytest.mark.parametrize("size", [0, 1, BLOCK_SIZE, len(BIG) - 1, len(BIG) + 1, len(BIG) + BLOCK_SIZE])
def test_another_size_is_refused_at_opening(artifact: VerifiedArtifact, size: int) -> None:
    os.truncate(artifact.root / SHARD, size)
    for verify in ("always", "once", "off"):
        with refused("ST-A06", SHARD, f"{len(BIG)} bytes", f"{size} bytes"):
            artifact.open_file(SHARD, verify=verify)
    with refused("ST-A06", SHARD):
        artifact.read_bytes(SHARD)


@pytest.mark.parametrize("verify", ["always", "once", "off"])
def test_truncation_while_open_is_refused(artifact: VerifiedArtifact, verify: Verify) -> None:
    with artifact.open_file(SHARD, verify=verify) as file:
        file.read(0, 10)
        os.truncate(artifact.root / SHARD, 2 * BLOCK_SIZE)
        with refused("ST-A06", "truncated", f"{2 * BLOCK_SIZE} bytes"):
            file.read(2 * BLOCK_SIZE - 5, 10)
        assert file.read(0, 10) == BIG[:10]


def test_growth_while_open_changes_nothing(artifact: VerifiedArtifact) -> None:
    with artifact.open_file(SHARD) as file:
        with open(artifact.root / SHARD, "ab") as other:
            other.write(b"more")
        assert file.read(len(BIG) - 5, 5) == BIG[-5:]
        with pytest.raises(ValueError):
            file.read(len(BIG) - 5, 6)


def test_a_file_replaced_between_open_and_read_is_not_seen(artifact: VerifiedArtifact) -> None:
    """No path is opened twice: the open file is read, whatever takes its name."""
    with artifact.open_file(SHARD) as file:
        (artifact.root / "other").write_bytes(b"y" * len(BIG))
        os.replace(artifact.root / "other", artifact.root / SHARD)
        assert file.read(0, len(BIG)) == BIG
    with artifact.open_file(SHARD) as file, refused("ST-A03"):
        file.read(0, 1)


def test_a_change_after_the_read_does_not_reach_the_returned_bytes(artifact: VerifiedArtifact) -> None:
    with artifact.open_file(SHARD) as file:
        view = file.read(0, len(BIG))
        flip(artifact.root / SHARD, 0)
        assert view == BIG
        with refused("ST-A03"):
            file.read(0, 1)  # `always` hashes again


def test_once_hashes_a_block_on_its_first_read_only(artifact: VerifiedArtifact) -> None:
    with artifact.open_file(SHARD, verify="once") as file:
        file.read(0, 1)
        flip(artifact.root / SHARD, 5)
        assert file.read(5, 1) == bytes([BIG[5] ^ 1])  # documented: a later change is not seen
        flip(artifact.root / SHARD, BLOCK_SIZE + 5)
        with refused("ST-A03", "block 1"):
            file.read(BLOCK_SIZE + 5, 1)
        with refused("ST-A03", "block 1"):
            file.read(BLOCK_SIZE + 5, 1)  # a block that failed is not taken as seen
        with refused("ST-A03", "block 1"):
            file.read(0, len(BIG))
    with artifact.open_file(SHARD, verify="once") as file, refused("ST-A03", "block 0"):
        file.read(5, 1)  # what one object has seen does not count for another


def test_off_does_not_hash(artifact: VerifiedArtifact) -> None:
    flip(artifact.root / SHARD, 5)
    (artifact.root / TABLE).unlink()
    with artifact.open_file(SHARD, verify="off") as file:
        assert file.read(5, 1) == bytes([BIG[5] ^ 1])


@pytest.mark.parametrize(
    ("offset", "length"), [(-1, 1), (0, -1), (0, len(BIG) + 1), (len(BIG), 1), (2**70, 1)]
)
def test_a_range_outside_the_file_is_a_mistake_of_the_caller(
    artifact: VerifiedArtifact, offset: int, length: int
) -> None:
    with artifact.open_file(SHARD) as file, pytest.raises(ValueError, match=SHARD):
        file.read(offset, length)


def test_a_closed_file_cannot_be_read(artifact: VerifiedArtifact) -> None:
    file = artifact.open_file(SHARD)
    file.close()
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.read(0, 1)


def test_threads_share_a_file(artifact: VerifiedArtifact) -> None:
    ranges = [(start, min(5000, len(BIG) - start)) for start in range(0, len(BIG), 4999)] * 4
    with artifact.open_file(SHARD, verify="once") as file, ThreadPoolExecutor(8) as pool:
        for (start, length), view in zip(
            ranges, pool.map(lambda item: bytes(file.read(*item)), ranges), strict=True
        ):
            assert view == BIG[start : start + length]


@contextmanager
def _flipping(path: Path, offset: int) -> Iterator[None]:
    """Somebody who changes one bit back and forth as fast as he can."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            flip(path, offset)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_a_storage_that_lies_now_and_then_never_gets_a_wrong_byte_through(artifact: VerifiedArtifact) -> None:
    outcomes = set()
    with artifact.open_file(SHARD) as file, _flipping(artifact.root / SHARD, BLOCK_SIZE + 3):
        for _ in range(300):
            try:
                outcomes.add(bytes(file.read(BLOCK_SIZE, 10)))
            except Exception as error:
                assert getattr(error, "code", None) == "ST-A03"  # noqa: PT017
                outcomes.add(b"refused")
    assert outcomes <= {BIG[BLOCK_SIZE : BLOCK_SIZE + 10], b"refused"}


def test_an_artifact_is_opened_by_its_identity(artifact: VerifiedArtifact) -> None:
    root, digest = artifact.root, artifact.manifest.digest
    with refused("ST-A01", "0" * 64, digest):
        VerifiedArtifact.open(root, "0" * 64)
    flip(root / "secure-train/manifest.json", 100)
    with refused("ST-A01", "manifest.json", digest):
        VerifiedArtifact.open(root, digest)
    build_manifest(root, "checkpoint")
    with refused("ST-A01"):
        VerifiedArtifact.open(root, digest)
    with refused("ST-A04", "no file"):
        artifact.open_file("../../etc/passwd")
    with refused("ST-A04", "no file"):
        artifact.read_bytes("secure-train/manifest.json")


def test_missing_and_exchanged_files(artifact: VerifiedArtifact) -> None:
    (artifact.root / SHARD).unlink()
    with refused("ST-A04", SHARD, f"{len(BIG)} bytes"):
        artifact.open_file(SHARD)
    (artifact.root / SHARD).symlink_to("one-block.bin")
    with refused("ST-U06", "link"):
        artifact.read_bytes(SHARD)
    (artifact.root / SHARD).unlink()
    (artifact.root / SHARD).mkdir()
    with refused("ST-U06", "not a regular file"):
        artifact.open_file(SHARD)


def test_a_large_file_is_not_taken_into_memory_by_mistake(artifact: VerifiedArtifact) -> None:
    with refused("ST-U02", "larger than the 1000 bytes", SHARD):
        artifact.read_bytes(SHARD, limit=1000)
    assert artifact.read_bytes(SHARD, limit=len(BIG)) == FILES[SHARD]


def test_descriptors_are_not_leaked(artifact: VerifiedArtifact) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with artifact.open_file(SHARD) as file:
            file.read(0, 1)
        artifact.read_bytes("config.json")
    os.truncate(artifact.root / SHARD, 1)
    for _ in range(5):
        with refused("ST-A06"):
            VerifiedFile(artifact.root, artifact.manifest.entry(SHARD))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_long_list_of_block_digests_is_not_kept_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same bytes, the same refusals; and a list that changes after it was compared is noticed."""
    monkeypatch.setattr(reads, "WHOLE", 64)
    monkeypatch.setattr(reads, "SEGMENT", 96)  # three leaves
    monkeypatch.setattr(reads, "KEPT", 1)
    data = os.urandom(20 * BLOCK_SIZE + 5)
    manifest = make_artifact(tmp_path, {"big.bin": data})
    table = tmp_path / "secure-train/blocks/big.bin"
    stored = table.read_bytes()
    with VerifiedArtifact(tmp_path, manifest).open_file("big.bin") as file:
        for first, last in ((0, 1), (0, 21), (2, 4), (7, 13), (20, 21), (5, 5)):
            offset, end = first * BLOCK_SIZE, min(last * BLOCK_SIZE, len(data))
            assert bytes(file.read(offset, end - offset)) == data[offset:end]
            assert file.leaves(offset, end - offset) == stored[first * 32 : last * 32]
        flip(table, 32 * 12)
        assert bytes(file.read(0, 10)) == data[:10]
        with refused("ST-A08", "segment 4"):
            file.read(12 * BLOCK_SIZE, 10)
        flip(table, 32 * 12)
        flip(tmp_path / "big.bin", 12 * BLOCK_SIZE)
        with refused("ST-A03", "block 12"):
            file.read(12 * BLOCK_SIZE, 10)
    flip(table, 0)
    artifact = VerifiedArtifact(tmp_path, manifest)
    with artifact.open_file("big.bin") as file, refused("ST-A08"):
        file.read(0, 1)
    table.unlink()
    with artifact.open_file("big.bin") as file, refused("ST-A04"):
        file.read(0, 1)
