"""Compares steps with the same steps in eager PyTorch, before they take effect: ``debug.verify_every``."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping

import torch

from ..capture.borrow import BORROWED
from ..capture.differences import WHY_DIFFERENT, gradient_floor, not_run, report
from ..capture.eager import EagerStep, gradient_of
from ..capture.verification import Verification, repeating, spare_memory
from ..core.errors import VerificationError
from ..engine import Check, Executor
from ..step import Step
from .batch import Batch
from .step_graphs import StepGraphs


class StepVerifier:
    """Repeats steps in PyTorch.

    Args:
        every: Which ones: each n-th, or ``"auto"``; see :class:`~.verification.Verification`.
        graphs: The trainer's graphs.
        scaled: Whether updates with gradients that are not finite are skipped.
        padded: Whether outputs are zero at padded places, as with ``utils.remove_padding``.
    """

    def __init__(self, every: int | str, graphs: StepGraphs, scaled: bool, padded: bool) -> None:
        self._turns, self._graphs, self._scaled, self._padded = Verification(every), graphs, scaled, padded

    @property
    def last(self) -> int:
        """The number of the last step that was compared and equal, 0 for none."""
        return self._turns.last

    def expect(self) -> None:
        """Has the next step compared, as an evaluation or a loaded state may have changed what the model reads."""
        self._turns.expect()

    def renews(self, error: VerificationError) -> bool:
        """Returns whether graphs are made anew after a first difference, which this says in a warning."""
        return self._turns.renews(error, self._graphs.renew)

    def begin(self, executor: Executor, batch: Batch, scale: float, number: int, step: Step) -> Check | None:
        """Prepares to compare a step; called before its graph runs.

        Args:
            executor: Has the tensors.
            batch: The batch.
            scale: The factor on the loss in the backward pass.
            number: The number of the step, for the error.
            step: The graph.

        Returns:
            A function that compares the graph's results and raises a ``VerificationError`` if they differ; None if this
            step is not compared.
        """
        turns = self._turns
        if not turns.is_due(step):
            return None
        state = executor.generator.get_state()

        def check(step: Step, outputs: Mapping[str, torch.Tensor], written: Mapping[str, torch.Tensor]) -> None:
            began = time.process_time()
            message = self._compared(executor, batch, scale, state, number, step, outputs, written)
            if message:
                last = f"The last step that was compared before was run {turns.last}. " if turns.last else ""
                raise VerificationError(
                    f"step {number} differs from the same step in PyTorch (debug.verify_every): {message} The step was "
                    "not taken: weights, gradients, buffers and counters are unchanged, so you can save a checkpoint. "
                    f"{last}{WHY_DIFFERENT}"
                )
            turns.passed(step, began)

        return check

    def _compared(
        self,
        executor: Executor,
        batch: Batch,
        scale: float,
        state: torch.Tensor,
        number: int,
        step: Step,
        outputs: Mapping[str, torch.Tensor],
        written: Mapping[str, torch.Tensor],
    ) -> str:
        """Repeats a step, and returns what differs; "" if nothing does."""
        gradients = {name: written[output] for name, output in step.gradients.items()}
        turns = self._turns
        memory = spare_memory(executor.generator.device) if turns.is_automatic else math.inf

        def repeat(shake: int | None = None) -> EagerStep:
            with BORROWED, repeating():  # no other thread replaces the same functions
                return self._graphs.eager(executor, batch, scale, state, step.random, shake, memory)

        try:
            theirs = repeat()
        except Exception as error:
            if turns.is_automatic:
                turns.give_up(step, error)
                return ""
            raise not_run(f"step {number}", error) from error
        numbers = self._graphs.numbers_left(step)
        left = [outputs[name] for at, name in enumerate(step.left) if at not in numbers]
        outputs = {name: value for name, value in outputs.items() if name not in step.left}
        outputs |= {f"left.{at}": value for at, value in enumerate(left)}
        if self._padded:  # outputs other than the loss are zero at padded places
            outputs = {step.loss: outputs[step.loss]} if step.loss in outputs else {}
        if self._scaled and not (_finite(gradients) or _finite(theirs.gradients)):
            return ""  # the update is skipped, and kernels differ in the results of an overflow
        gradients = gradients if theirs.has_gradients else {}
        buffers = executor.buffers | {name: written[output] for name, output in step.buffer_updates.items()}
        buffers = {name: buffers[name] for name in theirs.buffers}  # without those of the loss
        return report(
            EagerStep(dict(outputs), gradients, buffers).named(),
            _fetched(theirs, outputs).named(),
            theirs.rounding,
            lambda seed: repeat(seed).named(),
            dict.fromkeys(map(gradient_of, gradients), gradient_floor(theirs.gradients.values(), theirs.rounding)),
            [*map(gradient_of, gradients)] if self._scaled else (),
        )


def _fetched(step: EagerStep, names: Collection[str]) -> EagerStep:
    """Returns a step with only the named outputs."""
    return step._replace(outputs={name: value for name, value in step.outputs.items() if name in names})


def _finite(gradients: Mapping[str, torch.Tensor]) -> bool:
    """Returns whether all gradients are finite."""
    return all(bool(value.isfinite().all()) for value in gradients.values())
