"""Runs a step once in PyTorch, for what its Python code reads of tensors' values (``branches.py``)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .borrow import borrowed
from .branches import READ_A_NUMBER, Answers, Line, Reads, kind_of_read, users_frame
from .eager import random_state_kept
from .step_module import ExportedStep


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
    answers: dict[Line, list[Any]] = {}

    def note(frame: FrameType, value: Any, operator: str = "") -> None:
        answers.setdefault((frame.f_code, frame.f_lineno, operator), []).append(value)

    def read(method: Callable[[torch.Tensor], Any], tensor: torch.Tensor, frame: FrameType) -> Any:
        value = method(tensor)
        note(frame, value, kind_of_read(method))
        return value

    class Operators(TorchDispatchMode):
        """Notes the shapes of results that depend on values, and the values that operators read."""

        def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if operator in READ_A_NUMBER and not reads.inside:
                return reads.number(args[0])
            result = operator(*args, **(kwargs or {}))
            if torch.Tag.dynamic_output_shape in operator.tags and isinstance(result, torch.Tensor):
                note(users_frame(sys._getframe(1)), tuple(result.shape), str(operator))
            return result

    with (
        borrowed(module, trainable, training, step.modes_in(training)),
        random_state_kept(step.device_for(sample)),
        torch.no_grad(),
        step.autocast_for(sample),
        Reads(read, torch.Tensor) as reads,
        Operators(),  # type: ignore[no-untyped-call]
    ):
        module(*sample)
    return answers
