"""The formulas of the learning-rate schedules with warm-up.

s is the number of updates done, T ``total_steps``, W ``warmup_steps`` and base the learning rate after warm-up. While
s < W, every schedule returns ``base * s / max(1, W)``, so with any warm-up the first update has a learning rate of 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any


def learning_rate(schedule: Mapping[str, Any], step: int, base: float) -> float:
    """Returns the learning rate of the next update.

    Args:
        schedule: ``kind`` (one of :data:`KINDS`), ``total_steps``, ``warmup_steps``, and ``cycles`` for a ``cosine``,
            ``lr_end`` and ``power`` for a ``poly``.
        step: Updates done.
        base: The learning rate after warm-up.

    Raises:
        KeyError: If the kind is unknown, or a key is missing.
        ValueError: If ``lr_end`` of a ``poly`` is not below the base.
    """
    if base == 0:
        return 0.0  # a frozen group stays frozen
    warmup_steps = schedule["warmup_steps"]
    if step < warmup_steps:
        return float(base * step / max(1.0, warmup_steps))
    return float(base * KINDS[schedule["kind"]](schedule, step, base))


def _constant(schedule: Mapping[str, Any], step: int, base: float) -> float:
    return 1.0


def _linear(schedule: Mapping[str, Any], step: int, base: float) -> float:
    """``max(0, (T - s) / max(1, T - W))``."""
    total = schedule["total_steps"]
    return float(max(0.0, (total - step) / max(1.0, total - schedule["warmup_steps"])))


def _cosine(schedule: Mapping[str, Any], step: int, base: float) -> float:
    """``max(0, (1 + cos(2 pi cycles p)) / 2)`` with ``p = min(1, (s - W) / max(1, T - W))``."""
    total, warmup_steps = schedule["total_steps"], schedule["warmup_steps"]
    progress = min(1.0, (step - warmup_steps) / max(1.0, total - warmup_steps))
    return max(0.0, 0.5 * (1.0 + math.cos(2.0 * math.pi * schedule["cycles"] * progress)))


def _poly(schedule: Mapping[str, Any], step: int, base: float) -> float:
    """``((base - lr_end) * (1 - (s - W) / (T - W))^power + lr_end) / base``, and ``lr_end / base`` after T."""
    total, warmup_steps, end = schedule["total_steps"], schedule["warmup_steps"], schedule["lr_end"]
    if base <= end:
        raise ValueError(f"'lr_end' {end} must be below the learning rate of the optimizer config, {base}")
    if step > total:
        return float(end / base)
    remaining = 1.0 - (step - warmup_steps) / (total - warmup_steps)
    return float(((base - end) * remaining ** schedule["power"] + end) / base)


KINDS: Mapping[str, Callable[[Mapping[str, Any], int, float], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "poly": _poly,
}
"""Kind of schedule -> function that returns the factor on the base after warm-up."""
