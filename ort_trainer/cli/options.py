"""The ``options`` command: prints the table of the trainer's options, or one of them in full."""

from __future__ import annotations

import argparse
import textwrap
from typing import TYPE_CHECKING, Any

from ..core.unknown import nearest
from .output import OK, WRONG_USAGE, complain, say, say_facts, say_json, say_table

if TYPE_CHECKING:
    from ..options.schema import ListedOption


def add(commands: Any) -> None:
    """Adds the command to a parser."""
    parser = commands.add_parser(
        "options",
        help="the trainer's options",
        description="Prints all options of the trainer, those of a section, or the full description of one.",
        epilog="Exit codes: 0 success, 2 unknown option.",
    )
    parser.add_argument("key", nargs="?", help="an option or a section, such as utils or utils.kernels")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from ..options.schema import listed_options

    all_options = listed_options()
    chosen = [option for option in all_options if args.key is None or _is_meant(option, args.key)]
    if not chosen:
        complain(f"error: unknown option {args.key!r}{_close(all_options, args.key)}")
        return WRONG_USAGE
    if args.json:
        say_json([option._asdict() for option in chosen])
    elif len(chosen) == 1:
        _say_whole(chosen[0])
    else:
        say_table(
            ("option", "default", "state", "type", "allowed"),
            [(o.key, repr(o.default), o.state, o.type, ", ".join(o.allowed)) for o in chosen],
            indent="",
        )
    return OK


def _is_meant(option: ListedOption, key: str) -> bool:
    return key in (option.key, *option.spellings) or option.key.startswith(f"{key}.")


def _close(all_options: list[ListedOption], key: str) -> str:
    """Returns a hint with similar keys, compared by their last part too, which is what people remember."""
    keys = [option.key for option in all_options]
    ends = {name.rpartition(".")[2]: name for name in keys}
    by_end = [ends[end] for end in nearest(key.rpartition(".")[2], ends, 3)]
    matches = list(dict.fromkeys([*nearest(key, keys, 3), *by_end]))[:3]
    return f" (did you mean {' or '.join(matches)}?)" if matches else ": 'ort-trainer options' lists all options"


def _say_whole(option: ListedOption) -> None:
    say(option.key)
    facts = {"type": option.type, "default": repr(option.default)}
    facts |= {"allowed": ", ".join(option.allowed)} if option.allowed else {}
    facts |= {"state": option.state}
    facts |= {"also as": ", ".join(option.spellings)} if option.spellings else {}
    say_facts(facts)
    say()
    for line in textwrap.wrap(option.meaning, 100):
        say(f"  {line}")
