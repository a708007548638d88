"""The command ``verify``: whether files are as they were written."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .output import FAILED, OK, WRONG_USAGE, complain, say, say_json

__all__ = ["add"]


def add(commands: Any) -> None:
    """Adds the command to a parser."""
    parser = commands.add_parser(
        "verify",
        help="whether checkpoints are as they were written",
        description="Compares files with the checksums in them, and says which tensors are damaged. Of files without "
        "checksums it reads what can be read; they count as good unless --require-checksums is given.",
        epilog="Exit codes: 0 all are good, 1 one is damaged or of no known kind, 2 wrong usage, one is missing, or "
        "there is none in the folders.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a file, or a folder for all that are in it")
    parser.add_argument("--require-checksums", action="store_true", help="a file without checksums is not good")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(given: argparse.Namespace) -> int:
    missing = [name for name in given.files if not Path(name).exists()]
    if missing:
        complain(f"error: there is no file {missing[0]!r}")
        return WRONG_USAGE
    paths = _files(given.files)
    if not paths:
        complain(f"error: there is nothing to verify in {', '.join(map(repr, given.files))}")
        return WRONG_USAGE
    found = []
    for path in paths:
        found.append(_verified(path, given.require_checksums))
        if not given.json:
            said = found[-1]
            say(f"{said['file']}: {said['state']}{', ' if said['details'] else ''}{said['details']}")
    if given.json:
        say_json(found)
    return OK if all(entry["good"] for entry in found) else FAILED


def _files(names: list[str]) -> list[Path]:
    from .formats import files_of

    return [path for name in names for path in (files_of(Path(name)) if Path(name).is_dir() else [Path(name)])]


def _verified(path: Path, needs_checksums: bool) -> dict[str, Any]:
    """Returns what there is to say about a file."""
    from .describe import check, describe

    try:
        state, damaged = check(path)
        if state == "none":
            describe(path)  # which reads all that such a file says about itself
    except (ValueError, ImportError, OSError) as error:
        return {"file": str(path), "good": False, "state": "damaged", "damaged": [], "details": str(error)}
    details = ", ".join(damaged)
    if state == "none":
        state, details = "no checksums", "so that damage to tensors can't be seen"
    good = state == "ok" or (state == "no checksums" and not needs_checksums)
    return {"file": str(path), "good": good, "state": state, "damaged": damaged, "details": details}
