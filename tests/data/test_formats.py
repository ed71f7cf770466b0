"""Parquet, Arrow and zst as sources. Needs pyarrow, an extra; what happens without it is tested always."""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from supplychain.artifact import SecureTrainError
from tests.data.test_layout import decoded, story
from trainer.data.prepare import Request, prepare
from trainer.data.sources import Options
from trainer.data.tokenization import train

TEXTS = [story(number) for number in range(120)]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(train(TEXTS[:50], 300))
    return path


def write(path: Path, texts: list[str], key: str = "text") -> Path:
    """The texts, in the format that the name says."""
    arrow = pytest.importorskip("pyarrow")
    name = path.name
    lines = "\n".join(json.dumps({key: text}) for text in texts).encode()
    table = arrow.table({"id": list(range(len(texts))), key: texts})
    if name.endswith(".parquet"):
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(table, path, row_group_size=17, compression="zstd")
    elif name.endswith(".arrow"):
        new = arrow.ipc.new_stream if "stream" in name else arrow.ipc.new_file
        with new(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=13)
    elif name.endswith(".zst"):
        path.write_bytes(arrow.compress(lines, "zstd", asbytes=True))
    else:
        path.write_bytes(gzip.compress(lines))
    return path


NAMES = ["a.parquet", "file.arrow", "stream.arrow", "a.jsonl.zst", "a.jsonl.gz"]


@pytest.mark.parametrize("name", NAMES)
def test_every_format_gives_the_same_documents(tokenizer: Path, tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, TEXTS)
    prepare(Request((path,), tmp_path / "data", tokenizer=tokenizer))
    assert decoded(tmp_path / "data") == TEXTS
    (source,) = json.loads((tmp_path / "data" / "preparation.json").read_bytes())["sources"]
    assert source["sha256"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert source["size"] == str(path.stat().st_size)


def test_a_compressed_table_and_another_column(tokenizer: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", TEXTS, key="content")
    packed = tmp_path / "a.parquet.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    prepare(Request((packed,), tmp_path / "data", tokenizer=tokenizer, options=Options(text_key="content")))
    assert decoded(tmp_path / "data") == TEXTS


def refused(tmp_path: Path, tokenizer: Path, path: Path, code: str = "ST-D02") -> str:
    with pytest.raises(SecureTrainError) as error:
        prepare(Request((path,), tmp_path / "out", tokenizer=tokenizer))
    assert error.value.code == code
    assert path.name in str(error.value.where)
    return error.value.what


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", ["cut", "flipped", "other"])
def test_damage_is_one_error(tokenizer: Path, tmp_path: Path, name: str, damage: str) -> None:
    path = write(tmp_path / name, TEXTS)
    data = path.read_bytes()
    if damage == "cut":
        path.write_bytes(data[: len(data) * 2 // 3])
    elif damage == "flipped":
        place = 6 if "jsonl" in name or "stream" in name else len(data) - 80  # where tables have theirs
        damaged = bytes(byte ^ 0xFF for byte in data[place : place + 54])
        path.write_bytes(data[:place] + damaged + data[place + 54 :])
    else:
        path.write_bytes(b"something else entirely, and longer than a footer")
    refused(tmp_path, tokenizer, path)


def test_a_table_without_text_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    assert "no column 'text'" in refused(
        tmp_path, tokenizer, write(tmp_path / "a.parquet", TEXTS, key="body")
    )
    numbers: Any = [1, 2, 3]
    assert "int64" in refused(tmp_path, tokenizer, write(tmp_path / "b.arrow", numbers))
    nothing: Any = ["a", None]
    assert "no text" in refused(tmp_path, tokenizer, write(tmp_path / "c.parquet", nothing))


def test_without_the_package_one_error_says_so(tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    check = """
import sys
sys.modules["pyarrow"] = None
from trainer.data.prepare import main
sys.exit(main(sys.argv[1:]))
"""
    arguments = f"--source {tmp_path}/a.parquet --out {tmp_path}/out --tokenizer {tokenizer} --workers 1"
    done = subprocess.run(
        [sys.executable, "-c", check, *arguments.split()],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "error[ST-D17]: this needs the package pyarrow" in done.stderr
