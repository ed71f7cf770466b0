"""`secure-train`: parses, calls, renders. One small file for each group of verbs, imported only when it is
asked for.

Owns how a command ends: SecureTrainError becomes one error text (or one JSON document) and its exit code,
Ctrl-C becomes 130, and only a bug of ours shows a traceback.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import traceback
from types import FrameType
from typing import Any, NoReturn

import click

from supplychain.errors import BUG, CODES, USAGE, SecureTrainError

# Verb -> (module below supplychain.cli, one line for --help). Kept here so that --help imports nothing.
VERBS = {
    "quickstart": ("quickstart", "Train a tiny signed Llama on the embedded corpus, end to end."),
    "run": ("run", "Verify every input, then train, then sign and attest."),
    "verify": ("verify", "Check a run, an artifact or a policy, offline, to the last input."),
    "sign": ("sign", "Make the manifest of a folder and sign it."),
    "inspect": ("inspect", "Show what an artifact is and who signed it, without judging."),
    "generate": ("generate", "Write text with a verified checkpoint."),
    "data": ("data", "Prepare datasets: tokenize, shard, sign."),
    "env": ("env", "Build and verify training environments."),
    "policy": ("policy", "Make, sign and show policies."),
    "keys": ("keys", "Make, list and trust keys."),
    "sbom": ("sbom", "Write, check and compare bills of materials."),
    "doctor": ("doctor", "Show what this machine has and what is missing."),
    "explain": ("explain", "Explain an error code."),
}


class _Verbs(click.Group):
    """A group that imports a verb's module when the verb is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(f"supplychain.cli.{VERBS[cmd_name][0]}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], VERBS, 1)
            raise click.UsageError(
                f"There is no verb {args[0]!r}." + (f" Did you mean {near[0]!r}?" if near else ""), ctx
            )
        return super().resolve_command(ctx, args)


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="secure-train")
def cli() -> None:
    """Train Llama models on verified inputs only, and sign what comes out.

    Exit codes: 0 done, 1 our bug, 2 usage or malformed input, 3 refused (integrity or signature), 4 refused
    (policy), 5 cannot decide (refused as well), 6 trained but not signed; otherwise the trainer's own, 128+n
    on a signal.
    """


def main() -> None:
    """The entry point: run a command and exit with its code."""
    as_json = "--json" in sys.argv
    for number in (signal.SIGTERM, signal.SIGHUP):  # like Ctrl-C: children are ended, temporary files removed
        signal.signal(number, _terminated)
    sys.exit(invoke(sys.argv[1:], as_json=as_json))


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def invoke(arguments: list[str], *, as_json: bool = False) -> int:
    """Run one command line and give its exit code; every way to end passes here."""
    from supplychain.cli.output import Console

    console = Console(as_json)
    try:
        result: Any = cli.main(arguments, prog_name="secure-train", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except SecureTrainError as error:
        console.error(error)
        console.answer(_verb(arguments), error.exit_code, error=error.as_dict())
        return error.exit_code
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    except (click.Abort, KeyboardInterrupt):
        console.say("interrupted; what was finished before stands")
        console.answer(_verb(arguments), 130, error=None)
        return 130
    except click.ClickException as error:
        error.show()
        console.answer(_verb(arguments), USAGE, error={"code": "ST-U03", "what": error.format_message()})
        return USAGE
    except BrokenPipeError:  # the reader of our output went away
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BUG
    except Exception:
        traceback.print_exc()
        error_ = SecureTrainError(
            "ST-B01", CODES["ST-B01"].title, next_step="report it with the traceback above"
        )
        console.error(error_)
        console.answer(_verb(arguments), BUG, error=error_.as_dict())
        return BUG


def _verb(arguments: list[str]) -> str:
    return next((argument for argument in arguments if not argument.startswith("-")), "")


def version() -> str:
    from importlib import metadata  # late: it costs as much as everything else of --help

    return metadata.version("secure-train")
