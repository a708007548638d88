"""``TrainingSession``: the class of ONNX Runtime's C++ training API, in Python."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..core.errors import shown
from ..engine.ort import OrtValue, RunOptions, SessionOptions
from .checkpoint_state import CheckpointState
from .load import ModelSource
from .lr_scheduler import LinearLRScheduler
from .module import Module
from .optimizer import Optimizer
from .runner import Input


class TrainingSession:
    """A training session like ONNX Runtime's C++ class: one object for steps, updates and learning rates.

    Args:
        state: The state to train.
        train_model: The training model: path or bytes.
        eval_model: The evaluation model, for :meth:`eval_step` and :meth:`export_model_for_inferencing`.
        optimizer_model: The optimizer model, for :meth:`optimizer_step` and the learning rate.
        session_options: For ONNX Runtime's sessions.
        device: ``cpu``, ``cuda`` or ``cuda:N``.

    Raises:
        TypeError: If an argument has the wrong type.
        FileNotFoundError: If a model does not exist.
        ValueError: If a model is damaged, is not an artifact, or comes from another export than the state.
    """

    def __init__(
        self,
        state: CheckpointState,
        train_model: ModelSource,
        eval_model: ModelSource | None = None,
        optimizer_model: ModelSource | None = None,
        session_options: SessionOptions | None = None,
        device: str = "cpu",
    ) -> None:
        self._module = Module(train_model, state, _none_if_empty(eval_model), device, session_options)
        update_model = _none_if_empty(optimizer_model)
        self._optimizer = None if update_model is None else Optimizer(update_model, self._module)
        self._scheduler: LinearLRScheduler | None = None

    def train_step(
        self, input_values: Sequence[Input] | Mapping[str, Input], run_options: RunOptions | None = None
    ) -> list[Any]:
        """Computes the outputs, and adds to the gradients.

        Args:
            input_values: Arrays or OrtValues in the order of ``input_names(True)``, or by these names.
            run_options: ONNX Runtime's options for this run.

        Returns:
            The outputs in the order of ``output_names(True)``: arrays if any input is an array, otherwise OrtValues.

        Raises:
            TypeError: If an input is missing, unknown, not a tensor, or has the wrong dtype.
            ValueError: If an input has the wrong shape.
            IndexError: If an input contains an index out of range, such as a label beyond the number of classes.
            RuntimeError: If the parameters have no values yet.
        """
        return self._run(True, input_values, run_options)

    def eval_step(
        self, input_values: Sequence[Input] | Mapping[str, Input], run_options: RunOptions | None = None
    ) -> list[Any]:
        """Computes the outputs of the evaluation model; arguments and errors as for :meth:`train_step`."""
        return self._run(False, input_values, run_options)

    def lazy_reset_grad(self) -> None:
        """Makes the next training step overwrite the gradients; until then they stay readable."""
        self._module.lazy_reset_grad()

    def optimizer_step(self, run_options: RunOptions | None = None) -> None:
        """Updates the parameters from the gradients."""
        self._needed_optimizer().step(run_options)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Sets the learning rate of all parameters, until a scheduler sets another."""
        self._needed_optimizer().set_learning_rate(learning_rate)

    def get_learning_rate(self) -> float:
        """Returns the learning rate of the next update."""
        return self._needed_optimizer().get_learning_rate()

    def register_linear_lr_scheduler(self, warmup_step_count: int, total_step_count: int, initial_lr: float) -> None:
        """Registers a scheduler, and sets its learning rate; see :class:`LinearLRScheduler`.

        Args:
            warmup_step_count: Number of updates in which the learning rate rises to ``initial_lr``.
            total_step_count: Number of updates after which it is 0.
            initial_lr: The rate at the end of the warm-up.
        """
        optimizer = self._needed_optimizer()
        self._scheduler = LinearLRScheduler(optimizer, warmup_step_count, total_step_count, initial_lr)

    def scheduler_step(self) -> None:
        """Sets the learning rate of the next update from the scheduler.

        Raises:
            RuntimeError: If there is no scheduler.
        """
        if self._scheduler is None:
            raise RuntimeError("there is no scheduler to step: call register_linear_lr_scheduler() first")
        self._scheduler.step()

    def export_model_for_inferencing(
        self, inference_model_path: str | os.PathLike[str], graph_output_names: Sequence[str]
    ) -> None:
        """Writes an ONNX model for inference; see :meth:`Module.export_model_for_inferencing`."""
        self._module.export_model_for_inferencing(inference_model_path, graph_output_names)

    def input_names(self, training: bool) -> list[str]:
        """Returns the names of the inputs of a training or evaluation step."""
        return list(self._module._runner(training).inputs)

    def output_names(self, training: bool) -> list[str]:
        """Returns the names of the outputs of a training or evaluation step."""
        return list(self._module._runner(training).outputs)

    def get_parameters_size(self, only_trainable: bool = True) -> int:
        """Returns the total number of elements of the trained parameters, or of all."""
        return self._module.get_parameters_size(only_trainable)

    def to_buffer(self, only_trainable: bool) -> OrtValue:
        """Returns a copy of the values of all parameters, or the trained ones, as one flat buffer."""
        return self._module.get_contiguous_parameters(only_trainable)

    def from_buffer(self, buffer: Input) -> None:
        """Sets the values of the parameters from :meth:`to_buffer`, which also fills a nominal checkpoint.

        Args:
            buffer: All parameters or the trained ones, recognized by its size.

        Raises:
            TypeError: If it is not a tensor, or has the wrong dtype.
            ValueError: If it has neither size.
        """
        size = _size(buffer)
        sizes = {flag: self._module.get_parameters_size(flag) for flag in (False, True)}
        if size is not None and size not in sizes.values():
            raise ValueError(
                f"the buffer has {size} elements, but all parameters have {sizes[False]}, and the trained ones have "
                f"{sizes[True]}"
            )
        self._module.copy_buffer_to_parameters(buffer, trainable_only=size != sizes[False])

    def __repr__(self) -> str:
        return f"TrainingSession({self._module!r}, {self._optimizer!r})"

    def _run(
        self, training: bool, input_values: Sequence[Input] | Mapping[str, Input], options: RunOptions | None
    ) -> list[Any]:
        if not isinstance(input_values, (list, tuple, Mapping)):
            raise TypeError(f"input_values must be a list of arrays or OrtValues, but {shown(input_values)} was given")
        return self._module._run(training, input_values, options)

    def _needed_optimizer(self) -> Optimizer:
        if self._optimizer is None:
            raise RuntimeError("there is no optimizer: pass the optimizer model as optimizer_model")
        return self._optimizer


def _none_if_empty(model: ModelSource | None) -> ModelSource | None:
    """Returns a model, or None for an empty buffer, which stands for a missing model in C++."""
    return None if isinstance(model, bytes) and not model else model


def _size(buffer: object) -> int | None:
    """Returns the number of elements of a buffer; None if it is not a tensor."""
    if isinstance(buffer, np.ndarray):
        return buffer.size
    shape = getattr(buffer, "shape", None)
    return int(np.prod(shape(), dtype=np.int64)) if callable(shape) else None
