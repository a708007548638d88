"""Prints lines, tables and JSON for the commands, safely for any terminal."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

OK, FAILED, WRONG_USAGE = 0, 1, 2
"""Exit codes; argparse itself exits with the last one."""


def tolerate_any_terminal() -> None:
    """Makes characters that the terminal can't encode print as escapes."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def say(line: str = "") -> None:
    """Prints a line.

    It escapes unprintable characters, because names come from files and could control the terminal.
    """
    _write(sys.stdout, line)


def complain(message: str) -> None:
    """Prints a message to stderr, on one line."""
    _write(sys.stderr, " ".join(message.split()))


def _write(stream: TextIO, line: str) -> None:
    try:
        stream.write("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line) + "\n")
        stream.flush()
    except BrokenPipeError:
        # The reader has closed the pipe. Python would report an error when it flushes at exit, so redirect to null.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def say_json(value: Any) -> None:
    """Prints a value as ASCII JSON; numbers that are not finite become null."""
    for line in json.dumps(_with_finite_numbers(value), indent=2, allow_nan=False).splitlines():
        say(line)


def _with_finite_numbers(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _with_finite_numbers(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_finite_numbers(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def say_facts(facts: Mapping[str, Any], indent: str = "  ") -> None:
    """Prints names and values, one per line, with the values aligned."""
    width = max(map(len, facts), default=0)
    for name, value in facts.items():
        if isinstance(value, Mapping):
            say(f"{indent}{name}")
            say_facts(value, indent + "  ")
        else:
            value = ("yes" if value else "no") if isinstance(value, bool) else value
            text = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            say(f"{indent}{name:<{width}}  {text}".rstrip())


def say_table(head: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "  ") -> None:
    """Prints a table with aligned columns; on a terminal, its lines end with an ellipsis where they are too long."""
    lines = [head, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    for line in lines:
        text = (indent + "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True))).rstrip()
        say(text if len(text) <= limit else f"{text[: limit - 3]}...")


def size(count: int) -> str:
    """Returns a human-readable number of bytes: in powers of 1000, with three digits."""
    amount, unit = float(count), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if amount < 999.5:  # from there on, three digits round to 1000
            break
        amount, unit = amount / 1000, larger
    return f"{count} bytes" if unit == "bytes" else f"{amount:.3g} {unit}"
