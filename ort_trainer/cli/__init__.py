"""The ``ort-trainer`` command, also ``python -m ort_trainer``: one file per command, with its own imports.

Here are the parser, and the errors, warnings and exit codes of all commands.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

from ..core.unknown import meant
from . import convert, env, inspect, options, verify
from .output import FAILED, OK, complain, say, tolerate_any_terminal

__all__ = ["main", "parser"]

_COMMANDS = (inspect, verify, convert, env, options)
_EXPECTED = (OSError, ValueError, TypeError, RuntimeError, ImportError)
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: The arguments, without the program's name; None for the process's own.

    Returns:
        The exit code: 0 for success, 1 for failure, 130 after Ctrl-C. Wrong usage exits the process with 2.
    """
    tolerate_any_terminal()
    commands = parser()
    if not (sys.argv[1:] if arguments is None else arguments):
        commands.print_help()
        return OK
    parsed = commands.parse_args(arguments)
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning  # type: ignore[assignment]
        warnings.simplefilter("always", UserWarning)
        try:
            code: int = parsed.run(parsed)
        except KeyboardInterrupt:
            return _INTERRUPTED
        except Exception as error:  # a traceback is of no use on the command line
            kind = "" if isinstance(error, _EXPECTED) else f"{type(error).__name__}: "
            complain(f"error: {kind}{error}")
            return FAILED
    return code


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands, from which ``shtab`` makes completions for a shell."""
    program = _Parser(
        prog="ort-trainer",
        description="Inspects, verifies and converts the files of ort_trainer, and describes the installation.",
        epilog="Exit codes: 0 success, 1 failure, 2 wrong usage.",
    )
    program.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = program.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add(commands)
    return program


class _Parser(argparse.ArgumentParser):
    """A parser whose errors say what was probably meant."""

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if unknown:
            known = re.findall(r"[\w-]+", unknown[2])
            message = f"{message[: unknown.start()]}unknown {unknown[1]!r}: {meant(unknown[1], known, {})}"
        super().error(message)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        say(env.own_version())
        parser.exit()


def _show_warning(message: Warning | str, category: type[Warning], *_: Any) -> None:
    if issubclass(category, (UserWarning, RuntimeWarning)):
        complain(f"warning: {message}")
