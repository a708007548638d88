"""Checks that padded places do not reach the loss, which the option ``utils.remove_padding`` assumes."""

from __future__ import annotations

import torch

from ..engine import Executor, Plan
from .batch import Batch
from .step_graphs import StepGraphs


class PaddingCheck:
    """Compares a step that skips padded places with one that computes them.

    Args:
        mask: Name of the attention mask.
        graphs: The trainer's graphs.
        tolerance: The relative difference of the loss, and of each gradient's norm, that is allowed.
    """

    def __init__(self, mask: str, graphs: StepGraphs, tolerance: float) -> None:
        self._mask, self._graphs, self._tolerance = mask, graphs, tolerance

    def passes(self, executor: Executor, plan: Plan, batch: Batch) -> bool:
        """Returns whether a batch shows that the results are equal; a batch without padding shows nothing.

        Raises:
            ValueError: If they differ.
        """
        if bool(batch[self._mask].all()):
            return False
        loss, gradients = executor.trial(plan.runner.step, batch)
        whole_loss, whole = executor.trial(self._graphs.padded(batch), batch)
        norms = torch.stack([value.norm() for value in whole.values()])
        # The second term is a floor for gradients that are tiny beside the others.
        allowed = self._tolerance * (norms + self._tolerance * norms.norm())
        differences = torch.stack([(gradients[name] - value).norm() for name, value in whole.items()])
        differing = [name for name, differs in zip(whole, differences > allowed, strict=True) if differs]
        if differing or not torch.isclose(loss, whole_loss, rtol=self._tolerance, atol=1e-6):
            gradients_too = f", and {len(differing)} gradients differ, as that of {differing[0]!r}" if differing else ""
            raise ValueError(
                f"utils.remove_padding is {self._mask!r}, but places where it is zero reach the loss: with them, the "
                f"loss is {float(whole_loss):.7g}; without, {float(loss):.7g}{gradients_too}. Set the labels there to "
                "the loss's ignore_index, or leave out the option"
            )
        return True
