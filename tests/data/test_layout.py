"""Preparations that leave documents out, write them in another order, in rows, or in two attempts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from supplychain.artifact import build_manifest
from tests.data.support import rows_of, sign
from trainer.data import Dataset, Loader, Window
from trainer.data.prepare import Request, main, prepare
from trainer.data.rules import Rule, at_least, at_most, unique
from trainer.data.tokenization import train

ROOT = Path(__file__).parents[2]


def story(number: int) -> str:
    return f"{number}: " + "once upon a time " * (number % 41)


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    lines = [json.dumps({"text": story(number)}) for number in range(600)]
    (tmp_path / "stories.jsonl").write_text("\n".join(lines))
    return tmp_path / "stories.jsonl"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(train((story(number) for number in range(50)), 300))
    return path


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def decoded(folder: Path, split: str = "train") -> list[str]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with Dataset.open(folder, build_manifest(folder, "dataset").digest, split=split) as data:
        tokens, ends = data.read(0, data.tokens), data.document_ends(0, data.tokens).tolist()
    return [
        tokenizer.decode(tokens[begin : end - 1].tolist())
        for begin, end in zip([0, *ends], ends, strict=False)
    ]


def statement(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "preparation.json").read_bytes())
    return document


# --- rules ---------------------------------------------------------------------------------------------


def test_rules_leave_documents_out_and_are_recorded(sources: Path, tokenizer: Path, tmp_path: Path) -> None:
    with sources.open("a") as file:
        file.write("\n" + "\n".join(json.dumps({"text": story(number)}) for number in (500, 30, 500)))
    odd = Rule("odd ones", lambda: lambda text: int(text.partition(":")[0]) % 2 == 0)
    rules = (at_least(20), at_most(600), unique(), odd)
    counts = prepare(Request((sources,), tmp_path / "data", tokenizer=tokenizer, rules=rules))
    expected = [story(n) for n in range(0, 600, 2) if 20 <= len(story(n)) <= 600]
    assert decoded(tmp_path / "data") == expected
    dropped = statement(tmp_path / "data")["counts"]["dropped"]
    assert dropped["exact duplicates"] == "3"
    assert dropped["odd ones"] == str(sum(20 <= len(story(n)) <= 600 for n in range(1, 600, 2)))
    assert counts["dropped_documents"] == sum(map(int, dropped.values())) == 603 - len(expected)
    assert statement(tmp_path / "data")["parameters"]["drop"] == [rule.name for rule in rules]


def test_rules_change_no_split(sources: Path, tokenizer: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tokenizer": tokenizer, "validation_fraction": Fraction(1, 10), "seed": 3}
    prepare(Request((sources,), tmp_path / "all", **options))
    prepare(Request((sources,), tmp_path / "some", rules=(at_least(100),), **options))
    held = decoded(tmp_path / "all", "validation")
    assert decoded(tmp_path / "some", "validation") == [text for text in held if len(text) >= 100]


# --- order and rows ------------------------------------------------------------------------------------


def test_a_shuffle_keeps_every_document(sources: Path, tokenizer: Path, tmp_path: Path) -> None:
    orders = []
    for name, seed in (("one", 1), ("two", 2), ("again", 1)):
        prepare(
            Request(
                (sources,), tmp_path / name, tokenizer=tokenizer, seed=seed, shuffle=True, shard_tokens=5000
            )
        )
        orders.append(decoded(tmp_path / name))
    everything = [story(number) for number in range(600)]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(everything)
    assert orders[0] != orders[1]
    assert sum(a == b for a, b in zip(orders[0], everything, strict=True)) < 10
    assert files_of(tmp_path / "one") == files_of(tmp_path / "again")
    assert statement(tmp_path / "one")["parameters"]["shuffle"] is True


@pytest.mark.parametrize("rows", [False, True], ids=["sidecar", "rows"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_packed_documents_come_out_whole(
    sources: Path, tokenizer: Path, tmp_path: Path, rows: bool, shuffle: bool
) -> None:
    options: dict[str, Any] = {"tokenizer": tokenizer, "pack": 64, "rows": rows, "shuffle": shuffle}
    prepare(Request((sources,), tmp_path / "plain", tokenizer=tokenizer))
    for name, workers in (("data", 1), ("again", 2)):
        prepare(Request((sources,), tmp_path / name, workers=workers, shard_tokens=3000, **options))
    assert files_of(tmp_path / "data") == files_of(tmp_path / "again")
    plain = np.fromfile(tmp_path / "plain" / "shard-00000.bin", "<u2")
    ends = np.fromfile(tmp_path / "plain" / "shard-00000.idx", "<u8").astype(int)
    documents = [plain[begin:end].tolist() for begin, end in zip([0, *ends], ends, strict=False)]
    expected = sorted(
        tuple(document[first : first + 64]) for document in documents for first in range(0, len(document), 64)
    )
    with Dataset.open(tmp_path / "data", sign(tmp_path / "data")) as data:
        samples = sum(data.rows(64))
        assert len(data.shards) > 3
        given: dict[str, Any] = {"seq_len": 64, "global_batch": 8, "seed": 1, "boundaries": True}
        found = []
        with Loader([data], packing="rows", end=samples, window=Window(4, 2), **given) as loader:
            for batch in loader:
                for row, ids in zip(rows_of([batch]), batch.document_ids, strict=False):
                    for number in range(int(ids[len(row) - 1]) + 1):
                        found.append(tuple(np.array(row)[ids[: len(row)] == number].tolist()))
        assert sorted(found) == expected
        assert data.tokens % 64 == 0 or not rows
        padding = sum(data.rows(64)) * 64 / len(plain)
        assert padding < 1.05


def test_a_row_lies_where_its_number_says(sources: Path, tokenizer: Path, tmp_path: Path) -> None:
    """So that rows that fill blocks of 64 KiB are each hashed with no byte of another block."""
    prepare(
        Request((sources,), tmp_path / "data", tokenizer=tokenizer, pack=64, rows=True, shard_tokens=3000)
    )
    with Dataset.open(tmp_path / "data", sign(tmp_path / "data")) as data:
        for number, rows in enumerate(data.rows(64)):
            assert data.shards[number].tokens == rows * 64
            for row in range(rows):
                firsts, lengths = data.pieces(number, row, 64)
                assert firsts[0] - data.shard_start(number) == row * 64
                assert firsts[1:] == [first + n for first, n in zip(firsts, lengths, strict=True)][:-1]


# --- in two attempts -----------------------------------------------------------------------------------

ATTEMPT = """
import sys, json
from pathlib import Path
from trainer.data import journal, prepare, tokenization
prepare.BATCH, journal.EVERY = 2000, 2
source, tokenizer, out, options = sys.argv[1:]
read = []
real = tokenization.Encoder.encode
def counted(self, texts):
    read.append(len(texts))
    return real(self, texts)
