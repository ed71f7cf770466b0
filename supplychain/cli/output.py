"""The one module that prints.

stdout carries the answer: text, or one JSON document with --json. stderr carries progress and errors. No
colour when piped or with NO_COLOR; ASCII where the encoding cannot do better; without a terminal one progress
line per 10 % or 30 seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any

import click

from supplychain.artifact.digest import Progress
from supplychain.errors import SecureTrainError, printable

if TYPE_CHECKING:  # every verb prints, and most need neither the gate nor what it imports
    from supplychain.gate import Decision
    from supplychain.lineage import Node

SCHEMA = "urn:secure-train:answer:v1"
_COLORS = {"pass": "green", "verified": "green", "fail": "red", "failed": "red", "not checked": "yellow"}
_EVERY = 30.0  # seconds between progress lines without a terminal


class Console:
    """Where one command's output goes. `as_json`: stdout gets exactly one JSON document, from `answer`."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")  # never die of a name that the terminal cannot show

    def say(self, line: str) -> None:
        """Progress, for people."""
        click.echo(line, err=True, color=_color(sys.stderr))

    def text(self, line: str = "") -> None:
        """A line of the answer; nothing with --json, where the document is the answer."""
        if not self.as_json:
            click.echo(line, color=_color(sys.stdout))

    def answer(self, verb: str, exit_code: int, **content: Any) -> None:
        """The document that --json promises: exactly one on stdout."""
        if self.as_json:
            document = {"schema": SCHEMA, "verb": verb, "exit_code": exit_code, **content}
            click.echo(json.dumps(document, indent=1, ensure_ascii=True))

    def error(self, error: SecureTrainError) -> None:
        head, *rest = str(error).split("\n")
        self.say("\n".join([click.style(head, fg="red", bold=True), *rest]))

    @contextmanager
    def progress(self, what: str) -> Iterator[Progress]:
        """A callback that takes counts of hashed bytes. Shows what was hashed and how fast, if it takes
        longer than a moment.
        """
        meter = _Meter(what, self.say)
        yield meter.add
        meter.done()


class _Meter:
    """Bytes and GB/s: on a terminal one line that is rewritten, else a line every 30 seconds."""

    def __init__(self, what: str, say: Any) -> None:
        self._what, self._say = what, say
        self._terminal = sys.stderr.isatty()
        self._begun = time.monotonic()
        self._shown = self._begun
        self._bytes = 0

    def add(self, count: int) -> None:
        self._bytes += count
        now = time.monotonic()
        if now - self._shown > (0.2 if self._terminal else _EVERY) and now - self._begun > 1:
            self._shown = now
            if self._terminal:
                click.echo(f"\r{self._line(now)}\x1b[K", err=True, nl=False)
            else:
                self._say(self._line(now))

    def done(self) -> None:
        if self._terminal and self._shown > self._begun:
            click.echo("\r\x1b[K", err=True, nl=False)

    def _line(self, now: float) -> str:
        gigabytes = self._bytes / 1e9
        return f"{self._what}: {gigabytes:.2f} GB, {gigabytes / (now - self._begun):.2f} GB/s"


def _color(stream: IO[Any]) -> bool | None:
    """None lets click decide (terminals only); False with NO_COLOR."""
    return False if os.environ.get("NO_COLOR") else None


def style(word: str) -> str:
    return click.style(word, fg=_COLORS.get(word))


def show_decision(console: Console, decision: Decision) -> None:
    """Every verdict on a line; below, each failure with what was expected, found, and what to do next."""
    width = max(len(verdict.rule) for verdict in decision.verdicts)
    for verdict in decision.verdicts:
        result = style(f"{verdict.result}") + " " * (11 - len(verdict.result))
        console.say(f"  {result} {verdict.rule:{width}}  {verdict.subject}: {verdict.note or 'ok'}")
    for error in decision.errors:
        console.error(error)


def show_tree(console: Console, node: Node) -> None:
    """The tree of what was verified, on stdout; errors follow on stderr."""
    for line in _tree(node, "", ""):
        console.text(line)
    for error in node.all_errors():
        console.error(error)


def _tree(node: Node, first: str, rest: str) -> Iterator[str]:
    note = f": {printable(node.note)}" if node.note else ""
    yield f"{first}{style(node.outcome)} {printable(node.title)}{note}"
    branch, corner, bar = ("├─ ", "└─ ", "│  ") if _unicode() else ("|- ", "`- ", "|  ")
    for index, child in enumerate(node.children):
        last = index == len(node.children) - 1
        yield from _tree(child, rest + (corner if last else branch), rest + ("   " if last else bar))


def _unicode() -> bool:
    """Whether the terminal shows lines of boxes. Python writes UTF-8 in the C locale too; the terminal may
    not.
    """
    locale = next((value for name in ("LC_ALL", "LC_CTYPE", "LANG") if (value := os.environ.get(name))), "")
    if locale in ("C", "POSIX"):
        return False
    try:
        "├─└│".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
