"""What the programs of this package share: one answer on stdout, errors to people or to a program."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NoReturn

from supplychain.artifact import SecureTrainError, canonical_json, write_durably


def run_command(work: Callable[[], dict[str, object]], failure: Path | None) -> int:
    """Print what `work` returns as JSON; an error goes to stderr, or into the file `failure`, whose writer
    shows it. Returns the exit status.
    """
    signal.signal(signal.SIGTERM, _terminated)
    try:
        print(json.dumps(work()))
        return 0
    except SecureTrainError as error:
        problem = error
    except OSError as error:
        problem = SecureTrainError(
            "ST-U04",
            f"the dataset cannot be written: {error.strerror}",
            where=str(error.filename) if error.filename else None,
        )
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from where it was", file=sys.stderr)
        return 128 + signal.SIGINT
    if failure:
        write_durably(failure, canonical_json(problem.as_dict()))
    else:
        print(problem, file=sys.stderr)
    return problem.exit_code


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)  # runs the clean-up on its way out
