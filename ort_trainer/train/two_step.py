"""``TwoStepSession``: a trainer's session, which runs passes and updates through the trainer's loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..core.errors import shown
from ..engine import Executor
from ..step import Step
from .loop import GRADIENT_WEIGHT, TrainingLoop
from .transaction import in_transaction

if TYPE_CHECKING:
    from ..engine.ort import InferenceSession


class TwoStepSession:
    """The session of a started trainer, with the methods of ONNX Runtime's C++ class ``TrainingSession``.

    ``train_step`` adds to the gradients, ``optimizer_step`` applies them, ``lazy_reset_grad`` drops them. They use the
    trainer's accumulation window and counters, so they can be mixed with the trainer's own steps. An update also ends
    the window: the next ``train_step`` starts from zero.

    Args:
        loop: A loop with an executor.
    """

    def __init__(self, loop: TrainingLoop) -> None:
        self._loop = loop

    def input_names(self, training: bool = True) -> list[str]:
        """Returns the names of the inputs, in the order in which steps take them; the same in both modes."""
        return list(self._loop.description.input_names)

    def output_names(self, training: bool = True) -> list[str]:
        """Returns the names of the outputs, in the order in which steps return them; the same in both modes."""
        return list(self._loop.description.output_names)

    @in_transaction
    def train_step(
        self, inputs: Sequence[Any], *, names: Sequence[str] | None = None, gradient_weight: float | None = None
    ) -> list[torch.Tensor]:
        """Runs the forward and backward pass, adds to the window's gradients and counts the micro-batch; no update.

        If it fails, gradients and counters are unchanged.

        Args:
            inputs: The batch in the order of :meth:`input_names`.
            names: Outputs to return; None for all.
            gradient_weight: As for ``ORTTrainer.train_step``.

        Returns:
            The outputs as new tensors, in the order of ``names``.

        Raises:
            TypeError, ValueError: If the batch does not match the description.
        """
        loop = self._loop
        weight, _ = loop.take_weight({} if gradient_weight is None else {GRADIENT_WEIGHT: gradient_weight})
        return loop.backward(loop.bind((self._named(inputs),), {}, _checked_names(names)), weight)

    def eval_step(self, inputs: Sequence[Any], *, names: Sequence[str] | None = None) -> list[torch.Tensor]:
        """Runs the forward pass in evaluation mode; changes nothing.

        Args:
            inputs: The batch in the order of :meth:`input_names`. An input that the ``names`` do not need may be None.
            names: Outputs to return; None for all.

        Returns:
            The outputs as new tensors, in the order of ``names``.

        Raises:
            TypeError: If an input that the outputs need is None.
        """
        return self._loop.evaluate((self._named(inputs),), {}, _checked_names(names))

    def optimizer_step(self) -> bool:
        """Updates the weights with the gradients so far and steps the schedule, as ``ORTTrainer.optimizer_step``."""
        return self._loop.optimizer_step()

    def lazy_reset_grad(self) -> None:
        """Drops the gradients and ends the window, as ``ORTTrainer.lazy_reset_grad``."""
        self._loop.lazy_reset_grad()

    @in_transaction
    def set_learning_rate(self, *learning_rates: float) -> None:
        """Sets the learning rates of the optimizer config for later updates; checkpoints do not include them.

        Args:
            *learning_rates: One for all parameters, or one per group followed by the default.

        Raises:
            RuntimeError: If a schedule sets the rates.
            TypeError, ValueError: If a rate is not a number of at least 0, or the number of rates is wrong.
        """
        config, schedule = self._loop.config, self._loop.rates.scheduler
        if schedule is not None:
            raise RuntimeError(
                f"the option lr_scheduler is {shown(schedule)}, which sets the learning rate of every update: leave "
                "the option out to set it yourself"
            )
        count = len(config.learning_rates)
        config.learning_rates = list(learning_rates) * (count if len(learning_rates) == 1 else 1)

    def get_learning_rate(self) -> float:
        """Returns the learning rate of the next update; the default rate if parameter groups have their own.

        With a schedule from ``ort_trainer.optim``, or of your own class, returns the rate of the last update; before
        the first update, the rate that it will use.
        """
        return self._loop.rates.current(self._loop.info)[-1]

    @property
    def inference_session(self) -> InferenceSession:
        """The ONNX Runtime session of the first training graph.

        Raises:
            RuntimeError: If there is no training graph yet.
        """
        return self._executor.inference_session

    def graphs(self, training: bool) -> list[Step]:
        """Returns the graphs of a mode, for all variants of the model, oldest first."""
        return self._executor.graphs(training)

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        """All parameters by name, trained or not: the live tensors, not copies."""
        return self._executor.parameters

    @property
    def buffers(self) -> Mapping[str, torch.Tensor]:
        """All buffers by name: the live tensors, not copies."""
        return self._executor.buffers

    @property
    def gradients(self) -> Mapping[str, torch.Tensor]:
        """The memory of the gradients by parameter name; :meth:`present_gradients` returns the valid ones."""
        return self._executor.gradients.tensors

    def present_gradients(self) -> dict[str, torch.Tensor]:
        """Returns the gradient sums of the window so far; empty right after an update.

        With a loss scaler they are multiplied by the scale, and those of a mean are divided by the window's size.
        """
        return self._executor.gradients.present()

    @property
    def generator(self) -> torch.Generator:
        """The generator of training's random numbers (dropout)."""
        return self._executor.generator

    @property
    def _executor(self) -> Executor:
        executor = self._loop.executor
        assert executor is not None
        return executor

    def _named(self, inputs: Sequence[Any]) -> dict[str, Any]:
        """Returns inputs in order as inputs by name; None leaves one out."""
        input_names = self.input_names()
        if not isinstance(inputs, (list, tuple)):
            raise TypeError(
                f"inputs must be a list of tensors in the order {input_names}, but {shown(inputs)} was given"
            )
        if len(inputs) != len(input_names):
            raise TypeError(f"{len(inputs)} inputs were given, but a step takes {len(input_names)}: {input_names}")
        return {name: value for name, value in zip(input_names, inputs, strict=True) if value is not None}


def _checked_names(names: Sequence[str] | None) -> Sequence[str]:
    """Returns the names of outputs to fetch; empty for all."""
    if isinstance(names, str):
        raise TypeError(f"names must be a list of names, but {shown(names)} was given")
    return names or ()
