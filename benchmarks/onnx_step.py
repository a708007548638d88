"""Training steps of ONNX models against those of the PyTorch models that they were exported from, with start-up times.

The contenders are processes of their own that take turns (turns.py): the PyTorch model, the file that the older
exporter of torch.onnx wrote, and the newer one's.

    python benchmarks/onnx_step.py
    python benchmarks/onnx_step.py --write     # and writes the table into docs/reference/benchmarks.md
"""

from __future__ import annotations

import argparse
import copy
import functools
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from sections import write_section
from step_rows import ROWS, ort_training
from turns import Contender, Training, measure, ratio, serve
from versions import ENGINES, versions

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "benchmarks.md"
PACKAGES = ("torch", *ENGINES, "onnx", "transformers")
ORIGINAL, OLDER, NEWER = CONTENDERS = ("PyTorch model", "older exporter", "newer exporter")
MODELS = ("bert-no-dropout", "gpt2-no-dropout", "resnet18")
HEAD = [
    "| model | contender | median, ms | PyTorch model's time / its time (95 %) | first start, s | second start, s |",
    "|---|---|---|---|---|---|",
]


def export(row: str, exporter: str, path: Path) -> None:
    """Writes a row's model as an ONNX file, for batches of any size, with all weights."""
    import torch
    from step_models import make_task

    task = make_task(ROWS[row].model, ROWS[row].dropout)
    inputs = task.batch if task.loss_fn is None else task.batch[:-1]
    names = [name for name, _ in task.description["inputs"]][: len(inputs)]
    how: dict[str, Any] = (
        {"dynamic_shapes": tuple({0: torch.export.Dim.DYNAMIC} for _ in inputs), "optimize": False, "verbose": False}
        if exporter == NEWER
        else {
            "dynamic_axes": {name: {0: "batch"} for name in names},
            "do_constant_folding": False,
            "training": torch.onnx.TrainingMode.TRAINING,
            "opset_version": 17,
        }
    )
    output = "loss" if task.loss_fn is None else "logits"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            copy.deepcopy(task.model).train(),
            inputs,
            str(path),
            dynamo=exporter == NEWER,
            input_names=names,
            output_names=[output],
            **how,
        )


def onnx_training(row: str, path: Path) -> Training:
    """Returns the training of a file."""
    from step_models import make_task

    from ort_trainer import ORTTrainer, ORTTrainerOptions, optim

    task = make_task(ROWS[row].model, ROWS[row].dropout)
    options = ORTTrainerOptions({"utils": {"grad_norm_clip": False}})
    config = optim.AdamConfig(lr=1e-3, lambda_coef=0.01)
    trainer = ORTTrainer(path, task.description, config, loss_fn=task.loss_fn, options=options)
    return Training(lambda: trainer.train_step(*task.batch), trainer)


def serve_contender(name: str, row: str, path: Path) -> None:
    """Runs a contender's process."""
    import onnx  # noqa: F401 - imports are no part of the start-up that is measured
    import torch  # noqa: F401

    from ort_trainer import ORTTrainer  # noqa: F401

    serve(
        functools.partial(ort_training, ROWS[row]) if name == ORIGINAL else functools.partial(onnx_training, row, path)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--rounds", type=int, default=8, help="blocks of steps of every contender")
    parser.add_argument("--write", action="store_true", help="write the table into docs/reference/benchmarks.md")
    parser.add_argument("--serve", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve_contender(arguments.serve, arguments.rows[0], arguments.path)
        return
    lines = list(HEAD)
    for row in arguments.rows:
        with tempfile.TemporaryDirectory() as folder:
            contenders = {}
            for name in CONTENDERS:
                path = Path(folder) / f"{name.replace(' ', '_')}.onnx"
                if name != ORIGINAL:
                    export(row, name, path)
                command = (sys.executable, __file__, "--serve", name, "--rows", row, "--path", str(path))
                contenders[name] = Contender(command)
            results, died = measure(contenders, ROWS[row].steps, arguments.rounds, needed=ORIGINAL)
        for name, result in results.items():
            middle, low, high = ratio(results[ORIGINAL], result)
            speed = "1" if name == ORIGINAL else f"**{middle:.2f}** ({low:.2f} - {high:.2f})"
            starts = " | ".join(f"{seconds:.1f}" for seconds in result.starts)
            lines.append(f"| {ROWS[row].label} | {name} | {result.median * 1e3:.4g} | {speed} | {starts} |")
        lines += [f"| {ROWS[row].label} | {name} | fails: {why[:200]} | | | |" for name, why in died.items()]
        print("\n".join(lines[2:]), flush=True)
    if arguments.write:
        text = f"`python benchmarks/onnx_step.py`, {versions(PACKAGES)}."
        write_section(PAGE, "ONNX models", "\n".join(["## ONNX models", "", text, "", *lines]))


if __name__ == "__main__":
    main()
