"""Which licences are allowed? Allow, deny and review lists over SPDX expressions, with dated exceptions.

An expression is judged as a whole: of alternatives (`OR`) the best counts, of what applies together (`AND`)
the worst. What no list names, and what is not known, is for review: somebody looks, and writes an exception
with a reason and an end. Lists may end in `*` (`GPL-*`); a licence `WITH` an exception is looked up so
first, then without it.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from sbom.diff import identity
from sbom.document import Document, components

ALLOWED, REVIEW, DENIED = "allowed", "review", "denied"
_ORDER = (ALLOWED, REVIEW, DENIED)
_TOKEN = re.compile(r"\(|\)|[A-Za-z0-9.+:\-]+")
MAX_TOKENS = 2000


@dataclass(frozen=True)
class Exemption:
    """A component (purl without version, `*` at the end allowed) whose licence is accepted until a day."""

    component: str
    reason: str
    until: dt.date


@dataclass(frozen=True)
class Lists:
    """The lists. `unknown` is the verdict for a licence that is not known."""

    allow: Sequence[str] = ()
    deny: Sequence[str] = ()
    review: Sequence[str] = ()
    exemptions: Sequence[Exemption] = ()
    unknown: str = REVIEW


@dataclass(frozen=True)
class Verdict:
    """What the lists say of one component; `note` names the exception that changed it."""

    component: str
    licence: str
    verdict: str
    note: str = ""

    def as_dict(self) -> dict[str, str]:
        return dict(self.__dict__)


def judge(document: Document, lists: Lists, today: dt.date) -> list[Verdict]:
    """The verdict on every component, the gravest first."""
    root = document.get("metadata", {}).get("component")
    found = [_judge(item, lists, today) for item in components(document) if item is not root]
    return sorted(found, key=lambda item: (-_ORDER.index(item.verdict), item.component))


def _judge(item: Document, lists: Lists, today: dt.date) -> Verdict:
    name, licence = identity(item), _licence(item)
    verdict = judge_expression(licence, lists) if licence else lists.unknown
    if verdict != ALLOWED:
        for exemption in lists.exemptions:
            if fnmatchcase(name, exemption.component):
                if today < exemption.until:
                    return Verdict(name, licence, ALLOWED, f"until {exemption.until}: {exemption.reason}")
                return Verdict(name, licence, verdict, f"the exception ended on {exemption.until}")
    return Verdict(name, licence, verdict)


def _licence(item: Document) -> str:
    """What is declared as SPDX; empty if a name only, or nothing."""
    found = [one.get("expression") or one.get("license", {}).get("id") for one in item.get("licenses", [])]
    known = [f"({one})" for one in found if one]
    return " AND ".join(known) if known and len(known) == len(found) else ""


def judge_expression(expression: str, lists: Lists) -> str:
    """The verdict on an SPDX expression; one that cannot be read is for review."""
    tokens = _TOKEN.findall(expression)
    if not tokens or len(tokens) > MAX_TOKENS or re.sub(r"\s+", "", expression) != "".join(tokens):
        return REVIEW
    try:
        parser = _Parser(tokens, lists)
        verdict = parser.alternatives()
        return _ORDER[verdict] if parser.done() else REVIEW
    except (IndexError, RecursionError):
        return REVIEW


class _Parser:
    """OR binds weaker than AND, AND weaker than WITH; verdicts are their places in `_ORDER`."""

    def __init__(self, tokens: list[str], lists: Lists) -> None:
        self._tokens, self._lists, self._at = tokens, lists, 0

    def done(self) -> bool:
        return self._at == len(self._tokens)

    def _next(self, word: str) -> bool:
        if not self.done() and self._tokens[self._at].upper() == word:
            self._at += 1
            return True
        return False

    def alternatives(self) -> int:
        verdict = self._together()
        while self._next("OR"):
            verdict = min(verdict, self._together())
        return verdict

    def _together(self) -> int:
        verdict = self._one()
        while self._next("AND"):
            verdict = max(verdict, self._one())
        return verdict

    def _one(self) -> int:
        if self._next("("):
            verdict = self.alternatives()
            if not self._next(")"):
                raise IndexError
            return verdict
        name = self._tokens[self._at]
        self._at += 1
        if self._next("WITH"):
            whole = f"{name} WITH {self._tokens[self._at]}"
            self._at += 1
            return self._look_up([whole, name])
        return self._look_up([name])

    def _look_up(self, names: Sequence[str]) -> int:
        for name in names:
            for verdict in self._lists_of(name):
                return _ORDER.index(verdict)
        return _ORDER.index(REVIEW)

    def _lists_of(self, name: str) -> Iterator[str]:
        """Denied before review before allowed, so that a wide list never hides a strict one."""
        for verdict, patterns in (
            (DENIED, self._lists.deny),
            (REVIEW, self._lists.review),
            (ALLOWED, self._lists.allow),
        ):
            if any(_matches(name.lower(), pattern.lower()) for pattern in patterns):
                yield verdict


def _matches(name: str, pattern: str) -> bool:
    """`GPL-*` is no word about `GPL-2.0-only WITH ...`; the licence alone is looked up after it."""
    return (" with " in name) == (" with " in pattern) and fnmatchcase(name, pattern)
