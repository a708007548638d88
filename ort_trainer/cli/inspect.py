"""The ``inspect`` command: prints the contents of a file or a folder of files."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .output import FAILED, OK, say, say_facts, say_json, say_table, size

# The keys of a description that are not printed in its list of facts.
_APART = ("file", "folder", "kind", "bytes", "tensors", "totals", "inputs", "outputs", "operators", "damaged")
_SHOWN = 40  # tensors printed without --all


def add(commands: Any) -> None:
    """Adds the command to a parser."""
    parser = commands.add_parser(
        "inspect",
        help="print the contents of a checkpoint, an artifact, an ONNX model or a folder of them",
        description="Prints the contents of a file, or of each file in a folder: checkpoints of the trainer, of "
        "ort_trainer.api, of onnxruntime-training and of the legacy trainer, ONNX models, safetensors files, and "
        "exports in the cache. It executes nothing in a file, and reads tensors in pieces to check their checksums.",
        epilog="Exit codes: 0 success, 1 the file is damaged or of unknown kind.",
    )
    parser.add_argument("file", help="a file or a folder")
    parser.add_argument("--all", action="store_true", help=f"print all tensors, not only the first {_SHOWN}")
    parser.add_argument("--json", action="store_true", help="print JSON, with all tensors")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from .describe import describe, describe_folder

    path = Path(args.file)
    if path.is_dir():
        description = describe_folder(path)
        is_sound = not any("problem" in entry or entry["damaged"] for entry in description["files"])
        show = _say_folder
    else:
        description = describe(path)
        is_sound = not description["damaged"]
        show = _say_all if args.all else _say_file
    if args.json:
        say_json(description)
    else:
        show(description)
    return OK if is_sound else FAILED


def _say_folder(description: Mapping[str, Any]) -> None:
    say(f"{description['folder']}: {len(description['files'])} files")
    if "latest" in description:
        say_facts({"latest": description["latest"]})
    say()
    rows = [
        (entry["file"], size(entry["bytes"]), _step(entry), _state(entry), entry.get("kind", entry.get("problem", "")))
        for entry in description["files"]
    ]
    say_table(("file", "size", "updates", "checksums", "kind"), rows)


def _step(entry: Mapping[str, Any]) -> str:
    return str(entry.get("optimization_step", ""))


def _state(entry: Mapping[str, Any]) -> str:
    """Returns the state of a file's checksums."""
    return "damaged" if "problem" in entry else str(entry["checksums"])


def _say_all(description: Mapping[str, Any]) -> None:
    _say_file(description, shown=len(description["tensors"]))


def _say_file(description: Mapping[str, Any], shown: int = _SHOWN) -> None:
    say(f"{description['file']}: {description['kind']}, {size(description['bytes'])}")
    facts = {name.replace("_", " "): value for name, value in description.items() if name not in _APART}
    if description["damaged"]:
        facts["damaged"] = description["damaged"]
    say_facts({name: "-" if value in (None, [], {}) else value for name, value in facts.items()})
    for side in ("inputs", "outputs"):
        if side in description:
            say()
            say_table((side[:-1], "dtype", "shape"), [_row(value) for value in description[side]])
    if "operators" in description:
        say()
        say_table(("operator", "nodes"), [(name, str(count)) for name, count in description["operators"].items()])
    tensors, totals = description["tensors"], description["totals"]
    if tensors:
        say()
        rows = [(*_row(tensor), size(tensor["bytes"])) for tensor in tensors[:shown]]
        say_table(("tensor", "dtype", "shape", "size"), rows)
        if len(tensors) > shown:
            say(f"  and {len(tensors) - shown} more: --all prints them")
        say()
        say(f"  {totals['tensors']} tensors with {totals['elements']} elements, {size(totals['bytes'])}")


def _row(value: Mapping[str, Any]) -> tuple[str, str, str]:
    shape = value["shape"]
    sizes = "not known" if shape is None else "[" + ", ".join("?" if n is None else str(n) for n in shape) + "]"
    return value["name"], str(value["dtype"]), sizes
