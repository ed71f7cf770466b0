"""`secure-train explain CODE`."""

from __future__ import annotations

import subprocess
import sys

import click

from supplychain.cli.options import json_option
from supplychain.cli.output import Console
from supplychain.errors import CODES, SecureTrainError

_EXIT = {
    0: "done",
    1: "our bug",
    2: "usage or malformed input",
    3: "refused: integrity or signature",
    4: "refused: policy",
    5: "cannot decide, so refused",
    6: "trained, but not signed",
}


@click.command()
@click.argument("code", required=False)
@json_option
def command(code: str | None, as_json: bool) -> int:
    """Explain an error code, such as ST-A03; without one, list them all."""
    console = Console(as_json)
    if code is None:
        for name, entry in sorted(CODES.items()):
            console.text(f"{name}  exit {entry.exit_code}  {entry.title}")
        console.answer("explain", 0, codes={name: entry.title for name, entry in CODES.items()})
        return 0
    name = code.upper()
    if name not in CODES:
        return _ask_trainer(console, name)
    entry = CODES[name]
    console.text(
        f"{name}: {entry.title}\n\n{click.wrap_text(entry.text, 100)}\n\nexit code {entry.exit_code}: "
        f"{_EXIT[entry.exit_code]}"
    )
    console.answer("explain", 0, code=name, title=entry.title, text=entry.text, code_exit=entry.exit_code)
    return 0


def _ask_trainer(console: Console, name: str) -> int:
    """The trainer keeps the catalogue of its own codes; it is a program of its own, so it is asked as one."""
    done = subprocess.run(
        [sys.executable, "-I", "-m", "trainer", "explain", name], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise SecureTrainError(
            "ST-U03",
            f"there is no code {name!r}",
            expected="a code such as ST-A03",
            next_step="secure-train explain",
        )
    console.text(done.stdout.rstrip())
    console.answer("explain", 0, code=name, text=done.stdout)
    return 0
