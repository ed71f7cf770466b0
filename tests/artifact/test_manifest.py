"""The manifest's form: round trip, identity, and hostile manifests, which are refused and never half-read."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from hypothesis import given, settings
from hypothesis import strategies as st

from supplychain.artifact import (
    BLOCK_SIZE,
    FileEntry,
    Manifest,
    SecureTrainError,
    canonical_json,
    claimed_kind,
    oms,
    read_manifest,
)
from supplychain.artifact.manifest import _strictly
from tests.artifact.support import FILES, check_error, make_artifact, refused

DIGEST = "0123456789abcdef" * 4

HEX = st.text("0123456789abcdef", min_size=64, max_size=64)


def entry(path: str, **changes: Any) -> dict[str, Any]:
    return {"path": path, "size": 1, "mode": "0644", "sha256": DIGEST, "blocks": DIGEST} | changes


GOOD: dict[str, Any] = {
    "schema": "urn:secure-train:manifest:v1",
    "kind": "dataset",
    "block_size": BLOCK_SIZE,
    "files": [entry("a"), entry("b/c", mode="0755", blocks=None), entry("d", size=2**40)],
}


def encode(document: Any) -> bytes:
    return rfc8785.dumps(document)


def test_a_good_manifest_is_accepted() -> None:
    manifest = Manifest.parse(encode(GOOD))
    assert manifest.data == encode(GOOD)
    assert manifest.digest == hashlib.sha256(encode(GOOD)).hexdigest()
    assert manifest.entry("b/c") == FileEntry("b/c", 1, 0o755, DIGEST, None)
    assert manifest.has("d")
    assert not manifest.has("b")
    assert manifest.total_bytes == 2**40 + 2
    with refused("ST-A04", "no file"):
        manifest.entry("nothing\n\x1b[2J")


@given(
    st.lists(
        st.tuples(st.integers(0, 2**53 - 1), st.sampled_from([0o644, 0o755]), HEX, st.none() | HEX),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=50, deadline=None)
def test_round_trip(rows: list[tuple[int, int, str, str | None]]) -> None:
    files = tuple(FileEntry(f"f/{index}", *row) for index, row in enumerate(rows))
    manifest = Manifest("checkpoint", files)
    assert Manifest.parse(manifest.data) == manifest


def test_the_manifest_describes_the_folder(tmp_path: Path) -> None:
    manifest = make_artifact(tmp_path)
    assert manifest.digest == hashlib.sha256(read_manifest(tmp_path)).hexdigest()
    assert Manifest.parse(read_manifest(tmp_path)) == manifest
    assert [file.path for file in manifest.files] == sorted(FILES, key=str.encode)
    for file in manifest.files:
        data = FILES[file.path]
        blocks = [data[start : start + BLOCK_SIZE] for start in range(0, len(data), BLOCK_SIZE)]
        leaves = b"".join(hashlib.sha256(b"\x00" + block).digest() for block in blocks)
        header = b"\x01sha256\x00" + BLOCK_SIZE.to_bytes(8, "big") + len(data).to_bytes(8, "big")
        assert (file.size, file.sha256) == (len(data), hashlib.sha256(data).hexdigest())
        assert file.blocks == hashlib.sha256(header + leaves).hexdigest()
        stored = tmp_path / "secure-train/blocks" / file.path
        assert file.has_block_file == stored.exists() == (len(data) > BLOCK_SIZE)
        if stored.exists():
            assert stored.read_bytes() == leaves


def test_identity_binds_names_modes_and_kind_and_nothing_else(tmp_path: Path) -> None:
    plain = make_artifact(tmp_path / "plain")
    assert make_artifact(tmp_path / "same").digest == plain.digest
    renamed = {("moved" if path == "empty" else path): data for path, data in FILES.items()}
    assert make_artifact(tmp_path / "renamed", renamed).digest != plain.digest
    assert Manifest("checkpoint", plain.files).digest != plain.digest


# One change of a good manifest at a time. The key is the place, the values are what stands there instead.
ODD: list[Any] = [
    None,
    True,
    -1,
    2**53,
    1.5,
    "",
    "x",
    [],
    {},
    [[]],
    {"a": 1},
    "0" * 64,
    65535,
    "\x1b[2J",
    "\ud800",
]
ODD_PATHS = ["../b", "/a", "a/../b", "a//b", "a\\b", "a\nb", "e\u0301", "\u202e", "x" * 256, "a/b/", "."]
ODD_PATHS += ["secure-train/manifest.json", "Secure-Train/x", "secure-train", "b", "b/c/d", "B/x"]
ODD_MODES = ["644", "0777", "4755", "0600", 420, "0o644"]
ODD_DIGESTS = [DIGEST.upper(), DIGEST[:-1], DIGEST + "0", "sha256:" + DIGEST, "g" * 64, DIGEST + "\n"]
PLACES: list[tuple[tuple[str | int, ...], list[Any]]] = [
    (("schema",), [*ODD, "urn:secure-train:manifest:v2"]),
    (
        ("kind",),
        [
            *(value for value in ODD if value != "x"),
            "Dataset",
            "data set",
            "dataset\n",
            "9",
            "a" * 41,
            "../x",
        ],
    ),
    (("block_size",), [*ODD, 1, 65537, "65536"]),
    (("files",), ODD),
    (("files", 0), [*ODD]),
    (("files", 0, "path"), [value for value in [*ODD, *ODD_PATHS] if value not in ("x", "0" * 64)]),
    (("files", 0, "size"), [value for value in ODD if value != 65535]),
    (("files", 0, "mode"), [*ODD, *ODD_MODES]),
    (("files", 0, "sha256"), [value for value in [*ODD, *ODD_DIGESTS] if value != "0" * 64]),
    (("files", 0, "blocks"), [value for value in [*ODD, *ODD_DIGESTS] if value not in (None, "0" * 64)]),
]
CHANGES = [
    (place, value) for place, values in PLACES for value in values if value != "x" or place[-1] != "path"
]


def changed(place: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    document = copy.deepcopy(GOOD)
    target: Any = document
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    return document


@pytest.mark.parametrize(("place", "value"), CHANGES, ids=lambda item: ascii(item)[:40])
def test_one_changed_field_is_refused(place: tuple[str | int, ...], value: Any) -> None:
    data = json.dumps(changed(place, value), separators=(",", ":"), sort_keys=True).encode()
    with refused("ST-A02", "/some/manifest.json"):
        Manifest.parse(data, where="/some/manifest.json")


def test_the_fuzz_table_is_not_refused_for_its_encoding() -> None:
    """The table proves something only if an allowed value in the same places passes in the same encoding."""
    for place, value in [
        (("kind",), "checkpoint"),
        (("files", 0, "size"), 65535),
        (("files", 0, "mode"), "0755"),
    ]:
        data = json.dumps(changed(place, value), separators=(",", ":"), sort_keys=True).encode()
        Manifest.parse(data)


@pytest.mark.parametrize(
    "place", [("schema",), ("kind",), ("files",), ("files", 0, "blocks"), ("files", 1, "size")]
)
def test_a_missing_or_an_unknown_field_is_refused(place: tuple[str | int, ...]) -> None:
    document = changed(place, None)
    target: Any = document
    for key in place[:-1]:
        target = target[key]
    del target[place[-1]]
    with refused("ST-A02"):
        Manifest.parse(encode(document))
    extra = copy.deepcopy(GOOD)
    target = extra
    for key in place[:-1]:
        target = target[key]
    target["unknown"] = 1
    with refused("ST-A02"):
        Manifest.parse(encode(extra))


@pytest.mark.parametrize(
    "files",
    [
        [entry("b"), entry("a")],
        [entry("a"), entry("a")],
        [entry("a"), entry("A")],
        [entry("a"), entry("a/b")],
        [entry("é"), entry("É")],
        [entry("\uffee"), entry("\U0001f600"), entry("z")],
        [entry("a"), "a"],
        [entry("a"), [entry("b")]],
    ],
)
def test_a_list_that_names_files_twice_or_out_of_order_is_refused(files: list[Any]) -> None:
    with refused("ST-A02"):
        Manifest.parse(encode(GOOD | {"files": files}))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"1",
        b'"text"',
        b"\xff",
        encode(GOOD) + b"\n",
        b" " + encode(GOOD),
        json.dumps(GOOD).encode(),
        encode(GOOD).replace(b'"kind"', b'"kind":"x","kind"'),
        encode(GOOD).replace(b"65536", b"65536.0"),
        encode(GOOD).replace(b'"a"', b'"\\u0061"'),
        encode(GOOD).replace(b"1099511627776", b"9" * 5000),
        b'{"files":' + b"[" * 100_000,
    ],
)
def test_anything_but_the_canonical_bytes_is_refused(data: bytes) -> None:
    with refused("ST-A02"):
        Manifest.parse(data)


@given(st.integers(0, len(encode(GOOD)) - 1), st.binary(min_size=0, max_size=3), st.integers(0, 3))
@settings(max_examples=300, deadline=None)
def test_edited_bytes_are_refused_or_another_manifest(offset: int, inserted: bytes, removed: int) -> None:
    """Any splice of the bytes is refused with ST-A02, or gives a manifest with exactly those bytes: another
    identity, which no signature over the old one covers.
    """
    good = encode(GOOD)
    data = good[:offset] + inserted + good[offset + removed :]
    try:
        manifest = Manifest.parse(data)
    except SecureTrainError as error:
        check_error(error, "ST-A02")
    else:
        assert manifest.data == data


def test_a_huge_stored_manifest_is_not_read(tmp_path: Path) -> None:
    make_artifact(tmp_path)
    with open(tmp_path / "secure-train/manifest.json", "r+b") as file:
        file.truncate(1 << 40)  # sparse: a terabyte
    with refused("ST-A02", "larger than"):
        read_manifest(tmp_path)


def test_a_folder_without_manifest_is_not_signed(tmp_path: Path) -> None:
    with refused("ST-A09", "secure-train sign"):
        read_manifest(tmp_path)
    with refused("ST-U01"):
        read_manifest(tmp_path / "none")
    (tmp_path / "secure-train").mkdir()
    (tmp_path / "secure-train/manifest.json").symlink_to("/etc/passwd")
    with refused("ST-U06", "link"):
        read_manifest(tmp_path)


NAMES = {"a.bin": b"1", "b \u00e9.txt": b"2", "c\u2603/d": b"", 'quo"te': b"3", "big": b"x" * 200_000}


def test_entries_are_written_as_the_general_encoder_writes_them(tmp_path: Path) -> None:
    """The manifest and the signed list of files, against canonical_json of what they say."""
    manifest = make_artifact(tmp_path, NAMES)
    assert manifest.data == canonical_json(json.loads(manifest.data))
    assert Manifest.parse(manifest.data) == manifest
    payload = oms.payload(tmp_path, "caf\u00e9", manifest)
    statement = json.loads(payload)
    assert payload == canonical_json(statement)
    assert oms.signed_files(statement, where="it") == {
        item["name"]: item["digest"] for item in statement["predicate"]["resources"]
    }


def test_the_quick_way_and_the_general_way_agree(tmp_path: Path) -> None:
    plain = make_artifact(tmp_path, {name: data for name, data in NAMES.items() if '"' not in name})
    assert claimed_kind(plain.data) == "dataset"
    assert Manifest.parse(plain.data).files == _strictly(plain.data, "it").files
    payload = oms.payload(tmp_path, "it", plain)
    assert oms.canonical_files(payload) == oms.signed_files(json.loads(payload), where="it")
    for old, new in (
        (b'"algorithm":"sha256"', b'"algorithm":"sha512"'),
        (b'"name":"a.bin"', b'"name":"a.bin","x":1'),
        (b'"name":"a.bin"', b'"name":"\\u0061.bin"'),
        (b'},{"algorithm"', b'} ,{"algorithm"'),
        (b'},{"algorithm"', b'}{"algorithm"'),
        (b'"allow_symlinks":false', b'"allow_symlinks":true'),
        (b'"subject":[{', b'"subject":[{},{'),
        (b'"_type"', b'"_type":1,"_type"'),
    ):
        assert old in payload
        assert oms.canonical_files(payload.replace(old, new, 1)) is None
    assert oms.canonical_files(payload + b" ") is None
    assert oms.canonical_files(b"\xff") is None
