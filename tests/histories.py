"""Runs random histories: Hypothesis' state machines, whose actions follow each other in any order."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test


def run_histories(machine: type[RuleBasedStateMachine], count: int = 5, actions: int = 12) -> None:
    """Runs a few histories, the same each time; one that fails is not shrunk, which would take minutes."""
    _run(machine, count, actions, is_random=False)


def run_many_histories(machine: type[RuleBasedStateMachine]) -> None:
    """Runs as many histories as the environment variable HISTORIES says, others each time, and shrinks a failure."""
    _run(machine, int(os.environ.get("HISTORIES", "200")), 30, is_random=True)


def _run(machine: type[RuleBasedStateMachine], count: int, actions: int, *, is_random: bool) -> None:
    chosen = settings(
        max_examples=count,
        stateful_step_count=actions,
        deadline=None,
        database=None,
        derandomize=not is_random,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, *((Phase.shrink,) if is_random else ())),
    )
    run_state_machine_as_test(machine, settings=chosen)
