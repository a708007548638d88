"""Two runners of one graph take turns in the steps of a training, until one has shown to be faster."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TypeVar

from .runner import GraphRunner, Plan

__all__ = ["Turns"]

Result = TypeVar("Result")

# The first runs of each are not counted: they get memory from the system.
_WARM_UP = 2
# Enough runs of each, and enough seconds of them, but not more runs than the last number.
_RUNS, _SECONDS, _MOST_RUNS = 7, 0.25, 100
# The rival must take at most this part of the time: kernels change rounding, so a tie changes nothing.
_FASTER = 0.98


class Turns:
    """Runs plans of two runners in turns, each step once.

    Only runs of the same plans are compared, that is of batches of the same sizes with the same outputs.

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
        self._pairs: dict[int, tuple[Plan, Plan, list[float], list[float]]] = {}

    def add(self, plan: Plan, other: Plan) -> None:
        """Adds plans of both runners for the same batches."""
        self._pairs[id(plan)] = plan, other, [], []

    def run(self, plan: Plan, run: Callable[[Plan], Result]) -> Result:
        """Runs a plan of :attr:`runner`, or the rival's for the same batches.

        Args:
            plan: The plan.
            run: Runs it or the other one, whose turn it is; what it raises is raised, and not counted.
        """
        pair = self._pairs.get(id(plan))
        if pair is None or self.winner is not None:
            return run(plan)
        *plans, own, others = pair
        turn = len(own) > len(others)
        start = time.perf_counter()
        result = run(plans[turn])
        (others if turn else own).append(time.perf_counter() - start)
        self._decide(own[_WARM_UP:], others[_WARM_UP:])
        return result

    def _decide(self, own: list[float], others: list[float]) -> None:
        """Names the winner, once both have run often enough."""
        count, seconds = min(len(own), len(others)), min(sum(own), sum(others))
        if count < _RUNS or (seconds < _SECONDS and count < _MOST_RUNS):
            return
        medians = statistics.median(own), statistics.median(others)
        won = medians[1] <= _FASTER * medians[0]
        self.winner = self.rival if won else self.runner
        self._decided(won, medians)