tokenization.Encoder.encode = counted
prepare.prepare(prepare.Request((Path(source),), Path(out), tokenizer=Path(tokenizer), **json.loads(options)))
print(sum(read))
"""
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"shard_tokens": 900},
    "shuffled": {"shuffle": True, "shard_tokens": 900},
    "rows": {"pack": 64, "rows": True, "shuffle": True, "shard_tokens": 900},
}


def attempt(source: Path, tokenizer: Path, out: Path, options: dict[str, Any]) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", ATTEMPT, str(source), str(tokenizer), str(out), json.dumps(options)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def kill_on_the_way(process: subprocess.Popen[str], out: Path, number: int) -> None:
    journal = out.with_name(f".{out.name}.partial") / "journal.json"
    for _ in range(3000):
        if journal.exists():
            break
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, number)
    process.wait(timeout=30)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_a_killed_preparation_goes_on(
    sources: Path, tokenizer: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Byte for byte what it would have been, and without tokenizing again what was done."""
    big = tmp_path / "big.jsonl"
    big.write_text("\n".join([sources.read_text()] * 10))
    whole = attempt(big, tokenizer, tmp_path / "whole", options)
    everything = int(whole.communicate(timeout=120)[0])
    out = tmp_path / "out"
    for number in (signal.SIGKILL, signal.SIGTERM):
        kill_on_the_way(attempt(big, tokenizer, out, options), out, number)
        assert not out.exists()
    last = attempt(big, tokenizer, out, options)
    done = int(last.communicate(timeout=120)[0])
    assert last.returncode == 0
    assert done < everything
    assert files_of(out) == files_of(tmp_path / "whole")
    assert not (tmp_path / ".out.partial").exists()


@pytest.mark.parametrize("change", ["source", "parameter", "journal", "shard"])
def test_what_does_not_fit_is_begun_again(
    sources: Path, tokenizer: Path, tmp_path: Path, change: str
) -> None:
    big = tmp_path / "big.jsonl"
    text = "\n".join([sources.read_text()] * 10)
    big.write_text(text)
    out, options = tmp_path / "out", {"shard_tokens": 900}
    kill_on_the_way(attempt(big, tokenizer, out, options), out, signal.SIGKILL)
    partial = tmp_path / ".out.partial"
    if change == "source":
        big.write_text(text.replace("7: once", "7: ecno", 1))  # as long as before
    elif change == "parameter":
        options = {"shard_tokens": 800}
    elif change == "journal":
        (partial / "journal.json").write_bytes(b'{"subject": ')
    else:
        (partial / "train-00000.bin").write_bytes(b"")
    assert attempt(big, tokenizer, out, options).wait(timeout=120) == 0
    assert attempt(big, tokenizer, tmp_path / "whole", options).wait(timeout=120) == 0
    assert files_of(out) == files_of(tmp_path / "whole")


def test_the_options_of_the_command(sources: Path, tokenizer: Path, tmp_path: Path) -> None:
    arguments = f"--source {sources} --out {tmp_path}/data --tokenizer {tokenizer} --workers 1 --shuffle"
    more = "--pack 64 --rows --drop-shorter 20 --drop-longer 600 --drop-duplicates --seed 4"
    assert main([*arguments.split(), *more.split()]) == 0
    expected = Request(
        (sources,), tmp_path / "again", tokenizer=tokenizer, seed=4, shuffle=True, pack=64, rows=True,
        rules=(at_least(20), at_most(600), unique()),
    )  # fmt: skip
    prepare(expected)
    assert files_of(tmp_path / "data") == files_of(tmp_path / "again")
    with pytest.raises(SystemExit):
        main([*arguments.split(), "--rows"])
