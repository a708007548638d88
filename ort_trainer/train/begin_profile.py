"""Starts a profile of a loop's steps."""

from __future__ import annotations

import os

from ..profiling import Profile, Profiler
from .loop import TrainingLoop

__all__ = ["begin_profile"]


def begin_profile(loop: TrainingLoop, steps: int, trace: str | os.PathLike[str] | None) -> Profile:
    """Measures the next calls of ``loop.train``; see ``ORTTrainer.profile``.

    Raises:
        RuntimeError: If a profile is already running.
        TypeError, ValueError, OSError: If an argument is invalid.
    """
    if loop.profiler is not None:
        raise RuntimeError(
            f"a profile of {loop.profiler.profile.steps} steps is running, with {loop.profiler.profile.left} left: "
            "call train_step that often, then profile() again"
        )
    loop.profiler = Profiler(steps, trace, loop.device, loop.strategy.world_rank)
    return loop.profiler.profile
