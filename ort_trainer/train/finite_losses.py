"""Stops training when losses are not finite: the option ``debug.max_nonfinite_losses``."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch

__all__ = ["FiniteLosses"]

_OPTION = "debug.max_nonfinite_losses"


class FiniteLosses:
    """Counts consecutive losses that are infinite or NaN.

    Args:
        limit: The number of them that is an error.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = 0

    def check_fetched(self, names: Collection[str], loss: str) -> None:
        """Checks that a step fetches the loss.

        Raises:
            ValueError: If the loss is not among the outputs.
        """
        if loss not in names:
            raise ValueError(
                f"{_OPTION} is {self._limit}, but the step's outputs {list(names)} do not include the loss: add "
                f"{loss!r} to train_step_info.fetches, or leave the option out"
            )

    def check(self, outputs: Mapping[str, torch.Tensor], loss: str) -> None:
        """Checks the loss of a run before its results are used.

        Raises:
            FloatingPointError: If this loss reaches the limit; it is not counted then.
        """
        value = outputs[loss].item()
        if math.isfinite(value):
            self._count = 0
        elif self._count + 1 < self._limit:
            self._count += 1
        else:
            before = f", as were the {self._count} before it" if self._count > 1 else ""
            before = ", as was the one before it" if self._count == 1 else before
            raise FloatingPointError(
                f"the loss is {value}{before}: {_OPTION} is {self._limit}. This step was not taken: weights, gradients "
                "and counters are unchanged. Check the batch and the learning rate, or go back to a checkpoint"
            )
