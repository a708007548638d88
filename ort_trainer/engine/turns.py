"""Two graphs of one computation take turns in the steps of a training, until one has shown to be faster."""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

from .runner import GraphRunner, Plan

Result = TypeVar("Result")
Decided = Callable[[bool, tuple[float, float]], None]
"""Called with whether the rival won, and the seconds that a run of each takes, the rival's last."""

# The first comparisons are not counted: runs get memory from the system.
_WARM_UP = 2
# Enough comparisons, and enough seconds of runs of each, but not more comparisons than the last number.
_RUNS, _SECONDS, _MOST_RUNS = 7, 0.25, 100
# Plans whose last run is remembered; a training may have batches of very many sizes.
_MAXIMUM_PLANS = 256
# The rival must take at most this part of the time: kernels change rounding, so a tie changes nothing.
_FASTER = 0.98


class Race:
    """The times of two graphs, until one has shown to be faster.

    Args:
        decided: Called once.

    Attributes:
        won: Whether the rival is the faster one; None while it is open.
    """

    def __init__(self, decided: Decided) -> None:
        self._decided = decided
        self._times: tuple[list[float], list[float]] = [], []
        self.won: bool | None = None

    def add(self, own: float, rivals: float) -> None:
        """Adds the seconds of two runs that can be compared, and names the winner once there are enough."""
        for times, seconds in zip(self._times, (own, rivals), strict=True):
            times.append(seconds)
        mine, others = (times[_WARM_UP:] for times in self._times)
        enough = min(sum(mine), sum(others)) >= _SECONDS or len(mine) >= _MOST_RUNS
        if self.won is None and enough and len(mine) >= _RUNS:
            self.won = statistics.median(map(operator.truediv, others, mine)) <= _FASTER
            self._decided(self.won, (statistics.median(mine), statistics.median(others)))


class Lane:
    """Runs that can be compared, as they have the same sizes and outputs: each with the next one of the other graph.

    The order changes (own, rival, rival, own, ...), so that neither gets all first micro-batches of windows.

    Args:
        race: Gets the times.
    """

    def __init__(self, race: Race) -> None:
        self._race, self._ended = race, 0
        self._open: list[float | None] = [None, None]

    @property
    def turn(self) -> int:
        """Whose turn the next run is: 0, or 1 for the rival."""
        return (self._ended + 1) // 2 % 2

    def end(self, turn: int, seconds: float) -> None:
        """Takes the time of a run that has ended; one that fails is left out."""
        self._ended += 1
        self._open[turn] = seconds
        own, rivals = self._open
        if own is not None and rivals is not None:
            self._open = [None, None]
            self._race.add(own, rivals)


class Turns:
    """Runs plans of two runners in turns, each step once.

    Args:
        runner: The runner that ran until now.
        rival: Another runner of a graph with the same inputs and outputs.
        decided: Called once.

    Attributes:
        runner, rival: As given.
    """

    def __init__(self, runner: GraphRunner, rival: GraphRunner, decided: Decided) -> None:
        self.runner, self.rival, self._race = runner, rival, Race(decided)
        self._pairs: dict[int, tuple[tuple[Plan, Plan], Lane]] = {}

    @property
    def winner(self) -> GraphRunner | None:
        """The faster runner; None while it is open."""
        won = self._race.won
        return None if won is None else self.rival if won else self.runner

    def add(self, plan: Plan, other: Plan) -> None:
        """Adds plans of both runners for the same batches."""
        self._pairs[id(plan)] = (plan, other), Lane(self._race)
        if len(self._pairs) > _MAXIMUM_PLANS:
            del self._pairs[next(iter(self._pairs))]  # the oldest

    def run(self, plan: Plan, run: Callable[[Plan], Result]) -> Result:
        """Runs a plan of :attr:`runner`, or the rival's for the same batches.

        Args:
            plan: The plan.
            run: Runs it or the other one, whose turn it is; what it raises is raised, and not counted.
        """
        pair = self._pairs.get(id(plan))
        if pair is None or self._race.won is not None:
            return run(plan)
        plans, lane = pair
        turn = lane.turn
        start = time.perf_counter()
        result = run(plans[turn])
        lane.end(turn, time.perf_counter() - start)
        return result
