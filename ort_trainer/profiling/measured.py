"""What was measured of one step, before anything is made of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..runtime.timing import TimedRun

__all__ = ["MeasuredStep"]


@dataclass
class MeasuredStep:
    """One training step. Times are nanoseconds of ``time.perf_counter_ns``.

    Attributes:
        start: When it began.
        end: When it ended.
        runs: The runs of graphs in it.
        updates: Begin and end of weight updates in it.
        set_up: Begin and end of what is done once only, in it.
    """

    start: int
    end: int = 0
    runs: list[TimedRun] = field(default_factory=list)
    updates: list[tuple[int, int]] = field(default_factory=list)
    set_up: list[tuple[int, int]] = field(default_factory=list)

    @property
    def duration(self) -> int:
        """How long the step took, without what is done once only."""
        return self.end - self.start - sum(end - start for start, end in self.set_up)

    @property
    def is_complete(self) -> bool:
        """Whether the operators of all runs are known."""
        return all(run.is_complete for run in self.runs)
