"""The ``inspect`` command: prints the contents of a file or a folder of files."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .output import FAILED, OK, say, say_facts, say_json, say_table, size

__all__ = ["add"]

# The keys of a description that are not printed in its list of facts.
_APART = ("file", "folder", "kind", "bytes", "tensors", "totals", "inputs", "outputs", "operators", "damaged")
_SHOWN = 40


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


def _run(given: argparse.Namespace) -> int:
    from .describe import describe, describe_folder

    path = Path(given.file)
    if path.is_dir():
        found = describe_folder(path)
        is_sound = not any("problem" in entry or entry["damaged"] for entry in found["files"])
        show = _say_folder
    else:
        found = describe(path)
        is_sound = not found["damaged"]
        show = _say_all if given.all else _say_file
    if given.json:
        say_json(found)
    else:
        show(found)
    return OK if is_sound else FAILED


def _say_folder(found: Mapping[str, Any]) -> None:
    say(f"{found['folder']}: {len(found['files'])} files")
    if "latest" in found:
        say_facts({"latest": found["latest"]})
    say()
    rows = [
        (entry["file"], size(entry["bytes"]), _step(entry), _state(entry), entry.get("kind", entry.get("problem", "")))
        for entry in found["files"]
    ]
    say_table(("file", "size", "updates", "checksums", "kind"), rows)


def _step(entry: Mapping[str, Any]) -> str:
    return str(entry.get("optimization_step", ""))


def _state(entry: Mapping[str, Any]) -> str:
    return "damaged" if "problem" in entry else str(entry["checksums"])


def _say_all(found: Mapping[str, Any]) -> None:
    _say_file(found, shown=len(found["tensors"]))


def _say_file(found: Mapping[str, Any], shown: int = _SHOWN) -> None:
    say(f"{found['file']}: {found['kind']}, {size(found['bytes'])}")
    facts = {name.replace("_", " "): value for name, value in found.items() if name not in _APART}
    if found["damaged"]:
        facts["damaged"] = found["damaged"]
    say_facts({name: "-" if value in (None, [], {}) else value for name, value in facts.items()})
    for side in ("inputs", "outputs"):
        if side in found:
            say()
            say_table((side[:-1], "dtype", "shape"), [_row(value) for value in found[side]])
    if "operators" in found:
        say()
        say_table(("operator", "nodes"), [(name, str(count)) for name, count in found["operators"].items()])
    tensors, totals = found["tensors"], found["totals"]
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
