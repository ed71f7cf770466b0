"""Canonical JSON against another implementation of RFC 8785, and the strict parser against hostile bytes."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
import rfc8785
from hypothesis import given, settings
from hypothesis import strategies as st

from supplychain.artifact import SecureTrainError, canonical_json, parse_json
from supplychain.artifact.canonical import MAX_DEPTH, MAX_INTEGER
from tests.artifact.support import refused

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-MAX_INTEGER, MAX_INTEGER) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=20,
)


@given(VALUES)
@settings(max_examples=200, deadline=None)
def test_bytes_equal_those_of_rfc8785(value: Any) -> None:
    assert canonical_json(value) == rfc8785.dumps(value)


@given(VALUES)
@settings(max_examples=100, deadline=None)
def test_what_is_written_is_read_back(value: Any) -> None:
    assert parse_json(canonical_json(value), what="it") == value


def test_keys_are_sorted_by_utf16_units_not_by_code_points() -> None:
    value = {"\ufb33": 1, "\U0001f600": 2, "a": 3}  # U+1F600 is D83D DE00 in UTF-16, before FB33
    assert canonical_json(value) == '{"a":3,"\U0001f600":2,"\ufb33":1}'.encode()
    assert canonical_json(value) == rfc8785.dumps(value)


@pytest.mark.parametrize(
    "value",
    [
        1.0,
        float("nan"),
        MAX_INTEGER + 1,
        -MAX_INTEGER - 1,
        {1: "a"},
        {"a", "b"},
        b"bytes",
        "\ud800",
        {"\udc00": 1},
    ],
)
def test_what_has_no_single_form_is_refused(value: Any) -> None:
    with pytest.raises(ValueError):
        canonical_json(value)
    with pytest.raises(ValueError):
        canonical_json([{"deep": value}])


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"a":1,"a":2}', "stands twice"),
        (b'{"a":1,"\\u0061":2}', "stands twice"),
        (b'[{"x":{"b":1,"b":1}}]', "stands twice"),
        (b"1.5", "fraction or exponent"),
        (b"1e3", "fraction or exponent"),
        (b"-0.0", "fraction or exponent"),
        (b"NaN", "no JSON number"),
        (b"[Infinity]", "no JSON number"),
        (b"-Infinity", "no JSON number"),
        (b"9007199254740992", "too large"),
        (b"-9007199254740992", "too large"),
        (b"9" * 100_000, "too large"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b"\xff\xfe{\x00}\x00", "not UTF-8"),
        (b'"\xed\xa0\x80"', "not UTF-8"),
        (b'"\\ud800"', "lone surrogate"),
        (b'{"\\uDFFF":1}', "lone surrogate"),
        (b'["\\\\ud800", "\\ud83d\\u0041"]', "lone surrogate"),
        (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), "too deeply"),
        (b"[" * 100_000, "too deeply"),
        (b'{"a":' * 100_000, "too deeply"),
        (b"", "line 1"),
        (b"{} {}", "line 1"),
        (b"[1,]", "line 1"),
        (b"{'a':1}", "line 1"),
        (b"[01]", "line 1"),
        (b'"\x01"', "control character"),
        (b"[1] // comment", "line 1"),
        (b"\x00", "line 1"),
    ],
)
def test_what_two_parsers_may_read_differently_is_refused(data: bytes, reason: str) -> None:
    with refused("ST-U02", "the request", reason, "request.json"):
        parse_json(data, what="the request", where="request.json")


def test_limits_are_exact() -> None:
    nested = b"[" * MAX_DEPTH + b"1" + b"]" * MAX_DEPTH
    assert parse_json(nested, what="it") is not None
    assert parse_json(str(MAX_INTEGER).encode(), what="it") == MAX_INTEGER
    assert parse_json(b"[1]", what="it", limit=3) == [1]
    with refused("ST-A02", "larger than 2 bytes"):
        parse_json(b"[1]", what="it", limit=2, code="ST-A02")


def test_an_escaped_pair_of_surrogates_is_one_character() -> None:
    assert parse_json(b'["\\ud83d\\ude00", "\\\\ud800"]', what="it") == ["\U0001f600", "\\ud800"]


@given(st.binary(max_size=200) | VALUES.map(lambda value: json.dumps(value).encode()))
@settings(max_examples=200, deadline=None)
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    with contextlib.suppress(SecureTrainError):
        canonical_json(parse_json(data, what="it"))  # whatever is accepted has a canonical form
