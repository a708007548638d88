"""``LinearLRScheduler``: warm-up to a learning rate, then linearly down to 0."""

from __future__ import annotations

import numpy as np

from ..core.errors import shown
from ..core.schedules import learning_rate
from .optimizer import Optimizer, check_rate


class LinearLRScheduler:
    """Schedules the learning rate of an optimizer: linearly up from 0 during warm-up, then linearly down to 0.

    With W warm-up updates, T updates in total and s updates done, the rate is ``initial_lr * s / W`` while s < W, then
    ``initial_lr * max(0, (T - s) / (T - W))``. The constructor sets it, and :meth:`step` sets it again. It replaces
    the schedule of the checkpoint.

    Args:
        optimizer: The optimizer.
        warmup_step_count: W, the number of warm-up updates.
        total_step_count: T, the number of updates in total.
        initial_lr: The rate at the end of the warm-up.

    Raises:
        TypeError: If an argument has the wrong type.
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
                "0 <= warmup_step_count <= total_step_count and total_step_count > 0 are required, but "
                f"warmup_step_count is {warmup_step_count} and total_step_count is {total_step_count} "
                "(onnxruntime-training 1.19.2 swaps the two arguments; here they mean what their names say)"
            )
        self._optimizer = optimizer
        self._initial = check_rate("initial_lr", initial_lr)
        steps = {"total_steps": int(total_step_count), "warmup_steps": int(warmup_step_count)}
        self._schedule = {"kind": "linear", **steps}
        self.step()

    def step(self) -> None:
        """Sets the learning rate of the next update, from the number of updates done."""
        state = self._optimizer._state
        state.set_rate(learning_rate(self._schedule, state.optimization_step, self._initial))

    def __repr__(self) -> str:
        warmup, total = self._schedule["warmup_steps"], self._schedule["total_steps"]
        return (
            f"LinearLRScheduler(warmup_step_count={warmup}, total_step_count={total}, initial_lr={self._initial}, "
            f"learning_rate={self._optimizer.get_learning_rate()})"
        )
