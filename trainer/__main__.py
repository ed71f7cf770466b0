"""What torchrun starts: `python -m trainer PLAN --plan-sha256 HEX`, and the two small programs beside it.

Owns the dispatch and how failures leave the process: one error text on stderr, `report/rank-K.json` for the
launcher (torchrun turns every exit code into 1), and a traceback only for a bug of ours.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence

from supplychain.artifact import SecureTrainError
from trainer.errors import CODES, USAGE, TrainerError
from trainer.fields import unknown

HELP = """\
usage: python -m trainer PLAN --plan-sha256 HEX   train as the plan says; started by torchrun, once per rank
       python -m trainer config [OPTIONS]         resolve a configuration and print it as JSON
       python -m trainer generate [OPTIONS]       sample text from a checkpoint
       python -m trainer explain [CODE]           what an error code of the trainer means

Each has its own --help.
"""


def main(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP, end="", file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else USAGE
    # Imported where needed: the gate calls `config` before it allows torch to be loaded.
    try:
        if arguments[0] == "config":
            from trainer import config

            return config.main(arguments[1:])
        if arguments[0] == "generate":
            from trainer import generate

            return generate.main(arguments[1:])
        if arguments[0] == "explain":
            return explain(arguments[1:])
        from trainer import loop

        return loop.main(arguments)
    except (TrainerError, SecureTrainError) as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code


def explain(arguments: Sequence[str]) -> int:
    """Print the catalogue, or one entry of it."""
    for code in arguments or sorted(CODES):
        if code not in CODES:
            raise unknown("ST-T03", "error code of the trainer", code, CODES)
        entry = CODES[code]
        line = f"{code}: {entry.title} (exit code {entry.exit_code})"
        print(f"{line}\n\n{textwrap.fill(entry.text, 100)}" if arguments else line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
