"""Captures a step: the graph before its translation to ONNX."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ort_trainer.capture.answers import answers_of
from ort_trainer.capture.borrow import borrowed
from ort_trainer.capture.capture import capture
from ort_trainer.capture.step_module import ExportedStep, StepModule
from ort_trainer.graph.differentiate import differentiate
from ort_trainer.graph.flat_graph import FlatGraph
from ort_trainer.graph.kernels import Kernels
from ort_trainer.kernels.kinds import ONNX_RUNTIME
from ort_trainer.options import ModelDescription


def captured(
    model: nn.Module,
    shapes: dict[str, Sequence[int | str]],
    *sample: torch.Tensor,
    training: bool = True,
    loss_fn: Callable[..., Any] | None = None,
    kernels: Kernels = ONNX_RUNTIME,
    answered: bool = False,
) -> FlatGraph:
    """Captures a model whose first output is the loss; if ``answered``, with the sample's answers to conditions."""
    desc = {"inputs": [(name, list(shape)) for name, shape in shapes.items()], "outputs": [("loss", [], True)]}
    trainable = frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    step = ExportedStep(model, ModelDescription(desc), loss_fn, trainable)
    if answered:
        answers = answers_of(step, dict(zip(shapes, sample, strict=True)), training)
        step = dataclasses.replace(step, answers=answers)
    module = StepModule(step)
    with borrowed(module, {f"model.{name}" for name in trainable} if training else set(), training, None):
        inputs = step.description.inputs
        program = capture(module, inputs, sample, step.autocast_for(sample))
        return differentiate(program, module, inputs, step.autocast_for(sample), kernels)
