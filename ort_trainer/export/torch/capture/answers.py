"""Runs a step once in PyTorch, for what its Python code reads of tensors' values (``branches.py``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch

from .borrow import borrowed
from .branches import Answers, Line, Number, reads_watched
from .eager import random_state_kept
from .step_module import ExportedStep

__all__ = ["answers_of"]


def answers_of(step: ExportedStep, batch: Mapping[str, torch.Tensor], training: bool) -> Answers:
    """Runs a step without an effect, and returns the values that it reads.

    Args:
        step: The step.
        batch: A sample of every input.
        training: Whether to run it in training mode.

    Raises:
        Exception: What the model raises for this batch.
    """
    module = step.module()
    module.recorder.numbers.clear()  # stand-ins are for captures
    sample = [batch[entry.name].clone() for entry in step.description.inputs]
    trainable = {f"model.{name}" for name in step.trainable} if training else set()
    answers: dict[Line, list[Number]] = {}

    def read(method: Callable[[torch.Tensor], Any], tensor: torch.Tensor, frame: FrameType) -> Number:
        value: Number = method(tensor)
        answers.setdefault((frame.f_code, frame.f_lineno), []).append(value)
        return value

    with (
        borrowed(module, trainable, training, step.modes if training else None),
        random_state_kept(step.device_for(sample)),
        torch.no_grad(),
        step.autocast_for(sample),
        reads_watched(read, torch.Tensor),
    ):
        module(*sample)
    return answers
