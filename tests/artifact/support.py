"""What the tests of artifacts share: small trees, and one way to assert a refusal by its code."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from supplychain.artifact import BLOCK_SIZE, Manifest, SecureTrainError, build_manifest
from supplychain.errors import CODES

BIG = bytes(range(256)) * (3 * BLOCK_SIZE // 256) + b"and a short last block"  # three blocks and a bit

FILES = {
    "config.json": b"{}\n",
    "empty": b"",
    "shards/one-block.bin": b"x" * BLOCK_SIZE,
    "shards/shard-00000.bin": BIG,
    "shards/deeper/notes é.txt": b"names are Unicode",
}


def make_tree(root: Path, files: dict[str, bytes] | None = None) -> Path:
    for path, data in (FILES if files is None else files).items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return root


def make_artifact(root: Path, files: dict[str, bytes] | None = None) -> Manifest:
    return build_manifest(make_tree(root, files), "dataset")


@contextmanager
def refused(code: str, *texts: str) -> Iterator[None]:
    """The body must be refused with exactly this code, in a message with these texts that prints safely."""
    with pytest.raises(SecureTrainError) as caught:
        yield
    check_error(caught.value, code, *texts)


def check_error(error: SecureTrainError, code: str, *texts: str) -> None:
    message = str(error)
    assert error.code == code, message
    assert error.exit_code == CODES[code].exit_code
    for text in texts:
        assert text in message, message
    assert all(line.isprintable() for line in message.split("\n")), repr(message)
    message.encode("utf-8")  # no lone surrogates
    assert len(message.split("\n")) <= 5


def codes(errors: list[SecureTrainError], root: Path) -> list[tuple[str, str]]:
    """(code, path within the artifact) of each difference."""
    prefix = f"{root}/"
    places = [(error.where or "").removeprefix(prefix).split(",")[0] for error in errors]
    return [(error.code, place) for error, place in zip(errors, places, strict=True)]


def flip(path: Path, offset: int) -> None:
    """Change one bit in place, without changing the size."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        byte = os.pread(descriptor, 1, offset)[0]
        os.pwrite(descriptor, bytes([byte ^ 1]), offset)
    finally:
        os.close(descriptor)
