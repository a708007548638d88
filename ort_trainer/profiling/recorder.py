"""``Profiler``: measures training steps."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any, TypeVar

import torch

from ..core.atomic import check_target
from ..core.errors import check_count, shown, warn
from ..engine import Plan
from .chrome_trace import write_trace
from .figures import fill
from .profile import Profile
from .timing import MeasuredStep, Timing

Result = TypeVar("Result")


class Profiler:
    """Measures the next steps of a training loop, which calls it at every stage of a step.

    Steps that raise are not counted.

    Args:
        steps: Number of steps.
        trace: Path of the trace; None for no trace.
        device: The device of the training.
        rank: Rank of this process. Ranks above 0 add it to the name of the trace, and print nothing.

    Attributes:
        profile: The profile, which is filled by :meth:`report`.

    Raises:
        TypeError, ValueError: If an argument is invalid.
        FileNotFoundError, IsADirectoryError: If the trace can't be written to its path.
    """

    def __init__(self, steps: Any, trace: Any, device: torch.device, rank: int = 0) -> None:
        check_count("profile: steps", steps)
        path = _trace_path(trace)
        self.profile = Profile(steps, path.with_name(f"{path.stem}.{rank}{path.suffix}") if path and rank else path)
        self._device, self._rank = device, rank
        self._timing = Timing()
        self._steps: list[MeasuredStep] = []

    @property
    def finished(self) -> bool:
        """Whether all steps have been measured; then call :meth:`report`."""
        return self.profile.left == 0

    def step(self, function: Callable[[], Result]) -> Result:
        """Measures a call of a function that runs one training step."""
        step = self._timing.step = MeasuredStep(perf_counter_ns())
        result = function()
        step.end = perf_counter_ns()
        self._steps.append(step)
        self.profile.left -= 1
        return result

    def plan(self, plan: Plan) -> Plan:
        """Returns a plan that does the same and measures itself."""
        return self._timing.plan(plan)

    def update(self, function: Callable[..., Result], **arguments: Any) -> Result:
        """Measures a call of a function that updates the weights."""
        start = perf_counter_ns()
        result = function(**arguments)
        self._timing.step.updates.append((start, perf_counter_ns()))
        return result

    def report(self) -> None:
        """Writes the trace, fills the profile and prints it."""
        self._timing.collect()
        remarks = []
        if self._device.type != "cpu":
            remarks.append(f"on {self._device}, the times of operators are the times to launch them")
        if self.profile.trace is not None:
            try:
                write_trace(self.profile.trace, self._steps)
            except OSError as error:  # the training step has succeeded and must not seem to fail
                remarks.append(f"the trace could not be written: {error}")
                warn(f"the trace of the profile could not be written: {error}")
        fill(self.profile, self._steps, self._timing.modules, remarks)
        if not self._rank:
            print(self.profile)


def _trace_path(trace: Any) -> Path | None:
    if trace is None:
        return None
    if not isinstance(trace, (str, os.PathLike)):
        raise TypeError(f"profile: trace must be a path, or None for no file, but {shown(trace)} was given")
    if not os.fspath(trace):
        raise ValueError("profile: trace must be a path, or None for no file, but it is empty")
    path = Path(trace).absolute()  # the working directory may change before the trace is written
    try:
        check_target(path)
    except OSError as error:
        raise type(error)(f"profile: trace: {error}") from None
    return path
