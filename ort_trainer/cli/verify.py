"""The ``verify`` command: checks files against their checksums."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .output import FAILED, OK, WRONG_USAGE, complain, say, say_json


def add(commands: Any) -> None:
    """Adds the command to a parser."""
    parser = commands.add_parser(
        "verify",
        help="check checkpoints against their checksums",
        description="Checks files against their checksums, and lists damaged tensors. In files without checksums it "
        "checks the structure; they pass unless --require-checksums is given.",
        epilog="Exit codes: 0 all files pass, 1 a file is damaged or of unknown kind, 2 wrong usage, a file is "
        "missing, or a folder has no files to verify.",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="a file, or a folder for all files in it")
    parser.add_argument("--require-checksums", action="store_true", help="fail for files without checksums")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    missing = [name for name in args.files if not Path(name).exists()]
    if missing:
        complain(f"error: file {missing[0]!r} does not exist")
        return WRONG_USAGE
    paths = _files(args.files)
    if not paths:
        complain(f"error: no files to verify in {', '.join(map(repr, args.files))}")
        return WRONG_USAGE
    results = []
    for path in paths:
        results.append(_verified(path, args.require_checksums))
        if not args.json:
            result = results[-1]
            say(f"{result['file']}: {result['state']}{', ' if result['details'] else ''}{result['details']}")
    if args.json:
        say_json(results)
    return OK if all(entry["good"] for entry in results) else FAILED


def _files(names: list[str]) -> list[Path]:
    from .describe import files_of

    return [path for name in names for path in (files_of(Path(name)) if Path(name).is_dir() else [Path(name)])]


def _verified(path: Path, needs_checksums: bool) -> dict[str, Any]:
    """Returns the result for a file."""
    from .describe import check, describe

    try:
        state, damaged = check(path)
        if state == "none":
            describe(path)  # reads the whole structure of the file
    except (ValueError, ImportError, OSError) as error:
        return {"file": str(path), "good": False, "state": "damaged", "damaged": [], "details": str(error)}
    details = ", ".join(damaged)
    if state == "none":
        state, details = "no checksums", "so damage to tensors can't be detected"
    good = state == "ok" or (state == "no checksums" and not needs_checksums)
    return {"file": str(path), "good": good, "state": state, "damaged": damaged, "details": details}
