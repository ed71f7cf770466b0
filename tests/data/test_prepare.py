"""Preparation: the same bytes from the same input, one clear error otherwise, and never half a dataset."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from supplychain.artifact import SecureTrainError, build_manifest
from trainer.data import Dataset
from trainer.data.prepare import Request, appearing, main, prepare, split_of
from trainer.data.sources import Options
from trainer.data.tokenization import END_OF_DOCUMENT, Encoder, train

ROOT = Path(__file__).parents[2]
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "and", "runs", "through", "wood"]


def story(number: int) -> str:
    return " ".join(WORDS[(number * 7 + step * step) % len(WORDS)] for step in range(5 + number % 40))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    file.write_bytes(train(map(story, range(300)), 400))
    return file


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder with every format; 400 documents, and one that is empty."""
    folder = tmp_path / "sources"
    (folder / "sub").mkdir(parents=True)
    records = [json.dumps({"text": story(number), "id": number, "score": 0.5}) for number in range(400)]
    (folder / "b.jsonl").write_text("\n".join(records[:150]) + "\n\n")
    with gzip.open(folder / "a.jsonl.gz", "wt") as file:
        file.write("\n".join(records[150:398]))
    (folder / "sub" / "c.txt").write_text(story(398))
    (folder / "sub" / "d.txt.gz").write_bytes(gzip.compress(story(399).encode()))
    (folder / "sub" / "empty.txt").write_text("")
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def decoded(folder: Path, split: str = "train") -> list[str]:
    """The documents of a dataset, read through its manifest, as text."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    with Dataset.open(folder, build_manifest(folder, "dataset").digest, split=split) as data:
        tokens, ends = data.read(0, data.tokens), data.document_ends(0, data.tokens).tolist()
    documents = [tokens[begin:end].tolist() for begin, end in zip([0, *ends], ends, strict=False)]
    assert {document[-1] for document in documents} == {tokenizer.token_to_id(END_OF_DOCUMENT)}
    return [tokenizer.decode(document[:-1], skip_special_tokens=False) for document in documents]


def refusal(code: str, request: Request) -> SecureTrainError:
    with pytest.raises(SecureTrainError) as refused:
        prepare(request)
    assert refused.value.code == code
    nothing_is_left(request.out)
    return refused.value


def nothing_is_left(out: Path) -> None:
    assert [file.name for file in out.parent.iterdir() if out.name in file.name] == []


# --- the result ----------------------------------------------------------------------------------------


def test_every_document_comes_out_again_in_order(sources: Path, tokenizer: Path, tmp_path: Path) -> None:
    counts = prepare(Request((sources,), tmp_path / "data", tokenizer=tokenizer, shard_tokens=900))
    expected = [story(number) for number in (*range(150, 398), *range(150), 398, 399)]  # a, b, sub/c, sub/d
    assert decoded(tmp_path / "data") == expected
    assert counts["documents"] == 400
    assert counts["empty_documents"] == 1
    assert len(list((tmp_path / "data").glob("*.bin"))) == counts["shards"] == 12


@pytest.mark.parametrize("workers", [2, 3])
def test_the_number_of_workers_changes_no_byte(
    sources: Path, tokenizer: Path, tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "trainer.data.prepare.BATCH", 1000
    )  # many batches, so that workers overtake each other
    options: dict[str, Any] = {
        "tokenizer": tokenizer,
        "shard_tokens": 900,
        "validation_fraction": Fraction(1, 9),
    }
    prepare(Request((sources,), tmp_path / "one", workers=1, **options))
    prepare(Request((sources,), tmp_path / "many", workers=workers, **options))
    assert files_of(tmp_path / "one") == files_of(tmp_path / "many")


def test_the_place_of_the_sources_changes_no_byte(sources: Path, tokenizer: Path, tmp_path: Path) -> None:
    prepare(Request((sources,), tmp_path / "one", tokenizer=tokenizer))
    moved = sources.rename(tmp_path / "elsewhere")
    prepare(Request((moved,), tmp_path / "two", tokenizer=tokenizer))
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


def test_splits_are_disjoint_complete_and_seeded(sources: Path, tokenizer: Path, tmp_path: Path) -> None:
    found = []
    for seed in (1, 2):
        out = tmp_path / f"data-{seed}"
        prepare(Request((sources,), out, tokenizer=tokenizer, validation_fraction=Fraction(1, 10), seed=seed))
        kept, held = decoded(out), decoded(out, "validation")
        assert sorted(kept + held) == sorted(story(number) for number in range(400))
        assert 20 <= len(held) <= 60
        found.append(held)
    assert found[0] != found[1]


def test_the_split_of_a_document_is_frozen() -> None:
    found = [number for number in range(200) if split_of(number, 7, Fraction(1, 20)) == "validation"]
    assert found == [23, 111, 119, 153, 163, 165, 170, 173, 184, 194]


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ("file", ["one\ntwo\n\n \nthree\n"]),
        ("paragraph", ["one\ntwo\n", "three\n"]),
        ("line", ["one", "two", " ", "three"]),
    ],
)
def test_what_of_a_text_is_a_document(
    tokenizer: Path, tmp_path: Path, document: str, expected: list[str]
) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\n \nthree\n")
    options = Options(document=document)
    prepare(Request((tmp_path / "a.txt",), tmp_path / "data", tokenizer=tokenizer, options=options))
    assert decoded(tmp_path / "data") == expected


def test_text_cannot_forge_the_end_of_a_document(tokenizer: Path, tmp_path: Path) -> None:
    text = f"before{END_OF_DOCUMENT}after"
    (tmp_path / "a.txt").write_text(text)
    prepare(Request((tmp_path / "a.txt",), tmp_path / "data", tokenizer=tokenizer))
    assert decoded(tmp_path / "data") == [text]
    assert Encoder(tokenizer.read_bytes()).encode([text]).tokens.tolist().count(0) == 1


def test_the_statement_says_what_it_was_made_from(sources: Path, tmp_path: Path) -> None:
    request = Request(
        (sources,), tmp_path / "data", train_tokenizer=300, tokenizer_out=tmp_path / "tok", seed=4
    )
    counts = prepare(request)
    statement = json.loads((tmp_path / "data" / "preparation.json").read_bytes())
    assert [source["name"] for source in statement["sources"]] == [
        "a.jsonl.gz", "b.jsonl", "sub/c.txt", "sub/d.txt.gz", "sub/empty.txt"
    ]  # fmt: skip
    for source in statement["sources"]:
        data = (sources / source["name"]).read_bytes()
        assert source["sha256"] == hashlib.sha256(data).hexdigest()
        assert source["size"] == str(len(data))
    assert statement["counts"]["tokens"] == str(counts["tokens"])
    assert statement["parameters"]["seed"] == "4"
    tokenizer = (tmp_path / "tok" / "tokenizer.json").read_bytes()
    assert tokenizer == (tmp_path / "data" / "tokenizer.json").read_bytes()
    assert statement["tokenizer"]["sha256"] == hashlib.sha256(tokenizer).hexdigest() == counts["tokenizer"]
    assert str(tmp_path) not in json.dumps(statement)


def test_a_tokenizer_is_trained_on_the_training_split_only(tmp_path: Path) -> None:
    """A word that occurs in held-back documents alone must not become a token."""
    held = [number for number in range(200) if split_of(number, 0, Fraction(1, 10)) == "validation"]
    texts = ["zyzzyva " * 30 if number in held else story(number) for number in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    fraction = Fraction(1, 10)
    prepare(
        Request((tmp_path / "a.jsonl",), tmp_path / "data", train_tokenizer=350, validation_fraction=fraction)
    )
    assert not [
        token
        for token in Tokenizer.from_file(str(tmp_path / "data/tokenizer.json")).get_vocab()
        if "zyz" in token
    ]


def test_modes_do_not_depend_on_the_umask(sources: Path, tokenizer: Path, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        prepare(Request((sources,), tmp_path / "data", tokenizer=tokenizer))
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in (tmp_path / "data").iterdir()} == {0o644}
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o755


# --- refusals ------------------------------------------------------------------------------------------

BROKEN: dict[str, tuple[str, bytes, str]] = {
    "text is no UTF-8": ("a.txt", b"fine \xff", "UTF-8"),
    "line is no UTF-8": ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}', "line 2"),
    "line is no JSON": ("a.jsonl", b'{"text": "a"}\n{"text": "b"', "line 2"),
    "line is no object": ("a.jsonl", b'{"text": "a"}\n["b"]', "line 2"),
    "no text": ("a.jsonl", b'{"txet": "a"}', "line 1"),
    "text is a number": ("a.jsonl", b'{"text": 1}', "line 1"),
    "one key twice": ("a.jsonl", b'{"text": "a", "text": "b"}', "line 1"),
    "half a character": ("a.jsonl", b'{"text": "\\ud800"}', "line 1"),
    "nested too deeply": ("a.jsonl", b'{"text": "a", "x": ' + b"[" * 100_000, "line 1"),
    "truncated gzip": ("a.txt.gz", gzip.compress(os.urandom(5000).hex().encode())[:-200], "a.txt.gz"),
    "damaged gzip": ("a.txt.gz", gzip.compress(b"hello" * 99)[:20] + b"\0" * 30, "a.txt.gz"),
    "gzip with a tail": ("a.txt.gz", gzip.compress(b"hello") + b"tail", "a.txt.gz"),
    "no gzip": ("a.txt.gz", b"hello", "a.txt.gz"),
    "unknown format": ("a.pdf", b"%PDF", "a.pdf"),
}


@pytest.mark.parametrize(("name", "data", "place"), BROKEN.values(), ids=BROKEN.keys())
@pytest.mark.parametrize("workers", [1, 2])
def test_a_broken_source_is_one_error(
    tokenizer: Path, tmp_path: Path, name: str, data: bytes, place: str, workers: int
) -> None:
    (tmp_path / name).write_bytes(data)
    error = refusal(
        "ST-D02", Request((tmp_path / name,), tmp_path / "out", tokenizer=tokenizer, workers=workers)
    )
    assert place in f"{error.where} {error.what}"


def test_other_refusals(sources: Path, tokenizer: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refusal("ST-U01", Request((tmp_path / "none.txt",), out, tokenizer=tokenizer))
    refusal("ST-U01", Request((sources,), out, tokenizer=tmp_path / "none.json"))
    refusal("ST-D03", Request((sources / "sub" / "empty.txt",), out, tokenizer=tokenizer))
    one = (sources / "sub" / "c.txt",)
    refusal("ST-D03", Request(one, out, tokenizer=tokenizer, validation_fraction=Fraction(1, 10**9)))
    refusal("ST-D04", Request((sources,), out, train_tokenizer=256))
    refusal("ST-D04", Request((sources,), out, tokenizer=sources / "b.jsonl"))
    refusal("ST-D04", Request((sources,), out, tokenizer=tokenizer, end_of_document="<end>"))
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "sub").symlink_to(sources)
    refusal("ST-D02", Request((tmp_path / "linked",), out, tokenizer=tokenizer))


def test_a_result_is_never_overwritten(sources: Path, tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(SecureTrainError) as refused:
        prepare(Request((sources,), tmp_path / "out", tokenizer=tokenizer))
    assert refused.value.code == "ST-U05"
    assert list((tmp_path / "out").iterdir()) == []


def test_a_folder_that_cannot_be_made(sources: Path, tokenizer: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SecureTrainError) as refused:
        prepare(Request((sources,), tmp_path / "file" / "out", tokenizer=tokenizer))
    assert refused.value.code == "ST-U04"


def test_a_source_that_changes_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer is trained on one text and the tokens would be of another."""
    file = tmp_path / "a.txt"
    file.write_text("one two three")
    real = train

    def meanwhile(*given: Any) -> bytes:
        data = real(*given)
        file.write_text("four five six")
        return data

    monkeypatch.setattr("trainer.data.tokenization.train", meanwhile)
    refusal("ST-D05", Request((file,), tmp_path / "out", train_tokenizer=300))


