"""Compares steps with the same steps in eager PyTorch, before they take effect: ``debug.verify_every``."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from ..core.errors import VerificationError
from ..engine import Check, Executor
from ..export.torch.capture.eager import EagerStep, gradient_of
from ..export.torch.differences import WHY_DIFFERENT, check_comparable, gradient_floor, not_run, report
from ..step import Step
from .batch import Batch
from .step_graphs import StepGraphs

__all__ = ["StepVerifier"]


class StepVerifier:
    """Repeats steps in PyTorch.

    Args:
        every: Compares step number ``every``, 2 * ``every``, and so on.
        graphs: The trainer's graphs.
        scaled: Whether updates with gradients that are not finite are skipped.
        padded: Whether outputs are zero at padded places, as with ``utils.remove_padding``.
    """

    def __init__(self, every: int, graphs: StepGraphs, scaled: bool, padded: bool) -> None:
        self._every, self._graphs, self._scaled, self._padded = every, graphs, scaled, padded
        self._count = 0

    def check_comparable(self, step: Step) -> None:
        """Checks that PyTorch draws the random numbers that a step draws.

        Raises:
            ValueError: If it doesn't.
        """
        check_comparable(step.random, self._every)

    def begin(self, executor: Executor, batch: Batch, scale: float, number: int) -> Check | None:
        """Prepares to compare a step; called before its graph runs.

        Args:
            executor: Has the tensors.
            batch: The batch.
            scale: The factor on the loss in the backward pass.
            number: The number of the step, for the error.

        Returns:
            A function that compares the graph's results and raises a ``VerificationError`` if they differ; None if this
            step is not compared.
        """
        if (self._count + 1) % self._every:
            self._count += 1
            return None
        graphs, state = self._graphs, executor.generator.get_state()

        def check(step: Step, outputs: Mapping[str, torch.Tensor], written: Mapping[str, torch.Tensor]) -> None:
            try:
                theirs = graphs.eager(executor, batch, scale, state)
            except Exception as error:
                raise not_run(f"step {number}", error) from error
            if self._padded:  # outputs other than the loss are zero at padded places
                outputs = {step.loss: outputs[step.loss]} if step.loss in outputs else {}
            gradients = {name: written[output] for name, output in step.gradients.items()}
            if self._scaled and not (_finite(gradients) or _finite(theirs.gradients)):
                self._count += 1
                return  # the update is skipped, and kernels differ in the results of an overflow
            buffers = executor.buffers | {name: written[output] for name, output in step.buffer_updates.items()}
            buffers = {name: buffers[name] for name in theirs.buffers}  # without those of the loss
            message = report(
                EagerStep(dict(outputs), gradients, buffers).named(),
                _fetched(theirs, outputs).named(),
                theirs.rounding,
                lambda seed: graphs.eager(executor, batch, scale, state, seed).named(),
                dict.fromkeys(map(gradient_of, gradients), gradient_floor(theirs.gradients.values(), theirs.rounding)),
                [*map(gradient_of, gradients)] if self._scaled else (),
            )
            if message:
                raise VerificationError(
                    f"step {number} differs from the same step in PyTorch (debug.verify_every): {message} The step was "
                    "not taken: weights, gradients, buffers and counters are unchanged, so you can save a checkpoint. "
                    f"{WHY_DIFFERENT}"
                )
            self._count += 1

        return check


def _fetched(step: EagerStep, names: Collection[str]) -> EagerStep:
    """Returns a step with only the named outputs."""
    return step._replace(outputs={name: value for name, value in step.outputs.items() if name in names})


def _finite(gradients: Mapping[str, torch.Tensor]) -> bool:
    """Returns whether all gradients are finite."""
    return all(bool(value.isfinite().all()) for value in gradients.values())
