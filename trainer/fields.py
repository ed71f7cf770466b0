"""Configuration fields: declared once with default, range and documentation, read strictly, written
canonically.

Owns the rules by which text becomes typed values and back: unknown keys are refused with the nearest name,
decimals are exact (`decimal.Decimal`, never a float), and `to_document(from_document(x)) == x`. Standard
library only.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any, TypeVar

from trainer.errors import TrainerError

MAX_INTEGER = 2**53 - 1  # what every JSON reader keeps exact; larger integers travel as strings

T = TypeVar("T")


def option(
    default: Any,
    doc: str,
    *,
    choices: tuple[str, ...] = (),
    low: int | None = None,
    above: int | None = None,
    high: int | None = None,
    auto: bool = False,
    text: bool = False,
) -> Any:
    """A dataclass field. `low` and `high` are inclusive bounds, `above` an exclusive one; `auto` also takes
    the word "auto" in a configuration file (resolved before training); `text` writes an integer as a
    string.
    """
    metadata = {
        "doc": doc,
        "choices": choices,
        "low": low,
        "above": above,
        "high": high,
        "auto": auto,
        "text": text,
    }
    return dataclasses.field(default=default, metadata=metadata)


def section(kind: type[Any], doc: str) -> Any:
    """A nested dataclass of options."""
    return dataclasses.field(default_factory=kind, metadata={"doc": doc})


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The known name that `name` was probably meant to be."""
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return found[0] if found else None


def unknown(code: str, kind: str, name: str, names: Iterable[str], where: str | None = None) -> TrainerError:
    """The refusal of a name that does not exist."""
    names = sorted(names)
    guess = nearest(name, names)
    return TrainerError(
        code,
        f"there is no {kind} {name!r}",
        where=where,
        expected=f"one of: {', '.join(names)}",
        next_step=f"did you mean {guess!r}?" if guess else None,
    )


def from_document(kind: type[T], document: object, *, path: str = "", complete: bool = False) -> T:
    """Build `kind` from a nested mapping. `complete` refuses missing keys: a resolved configuration has
    all.
    """
    if not isinstance(document, Mapping):
        raise _bad(path or "configuration", "a table of keys", document)
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, kind))}
    values: dict[str, Any] = {}
    for key, value in document.items():
        here = f"{path}.{key}" if path else str(key)
        if key not in fields:
            raise unknown("ST-T01", "configuration key", here, _paths(fields, path), where=here)
        if dataclasses.is_dataclass(hints[key]):
            values[key] = from_document(typing.cast(Any, hints[key]), value, path=here, complete=complete)
        else:
            values[key] = _value(here, hints[key], fields[key].metadata, value)
    missing = [name for name in fields if name not in values]
    if complete and missing:
        raise TrainerError("ST-T02", f"the configuration lacks {missing[0]!r}", where=path or "configuration")
    return kind(**values)


def to_document(config: Any) -> dict[str, Any]:
    """The nested dictionary that `from_document` reads back exactly; no floats, decimals as plain strings."""
    document: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            document[field.name] = to_document(value)
        elif isinstance(value, Decimal):
            document[field.name] = _plain(value)
        else:
            document[field.name] = str(value) if field.metadata["text"] else value
    return document


def describe(kind: type[Any], path: str = "") -> Iterator[tuple[str, str, str]]:
    """(dotted name, default, documentation) of every option, in order."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        here = f"{path}.{field.name}" if path else field.name
        if dataclasses.is_dataclass(hints[field.name]):
            yield from describe(typing.cast(Any, hints[field.name]), here)
            continue
        default = "auto" if field.metadata["auto"] else field.default
        text = (
            _plain(default)
            if isinstance(default, Decimal)
            else str(default).lower()
            if isinstance(default, bool)
            else str(default)
        )
        choices = field.metadata["choices"]
        yield here, text, field.metadata["doc"] + (f" ({' | '.join(choices)})" if choices else "")


def _paths(fields: Mapping[str, Any], path: str) -> list[str]:
    return [f"{path}.{name}" if path else name for name in fields]


def _plain(value: Decimal) -> str:
    text = format(value, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def _value(path: str, kind: Any, rules: Mapping[str, Any], value: object) -> Any:
    if kind is bool:
        if not isinstance(value, bool):
            raise _bad(path, "true or false", value)
        return value
    if kind is str:
        if not isinstance(value, str):
            raise _bad(path, "a text", value)
        if rules["choices"] and value not in rules["choices"]:
            raise _bad(path, " or ".join(rules["choices"]), value)
        return value
    number: Any = _integer(path, value) if kind is int else _decimal(path, value)
    low, above, high = rules["low"], rules["above"], rules["high"]
    if (
        (low is not None and number < low)
        or (above is not None and number <= above)
        or (high is not None and number > high)
    ):
        bounds = [f"at least {low}"] * (low is not None) + [f"above {above}"] * (above is not None)
        raise _bad(path, " and ".join(bounds + [f"at most {high}"] * (high is not None)), value)
    if kind is int and not rules["text"] and abs(number) > MAX_INTEGER:
        raise _bad(path, f"an integer of at most {MAX_INTEGER}", value)
    return number


def _integer(path: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,20}", value):
        return int(value)
    raise _bad(path, "an integer", value)


def _decimal(path: str, value: object) -> Decimal:
    """Within 10^-40 and 10^20, so that written out plainly it can be read again."""
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]{1,60}(\.[0-9]{1,60})?([eE][-+]?[0-9]{1,2})?", value):
        value = Decimal(value)
    if isinstance(value, int) and not isinstance(value, bool):
        value = Decimal(value)
    if isinstance(value, Decimal) and value.is_finite():
        exponent = value.as_tuple().exponent
        if isinstance(exponent, int) and exponent >= -60 and (not value or -40 <= value.adjusted() <= 20):
            return value
    raise _bad(path, "a decimal number between 1e-40 and 1e20", value)


def _bad(path: str, expected: str, value: object) -> TrainerError:
    return TrainerError(
        "ST-T02",
        f"{path} has a value that cannot be used",
        where=path,
        expected=expected,
        found=f"{value!r:.60}",
    )
