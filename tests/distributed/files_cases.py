"""The cases that the processes of test_files.py run: all write to the same paths at once."""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path
from typing import Any

import onnx
from onnx import numpy_helper
from torch import nn

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.state.training_api import read_checkpoint

from .fit_cases import data, model


def files(rank: int, size: int) -> dict[str, Any]:
    """Writes files in the middle of a window, with sharded moments."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as own:
        trainer, folder = trained(rank, size, Path(own))
        artifacts = read_checkpoint(folder / "artifacts" / "checkpoint")
        for kind in ("parameters", "optimizer", "gradients"):
            found |= {f"{kind}.{name}": value for name, value in (getattr(artifacts, kind) or {}).items()}
        for name in ("whole.onnx", "inference.onnx"):
            read = onnx.load(folder / name)
            onnx.checker.check_model(read)
            found |= {f"{name}.{value.name}": numpy_helper.to_array(value) for value in read.graph.initializer}
        onnx.load(folder / "graph.onnx")
        found["names"] = sorted(path.name for path in [*folder.iterdir(), *(folder / "artifacts").iterdir()])
        try:
            trainer.export_artifacts(folder / "whole.onnx" if rank == 0 else folder / "artifacts")
        except Exception as error:
            found["refused"] = f"{type(error).__name__}: {error}"
        trainer.gather({})  # rank 0 is the last to leave its folder
    return found


def trained(rank: int, size: int, own: Path) -> tuple[ORTTrainer, Path]:
    """Returns a trainer that has written all files after three micro-batches, and their folder."""
    options: dict[str, Any] = {"batch": {"gradient_accumulation_steps": 2}, "distributed": {}}
    if size > 1:
        options["distributed"] = {"deepspeed_zero_optimization": {"stage": 1}}
    path = str(own / "graph.onnx")  # only rank 0 writes it
    options["debug"] = {"graph_save_paths": {"model_with_gradient_graph_path": path}}
    trainer = ORTTrainer(model(), "auto", optim.AdamConfig(lr=0.01), nn.CrossEntropyLoss(), ORTTrainerOptions(options))
    folder = Path(trainer.gather({"folder": str(own)})[0]["folder"])
    x, y = data(72).tensors
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        trainer.profile(2, folder / "trace.json")
        for start in range(0, 72, 24):
            part = slice(start + rank * 24 // size, start + (rank + 1) * 24 // size)
            trainer.train_step(x[part], y[part])
    assert bool(printed.getvalue()) == (rank == 0) and not (rank and Path(path).exists())
    trainer.export_artifacts(folder / "artifacts")
    trainer.save_as_onnx(folder / "whole.onnx")
    trainer.export_for_inference(folder / "inference.onnx")
    trainer.gather({})  # all have written
    return trainer, folder
