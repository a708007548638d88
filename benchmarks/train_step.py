"""Full training steps (forward, backward, AdamW) of ORTTrainer and ORTModule against PyTorch eager and torch.compile.

The contenders take turns, each in its own process (see turns.py). One of them takes part only if installed: the
ORTTrainer of onnxruntime-training 1.16.3 (make setup-legacy; legacy_step.py), in full precision and without
accumulation.

    python benchmarks/train_step.py                       # everything; two hours on two cores
    python benchmarks/train_step.py --quick               # less of everything; five minutes
    python benchmarks/train_step.py --rows mlp lstm       # these rows only
    python benchmarks/train_step.py --write               # and writes results/<version>.json, which make docs draws
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from contenders import COMPILE, CONTENDERS, EAGER, FASTEST, FLOOR, LEGACY, MODULE, ONNX, OURS
from floor import floor_training
from step_rows import HALVES, ROWS, Row, kernels_of, ort_training
from turns import Contender, Result, Training, measure, ratio, serve
from versions import ENGINES, processor, versions

ROOT = Path(__file__).parents[1]
LEGACY_PYTHON = ROOT / ".legacy" / "bin" / "python"
RESULTS = ROOT / "benchmarks" / "results"
PACKAGES = ("torch", *ENGINES, "onnx", "onnxscript", "transformers")

QUICK = (EAGER, MODULE, OURS)
LARGE = ("bert-base", "gpt2-base", "resnet50", "bert-lora", "gpt2-lora")
SLOW_ROWS = (*LARGE, "bert-no-dropout", "gpt2-no-dropout", "bert-accumulation")
# PyTorch itself takes five seconds per step if the processor has no fp16 arithmetic: see precisions.py.
NOT_HERE = ("bert-fp16",)
# With fewer rounds, dropout may hide that a loss falls.
ENOUGH_ROUNDS = 3


def eager_training(row: Row, compiled: bool = False, as_module: bool = False) -> Training:
    """Returns the training of a row by PyTorch's own loop."""
    import torch
    from step_models import make_task

    task = make_task(row.model, row.dropout)
    task.model.train()
    if as_module:
        from ort_trainer import ORTModule

        task = dataclasses.replace(task, model=ORTModule(task.model))
    optimizer = torch.optim.AdamW(task.model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    compute = torch.compile(task.loss) if compiled else task.loss
    dtype = getattr(torch, HALVES.get(row.precision, "bfloat16"))
    done = 0

    def step() -> torch.Tensor:
        nonlocal done
        with torch.autocast("cpu", dtype, enabled=row.precision in HALVES):
            loss = compute(task.batch)
        (loss / row.accumulation if row.accumulation > 1 else loss).backward()
        done += 1
        if done % row.accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return Training(step)


def serve_contender(name: str, row: Row) -> None:
    """Runs a contender's process."""
    import torch  # noqa: F401 - imports are no part of the start-up that is measured

    if name in (EAGER, COMPILE, MODULE):
        serve(functools.partial(eager_training, row, name == COMPILE, name == MODULE))
        return
    from ort_trainer import ORTTrainer  # noqa: F401

    if name == FLOOR:
        serve(functools.partial(floor_training, row))
        return
    serve(functools.partial(ort_training, row, kernels_of(name)))


def takes_part(name: str, row: Row) -> bool:
    """Returns whether a contender is installed and supports a row."""
    if name == ONNX:
        return not row.utils  # leaving out padding needs PyTorch's kernels
    return name != LEGACY or (LEGACY_PYTHON.exists() and row.precision == "fp32" and row.accumulation == 1)


def contender(name: str, row: str) -> Contender:
    """Returns how a contender's process is started."""
    if name == LEGACY:
        script = str(ROOT / "benchmarks" / "legacy_step.py")
        without = () if ROWS[row].dropout else ("--no-dropout",)
        return Contender((str(LEGACY_PYTHON), script, ROWS[row].model, *without), {"PYTHONPATH": ""})
    return Contender((sys.executable, __file__, "--serve", name, "--rows", row))


def figures(row: Row, results: Mapping[str, Result], died: Mapping[str, str]) -> dict[str, Any]:
    """Returns the results of a row for the file: milliseconds, megabytes and seconds, by contender."""
    found: dict[str, Any] = {}
    for name, result in results.items():
        first, last = result.losses[0], result.losses[-1]
        if len(result.rounds) >= ENOUGH_ROUNDS and not last < first and name != FLOOR:
            print(f"{name}, {row.label}: its loss did not fall, from {first:.3g} to {last:.3g}", flush=True)
        found[name] = {
            "ms": float(f"{result.median * 1e3:.4g}"),
            "speed": [round(value, 3) for value in ratio(results[EAGER], result)],
            "MB": round(result.peak),
            "starts": [round(seconds, 1) for seconds in result.starts],
        }
    found |= {name: {"failed": why[:200]} for name, why in died.items()}
    return {"title": row.title, "label": row.label, "contenders": found}


def write_results(where: str, rows: Mapping[str, Any]) -> None:
    """Writes rows into the file of this version; its other rows stay, and so do a row's other contenders."""
    from ort_trainer import __version__

    path = RESULTS / f"{__version__}.json"
    known = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else {}
    ordered = {name: {**(rows.get(name) or known[name])} for name in ROWS if name in rows or name in known}
    for name, row in ordered.items():
        earlier = known.get(name, row)["contenders"]
        figures_of = {**earlier, **row["contenders"]}
        if earlier.keys() - row["contenders"].keys():  # whose figures are ratios to this one's
            figures_of[EAGER] = earlier[EAGER]
        row["contenders"] = {each: figures_of[each] for each in CONTENDERS if each in figures_of}
    content = {"date": f"{datetime.date.today()}", "where": where, "rows": ordered}
    text = re.sub(
        r"\[\s+([^][]*?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", json.dumps(content, indent=1)
    )
    path.write_text(text + "\n", encoding="utf-8")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), help=f"by default all but {', '.join(NOT_HERE)}")
    parser.add_argument("--rounds", type=int, help="blocks of steps of every contender; 8, or 3 with --quick")
    parser.add_argument("--steps", type=int, help="steps of a block, instead of the row's own number")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, help="all by default")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"three rounds and one start of {', '.join(QUICK)}; by default not the rows {', '.join(SLOW_ROWS)}",
    )
    parser.add_argument("--write", action="store_true", help=f"write into {RESULTS.relative_to(ROOT)}")
    parser.add_argument("--serve", choices=CONTENDERS, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    if arguments.serve:
        serve_contender(arguments.serve, ROWS[arguments.rows[0]])
        return
    wanted: Sequence[str] = arguments.contenders or (QUICK if arguments.quick else CONTENDERS)
    rounds = arguments.rounds or (3 if arguments.quick else 8)
    where = f"Python {platform.python_version()}, {versions(PACKAGES)}; {os.cpu_count()} cores{processor()}."
    print(where, flush=True)
    skipped = (*NOT_HERE, *(SLOW_ROWS if arguments.quick else ()))
    for name in arguments.rows or [name for name in ROWS if name not in skipped]:
        row = ROWS[name]
        contenders = {
            each: contender(each, name)
            for each in CONTENDERS
            if takes_part(each, row) and (each in wanted or each == EAGER)
        }
        starts = 1 if arguments.quick and FASTEST not in contenders else 2  # the second one knows the choice
        results, died = measure(contenders, arguments.steps or row.steps, rounds, starts, needed=EAGER)
        found = figures(row, results, died)
        for each, figure in found["contenders"].items():
            print(f"{row.label}, {each}: {figure}", flush=True)
        if arguments.write:
            write_results(where, {name: found})


if __name__ == "__main__":
    main()
