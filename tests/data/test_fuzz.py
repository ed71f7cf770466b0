"""Foreign bytes, fuzzed: whatever they are, the answer is the thing itself or one named error."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from supplychain.artifact import SecureTrainError
from tests.data.support import dataset, first_tokens, sign, take, write_dataset
from trainer.data import Dataset, Description, Loader, parse_schedule
from trainer.data.adopt import Request, adopt
from trainer.data.journal import START, read
from trainer.data.sources import Options, find

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**63) | st.text(max_size=8) | st.sampled_from(
        ["0", "1", "-1", "16", "60000", "9" * 30, "../x", "/etc", "a\0b", "uint16", "uint32", "train", ".."]
    ),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip


@contextlib.contextmanager
def named() -> Iterator[None]:
    """An error of ours is fine, and nothing else is."""
    with contextlib.suppress(SecureTrainError):
        yield


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dataset(tmp_path_factory.mktemp("fuzz") / "data", 3003)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return dataset(tmp_path_factory.mktemp("fuzz") / "data", 3003)


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(inner for key, item in items for inner in paths_in(item, (*path, key)))]


@FUZZ
@given(data=st.data())
def test_descriptions(root: Path, data: st.DataObject) -> None:
    """A description with anything anywhere is refused, or is the very same bytes when it is written again."""
    document: Any = json.loads((root / "dataset.json").read_bytes())
    path = data.draw(st.sampled_from(paths_in(document)))
    value = data.draw(VALUES)
    if path:
        place = document
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
    else:
        document = value
    with named():
        raw = json.dumps(document, sort_keys=True, separators=(",", ":")).encode()
        assert Description.parse(raw).to_bytes() == raw


@FUZZ
@given(st.binary(max_size=300))
def test_what_is_no_description(raw: bytes) -> None:
    with pytest.raises(SecureTrainError):
        Description.parse(raw)


@FUZZ
@given(draw=st.data())
def test_states(data: Dataset, draw: st.DataObject) -> None:
    """A state with anything anywhere is refused, unless it is the state; then it goes on exactly there."""
    with Loader([data], seq_len=16, global_batch=12, seed=5, threads=0) as loader:
        take(loader, 7)
        state: dict[str, Any] = dict(loader.state_dict())
        expected = first_tokens(take(loader, 1))
        key = draw.draw(st.sampled_from(sorted(state)) | st.text(max_size=9))
        value = draw.draw(VALUES | st.sampled_from(sorted(state.values())))
        changed = state | {key: value}
        try:
            loader.load_state_dict(changed)
        except SecureTrainError:
            assert loader.consumed == 96
        else:
            assert changed == state
            assert first_tokens(take(loader, 1)) == expected


@FUZZ
@given(st.text(alphabet="webcod=,;: 0123456789_-²\n\0", max_size=40))
def test_schedules(text: str) -> None:
    with named():
        for stage in parse_schedule(text, {"web": "aa" * 32, "code": "bb" * 32}) or []:
            assert stage.start >= 0
            assert min(stage.weights.values()) >= 0


@FUZZ
@given(
    raw=st.binary(max_size=200) | VALUES.map(lambda value: json.dumps(value).encode()),
    name=st.sampled_from(["a.txt", "a.jsonl", "a.jsonl.gz", "a.txt.gz"]),
    document=st.sampled_from(["file", "paragraph", "line"]),
)
def test_sources(tmp_path: Path, raw: bytes, name: str, document: str) -> None:
    (tmp_path / name).write_bytes(raw)
    with named():
        (source,) = find([tmp_path / name])
        opened = source.open(Options(document=document))
        for text in opened.documents:
            text.encode()
        assert opened.read == len(raw)


@FUZZ
@given(st.binary(max_size=100) | VALUES.map(lambda value: json.dumps(value).encode()))
def test_journals(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "journal.json").write_bytes(raw)
    assert read(tmp_path, "subject") is START


HEADS = [b"", b"MMIDIDX\x00\x00", b"\x93NUMPY\x01\x00", b"\xd8\x29\x34\x01"]


@FUZZ
@given(head=st.sampled_from(HEADS), tail=st.binary(max_size=150))
@pytest.mark.parametrize("name", ["x.bin", "x.npy", "x.idx"])
def test_adoption(tmp_path: Path, name: str, head: bytes, tail: bytes) -> None:
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    np.arange(50, dtype="<u2").tofile(tmp_path / "x.bin")
    (tmp_path / name).write_bytes(head + tail)
    with named():
        adopt(Request(tmp_path, vocab_size=2**16, dtype="uint16"))
        with Dataset.open(tmp_path, sign(tmp_path)) as adopted:
            adopted.read(0, adopted.tokens)