def test_a_tokenizer_that_truncates_does_not(tokenizer: Path) -> None:
    model = Tokenizer.from_file(str(tokenizer))
    model.enable_truncation(3)
    model.enable_padding(length=99)
    encoder = Encoder(model.to_str().encode())
    text = story(39)
    assert model.decode(encoder.encode([text]).tokens.tolist()[:-1]) == text


# --- the command ---------------------------------------------------------------------------------------


def command(arguments: str) -> list[str]:
    return [sys.executable, "-m", "trainer.data.prepare", *arguments.split()]


def test_the_command(sources: Path, tmp_path: Path) -> None:
    out = f"--out {tmp_path}/data --tokenizer-out {tmp_path}/tok"
    options = "--train-tokenizer 300 --workers 2 --validation-fraction 0.1"
    done = subprocess.run(
        command(f"--source {sources} {out} {options}"), cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert counts["documents"] == 400
    assert set(counts["splits"]) == {"train", "validation"}
    assert "tokenizing: 100 %" in done.stderr
    request = Request(
        (sources,), tmp_path / "again", train_tokenizer=300, validation_fraction=Fraction("0.1")
    )
    prepare(request)  # with one worker, in this process
    assert files_of(tmp_path / "again") == files_of(tmp_path / "data")


def test_an_error_is_told_to_people_or_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = f"--source {tmp_path}/none --out {tmp_path}/out --train-tokenizer 300"
    assert main(arguments.split()) == 2
    assert "error[ST-U01]" in capsys.readouterr().err
    failure = tmp_path / "failure.json"
    assert main([*arguments.split(), "--failure", str(failure)]) == 2
    assert json.loads(failure.read_bytes())["code"] == "ST-U01"
    assert capsys.readouterr().err == ""  # the caller shows it


def test_a_full_disk_is_one_error(sources: Path, tokenizer: Path, tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk."""
    prepare_it = " ".join(
        command(f"--source {sources} --out {tmp_path}/out --tokenizer {tokenizer} --workers 1")
    )
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 4; exec {prepare_it}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "error[ST-U04]: the dataset cannot be written: File too large" in done.stderr
    nothing_is_left(tmp_path / "out")


def test_torch_is_not_imported() -> None:
    check = "import sys, trainer.data.prepare, trainer.corpus; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], cwd=ROOT, timeout=60).returncode == 0


def big_source(tmp_path: Path) -> Path:
    file = tmp_path / "big.jsonl"
    file.write_text("\n".join(json.dumps({"text": story(number) * 20}) for number in range(2500)))
    return file


def start_and_wait(tmp_path: Path, tokenizer: Path) -> subprocess.Popen[bytes]:
    """A preparation that has written something, and is not done."""
    options = f"--tokenizer {tokenizer} --workers 2 --shard-tokens 20000"
    process = subprocess.Popen(
        command(f"--source {big_source(tmp_path)} --out {tmp_path}/out {options}"),
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
    )
    partial = tmp_path / ".out.partial"
    for _ in range(1200):
        if partial.is_dir() and len(list(partial.glob("*.bin"))) > 2:
            return process
        assert process.poll() is None
        time.sleep(0.02)
    raise AssertionError("it did not begin")


def children_of(process: subprocess.Popen[bytes]) -> list[int]:
    task = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(number) for number in task.read_text().split()] if task.exists() else []


def test_a_kill_leaves_nothing_under_the_name_and_the_next_run_works(tokenizer: Path, tmp_path: Path) -> None:
    process = start_and_wait(tmp_path, tokenizer)
    workers = children_of(process)
    process.kill()
    process.wait(timeout=30)
    assert not (tmp_path / "out").exists()
    for _ in range(500):  # the workers see their parent gone
        if not any(Path(f"/proc/{worker}").exists() and not _is_zombie(worker) for worker in workers):
            break
        time.sleep(0.02)
    else:
        raise AssertionError("a worker outlived its parent")
    small = tmp_path / "small.txt"
    small.write_text("hello")
    prepare(Request((small,), tmp_path / "out", tokenizer=tokenizer))
    assert decoded(tmp_path / "out") == ["hello"]


def _is_zombie(worker: int) -> bool:
    try:
        return Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_termination_cleans_up(tokenizer: Path, tmp_path: Path) -> None:
    process = start_and_wait(tmp_path, tokenizer)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=30) == 128 + signal.SIGTERM
    nothing_is_left(tmp_path / "out")


def test_two_at_once_do_not_mix(sources: Path, tokenizer: Path, tmp_path: Path) -> None:
    with appearing(tmp_path / "out") as partial:
        (partial / "shard-00000.bin").write_bytes(b"of the other one")
        with pytest.raises(SecureTrainError) as refused:
            prepare(Request((sources,), tmp_path / "out", tokenizer=tokenizer))
        assert refused.value.code == "ST-D12"
    assert files_of(tmp_path / "out") == {"shard-00000.bin": b"of the other one"}


def test_a_worker_that_dies_is_an_error(tokenizer: Path, tmp_path: Path) -> None:
    process = start_and_wait(tmp_path, tokenizer)
    for worker in children_of(process):
        os.kill(worker, signal.SIGKILL)
    assert process.wait(timeout=30) == 2
    nothing_is_left(tmp_path / "out")
