"""JSON as this project signs and reads it: canonical bytes out, strict parsing in.

Writing follows RFC 8785 for the values that we use: strings, booleans, null, lists, objects and integers
within +-(2^53-1). Floats are refused, because two programs may print one float differently; decimals and
larger integers travel as strings. Reading refuses what two parsers could read differently: duplicate keys,
floats, NaN, huge numbers, invalid UTF-8. Standard library only.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from supplychain.errors import SecureTrainError

MAX_INTEGER = 2**53 - 1
MAX_DOCUMENT = 256 << 20  # bytes; a manifest of a million files is about 250 MB


def canonical_json(value: Any) -> bytes:
    """The RFC 8785 bytes of `value`. Raises ValueError (a bug of the caller's) for floats, sets, big integers
    and non-string keys.
    """
    return json.dumps(_ordered(value), ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def _ordered(value: Any) -> Any:
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("canonical JSON takes string keys only")
        # RFC 8785 sorts by UTF-16 code units.
        return {key: _ordered(value[key]) for key in sorted(value, key=lambda key: key.encode("utf-16-be"))}
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


def parse_json(data: bytes, *, what: str, code: str = "ST-U02", limit: int = MAX_DOCUMENT) -> Any:
    """Parse foreign bytes strictly. `what` names the document in the error, `code` is the error's code."""

    def refuse(reason: str) -> NoReturn:
        raise SecureTrainError(code, f"{what} is not JSON that can be accepted: {reason}")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen: set[str] = set()
            repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]  # set.add in an `or`
            refuse(f"the key {repeated!r:.80} stands twice in one object")
        return result

    def integer(digits: str) -> int:
        if len(digits) > 17 or abs(int(digits)) > MAX_INTEGER:
            refuse("a number is too large")
        return int(digits)

    if len(data) > limit:
        refuse(f"it is larger than {limit} bytes")
    try:
        return json.loads(
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
