"""Formats are judged by content: a pickle is refused whatever it is called."""

from __future__ import annotations

import json
import pickletools
import zipfile
from pathlib import Path

import pytest

from supplychain import formats
from supplychain.artifact import build_manifest

TENSORS = {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}


def safetensors(header: object, body: bytes = b"\0" * 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def found(folder: Path, name: str, data: bytes) -> list[str]:
    (folder / name).write_bytes(data)
    manifest = build_manifest(folder, "checkpoint")
    return [error.code for error in formats.problems(folder, manifest, ["safetensors", "json"])]


def test_good_files_pass(tmp_path: Path) -> None:
    assert found(tmp_path, "model.safetensors", safetensors(TENSORS)) == []
    assert found(tmp_path, "config.json", b'{"lr": 3e-4}') == []
    assert found(tmp_path, "README.md", b"# about") == []


PICKLE = (
    b"\x80\x04\x95\x1c\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94"
    b"\x8c\x02id\x94\x85\x94R\x94."
)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("model.safetensors", PICKLE),
        ("model.pt", PICKLE),
        ("model.bin", PICKLE),
        ("config.json", PICKLE),
        ("loader.py", b"import os"),
        ("model", safetensors(TENSORS)),
        ("model.safetensors", b""),
        ("model.safetensors", b"PK\x03\x04" + b"\0" * 60),
        ("model.safetensors", b"7z\xbc\xaf\x27\x1c" + b"\0" * 60),
        (
            "model.safetensors",
            safetensors({**TENSORS, "b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}),
        ),
        ("model.safetensors", safetensors(TENSORS, b"\0" * 9)),
        ("model.safetensors", safetensors(TENSORS, b"\0" * 7)),
        ("model.safetensors", safetensors([1, 2])),
        ("model.safetensors", safetensors(b"{" * 40)),
        ("model.safetensors", (1 << 63).to_bytes(8, "little") + b"{}"),
        ("metrics.jsonl", b'{"a":1}\nnot json\n'),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, name: str, data: bytes) -> None:
    assert found(tmp_path, name, data) == ["ST-P05"]


def test_the_pickle_of_this_test_is_one() -> None:
    """The fixture would run a command if it were loaded; here it is only taken apart."""
    names = [
        argument for opcode, argument, _ in pickletools.genops(PICKLE) if opcode.name == "SHORT_BINUNICODE"
    ]
    assert names == ["posix", "system", "id"]


def test_a_zip_with_a_pickle_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "model.safetensors", "w") as archive:
        archive.writestr("archive/data.pkl", PICKLE)
    assert found(tmp_path, "model.safetensors", (tmp_path / "model.safetensors").read_bytes()) == ["ST-P05"]
