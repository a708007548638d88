"""Two runners of one graph take turns in the steps of a training, until one has shown to be faster."""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

from .runner import GraphRunner, Plan

__all__ = ["Turns"]

Result = TypeVar("Result")

# The first comparisons are not counted: runs get memory from the system.
_WARM_UP = 2
# Enough comparisons, and enough seconds of runs of each, but not more comparisons than the last number.
_RUNS, _SECONDS, _MOST_RUNS = 7, 0.25, 100
# Plans whose last run is remembered; a training may have batches of very many sizes.
_MAXIMUM_PLANS = 256
# The rival must take at most this part of the time: kernels change rounding, so a tie changes nothing.
_FASTER = 0.98


class Turns:
    """Runs plans of two runners in turns, each step once.

    A run is compared with the next one of the same plan, that is of a batch of the same sizes with the same outputs.
    The order changes (own, rival, rival, own, ...), so that neither gets all first micro-batches of windows.

    Args:
        runner: The runner that ran until now.
        rival: Another runner of a graph with the same inputs and outputs.
        decided: Called once with whether the rival won, and the seconds that a run of each takes, the rival's last.

    Attributes:
        runner, rival: As given.
        winner: The faster runner; None while it is open.
    """

    def __init__(
        self, runner: GraphRunner, rival: GraphRunner, decided: Callable[[bool, tuple[float, float]], None]
    ) -> None:
        self.runner, self.rival, self._decided = runner, rival, decided
        self.winner: GraphRunner | None = None
        self._pairs: dict[int, tuple[tuple[Plan, Plan], list[float]]] = {}
        self._times: tuple[list[float], list[float]] = [], []

    def add(self, plan: Plan, other: Plan) -> None:
        """Adds plans of both runners for the same batches."""
        self._pairs[id(plan)] = (plan, other), []
        if len(self._pairs) > _MAXIMUM_PLANS:
            del self._pairs[next(iter(self._pairs))]  # the oldest

    def run(self, plan: Plan, run: Callable[[Plan], Result]) -> Result:
        """Runs a plan of :attr:`runner`, or the rival's for the same batches.

        Args:
            plan: The plan.
            run: Runs it or the other one, whose turn it is; what it raises is raised, and not counted.
        """
        pair = self._pairs.get(id(plan))
        if pair is None or self.winner is not None:
            return run(plan)
        plans, times = pair
        turn = (len(times) + 1) // 2 % 2
        start = time.perf_counter()
        result = run(plans[turn])
        times.append(time.perf_counter() - start)
        if len(times) % 2 == 0:
            for which, seconds in zip((1 - turn, turn), times[-2:], strict=True):
                self._times[which].append(seconds)
            self._decide(*(times[_WARM_UP:] for times in self._times))
        return result

    def _decide(self, own: list[float], rivals: list[float]) -> None:
        """Names the winner, once there are enough comparisons."""
        if len(own) < _RUNS or (min(sum(own), sum(rivals)) < _SECONDS and len(own) < _MOST_RUNS):
            return
        won = statistics.median(map(operator.truediv, rivals, own)) <= _FASTER
        self.winner = self.rival if won else self.runner
        self._decided(won, (statistics.median(own), statistics.median(rivals)))
