"""``LinearLRScheduler``: warm-up to a learning rate, then linearly down to 0."""

from __future__ import annotations

import numpy as np

from ..errors import shown
from ..schedules import learning_rate
from .optimizer import Optimizer, check_rate

__all__ = ["LinearLRScheduler"]


class LinearLRScheduler:
    """Sets the learning rate of an optimizer: up from 0 in the warm-up, then linearly down to 0.

    With the warm-up W, the total T and s updates done it is ``initial_lr * s / W`` while s < W, then
    ``initial_lr * max(0, (T - s) / (T - W))``. It is set at once, and again by :meth:`step`; it takes the place of a
    schedule that came with the checkpoint.

    Args:
        optimizer: Whose learning rate is set.
        warmup_step_count: W.
        total_step_count: T.
        initial_lr: What the warm-up ends with.

    Raises:
        TypeError: If an argument has a wrong type.
        ValueError: If a count is out of range: 0 <= W <= T, T > 0; or the learning rate is negative or not finite.
    """

    def __init__(self, optimizer: Optimizer, warmup_step_count: int, total_step_count: int, initial_lr: float) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer must be an Optimizer, but {shown(optimizer)} was given")
        for what, value in (("warmup_step_count", warmup_step_count), ("total_step_count", total_step_count)):
            if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
                raise TypeError(f"{what} must be an int, but {shown(value)} was given")
        if not (0 <= warmup_step_count <= total_step_count and total_step_count > 0):
            raise ValueError(
                f"warmup_step_count {warmup_step_count} and total_step_count {total_step_count} must be 0 <= warm-up "
                "<= total, and total > 0 (onnxruntime-training 1.19.2 swaps the two; here they are what they are "
                "called)"
            )
        self._optimizer = optimizer
        self._initial = check_rate("initial_lr", initial_lr)
        steps = {"total_steps": int(total_step_count), "warmup_steps": int(warmup_step_count)}
        self._schedule = {"kind": "linear", **steps}
        self.step()

    def step(self) -> None:
        """Sets the learning rate of the coming update, from the updates that the optimizer has done."""
        state = self._optimizer._state
        state.set_rate(learning_rate(self._schedule, state.optimization_step, self._initial))

    def __repr__(self) -> str:
        warmup, total = self._schedule["warmup_steps"], self._schedule["total_steps"]
        return (
            f"LinearLRScheduler(warmup_step_count={warmup}, total_step_count={total}, initial_lr={self._initial}, "
            f"learning_rate={self._optimizer.get_learning_rate()})"
        )
