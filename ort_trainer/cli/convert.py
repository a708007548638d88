"""The ``convert`` command: converts a checkpoint to another kind."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .output import OK, WRONG_USAGE, complain, say

_KINDS = ("trainer", "api", "upstream", "weights")


def add(commands: Any) -> None:
    """Adds the command to a parser."""
    parser = commands.add_parser(
        "convert",
        help="convert a checkpoint to another kind",
        description="Converts checkpoints of the trainer, of ort_trainer.api, of onnxruntime-training (upstream) and "
        "of the legacy trainer, safetensors files of weights, and folders of artifacts of upstream. Warnings list what "
        "the new file can't store.",
        epilog="Exit codes: 0 the file was written, 1 it was not, 2 wrong usage, or the target exists.",
    )
    parser.add_argument(
        "source",
        nargs="+",
        help="the checkpoint; for a legacy run with ZeRO, those of all ranks; or a folder of artifacts of upstream",
    )
    parser.add_argument("target", help="the file, or the folder, to write")
    parser.add_argument(
        "--to",
        choices=_KINDS,
        help="the kind of the target. Default: weights, a safetensors file with PyTorch's names, if the target ends in "
        ".safetensors; else upstream for a checkpoint of ort_trainer.api, api for one of upstream, trainer for others",
    )
    parser.add_argument(
        "--like",
        metavar="CHECKPOINT",
        help="checkpoint of the export that the target is for; needed for api, and for upstream from a trainer's",
    )
    parser.add_argument("--no-optimizer-state", action="store_true", help="leave out the optimizer's state")
    parser.add_argument("--force", action="store_true", help="replace the target if it exists")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    sources, target = [Path(name) for name in args.source], Path(args.target)
    if target.exists() and not args.force:
        complain(f"error: {str(target)!r} already exists: choose another target, or give --force")
        return WRONG_USAGE
    from .conversions import convert

    like = None if args.like is None else Path(args.like)
    written = convert(sources, target, like, args.to, with_optimizer=not args.no_optimizer_state)
    say(f"{target}: {written}")
    return OK
