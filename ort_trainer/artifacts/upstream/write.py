"""Writes artifacts for onnxruntime-training's runtime: the flavor ``onnxruntime-training``."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import onnx_ir as ir

from ...state.state import State
from ...step import Step
from ..files import CHECKPOINT, EVALUATION_MODEL, NOMINAL_CHECKPOINT, OPTIMIZER_MODEL, TRAINING_MODEL
from .conversion import to_upstream
from .optimizer_model import optimizer_model
from .step_models import step_models
from .write_checkpoint import write_upstream_checkpoint

if TYPE_CHECKING:
    from ...optim.update_writer import ParameterUpdate

__all__ = ["write_upstream_artifacts"]


def write_upstream_artifacts(
    folder: Path,
    training: Step,
    evaluation: Step,
    updates: Mapping[str, ParameterUpdate],
    checkpoint: State,
    buffers: Collection[str],
    *,
    gradient_weight: float = 1.0,
    fixed_learning_rate: bool = False,
    nominal_checkpoint: bool = True,
) -> None:
    """Writes the training, evaluation and optimizer models, the checkpoint and the nominal checkpoint.

    Args:
        folder: An empty folder.
        training: The graph of a training step, of standard operators.
        evaluation: The graph of an evaluation step.
        updates: Name of a parameter -> its update.
        checkpoint: The state; its export is not used. Without an optimizer's state, no optimizer model is written.
        buffers: Which of the checkpoint's parameters are buffers of the model.
        gradient_weight: Factor for each gradient: 1 / N if N micro-batches make a mean.
        fixed_learning_rate: Whether to store the learning rate in the optimizer model: a runtime that can't set it,
            such as the browser's, would always use 0.001.
        nominal_checkpoint: Whether to write a nominal checkpoint.

    Raises:
        ValueError: If onnxruntime-training can't do what the trainer does; the message says what. Nothing is written.
    """
    _check(checkpoint)
    state = {**checkpoint.parameters, **checkpoint.buffers}
    models = step_models(training, evaluation, state, {*buffers, *checkpoint.buffers}, gradient_weight)
    files = {
        TRAINING_MODEL: ir.to_proto(models.training),
        EVALUATION_MODEL: ir.to_proto(models.evaluation),
    }
    if checkpoint.optimizer is not None:
        files[OPTIMIZER_MODEL] = optimizer_model(
            {name: updates[name] for name in models.trained},
            checkpoint.learning_rates,
            models.opset,
            fixed_learning_rate,
        )
    found, _ = to_upstream(checkpoint, models.trained)
    for name, proto in files.items():
        (folder / name).write_bytes(proto.SerializeToString())
    write_upstream_checkpoint(folder / CHECKPOINT, found)
    if nominal_checkpoint:
        found.nominal, found.groups = True, {}
        write_upstream_checkpoint(folder / NOMINAL_CHECKPOINT, found)


def _check(checkpoint: State) -> None:
    if checkpoint.schedule is not None:
        raise ValueError(
            "onnxruntime-training's artifacts can't store a learning-rate schedule: use the default flavor, or export "
            "from a trainer without lr_scheduler and set the rate in your program (Optimizer.set_learning_rate)"
        )
    if checkpoint.gradients:
        raise ValueError(
            "onnxruntime-training can't store the gradients of an incomplete accumulation window: use the default "
            "flavor, or export after the window's last micro-batch"
        )
