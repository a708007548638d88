"""The raw measurements of one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..engine.timing import TimedRun

__all__ = ["MeasuredStep"]


@dataclass
class MeasuredStep:
    """One training step. Times are nanoseconds of ``time.perf_counter_ns``.

    Attributes:
        start: When the step started.
        end: When it ended.
        runs: Its graph runs.
        updates: Start and end of its weight updates.
        set_up: Start and end of one-time work in it.
    """

    start: int
    end: int = 0
    runs: list[TimedRun] = field(default_factory=list)
    updates: list[tuple[int, int]] = field(default_factory=list)
    set_up: list[tuple[int, int]] = field(default_factory=list)

    @property
    def duration(self) -> int:
        """Duration of the step without one-time work."""
        return self.end - self.start - sum(end - start for start, end in self.set_up)

    @property
    def is_complete(self) -> bool:
        """Whether the operators of all runs are known."""
        return all(run.is_complete for run in self.runs)
