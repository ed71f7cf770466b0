"""JSON as this project signs and reads it: canonical bytes out, strict parsing in.

Writing follows RFC 8785 for the values that we use: strings, booleans, null, lists, objects and integers
within +-(2^53-1). Floats are refused, because two programs may print one float differently; decimals and
larger integers travel as strings. Reading refuses what two parsers could read differently: duplicate keys,
floats, NaN, huge numbers, invalid UTF-8, lone surrogates; and what costs too much: size and depth. Standard
library only.
"""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from supplychain.errors import SecureTrainError

MAX_INTEGER = 2**53 - 1
MAX_DOCUMENT = 256 << 20  # bytes; a manifest of a million files is about 250 MB
MAX_DEPTH = 64  # far below what the interpreter's stack takes, whatever is done with the value later
_ESCAPED_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


def canonical_json(value: Any) -> bytes:
    """The RFC 8785 bytes of `value`. Raises ValueError (a bug of the caller's) for floats, sets, big integers
    and non-string keys.
    """
    return json.dumps(_ordered(value), ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def _ordered(value: Any) -> Any:
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("canonical JSON takes string keys only")
        # RFC 8785 sorts by UTF-16 code units. For ASCII that is the order of Python's strings.
        utf16 = None if "".join(value).isascii() else lambda key: key.encode("utf-16-be")
        return {key: _ordered(value[key]) for key in sorted(value, key=utf16)}
    if isinstance(value, (list, tuple)):
        return [_ordered(item) for item in value]
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, int) and abs(value) <= MAX_INTEGER:
        return value
    raise ValueError(
        f"canonical JSON takes no {type(value).__name__} ({value!r}); write decimals and big integers as "
        "strings"
    )


def parse_json(
    data: bytes, *, what: str, where: str | None = None, code: str = "ST-U02", limit: int = MAX_DOCUMENT
) -> Any:
    """Parse foreign bytes strictly. `what` names the document in the error, `where` its file; `code` is the
    error's code.
    """

    def refuse(reason: str) -> NoReturn:
        raise SecureTrainError(code, f"{what} is not JSON that can be accepted: {reason}", where=where)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]  # set.add in an `or`
            refuse(f"the key {repeated[:80]!r} stands twice in one object")
        return result

    def integer(digits: str) -> int:
        if len(digits) > 17 or abs(int(digits)) > MAX_INTEGER:
            refuse("a number is too large")
        return int(digits)

    if len(data) > limit:
        refuse(f"it is larger than {limit} bytes")
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=unique,
            parse_int=integer,
            parse_float=lambda digits: refuse(f"a number with a fraction or exponent ({digits:.40})"),
            parse_constant=lambda name: refuse(f"{name} is no JSON number"),
        )
    except UnicodeDecodeError as error:
        refuse(f"it is not UTF-8 (byte {error.start})")
    except RecursionError:
        refuse("it is nested too deeply")
    except json.JSONDecodeError as error:
        refuse(f"{error.msg} at line {error.lineno}, column {error.colno}")
    if _deeper_than(MAX_DEPTH, value):
        refuse("it is nested too deeply")
    if _ESCAPED_SURROGATE.search(data) and _has_lone_surrogate(value):
        refuse("a string holds half of a character (a lone surrogate)")
    return value


def _deeper_than(limit: int, value: Any) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            child
            for item in level
            if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
        ]
    return any(isinstance(item, (dict, list)) for item in level)


def _has_lone_surrogate(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False
