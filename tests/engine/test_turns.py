"""Two runners of a graph in turns: which runs when, and which is found to be faster.

Runs of plans that only one of them has are not compared; and once it is decided, the caller runs the winner.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from ort_trainer.engine import turns as turns_module
from ort_trainer.engine.turns import Turns


class Clock:
    """Stands still, except while a plan runs."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


def run_until_decided(monkeypatch: pytest.MonkeyPatch, own: float, rivals: float) -> tuple[list[str], list[Any]]:
    clock, ran, decisions = Clock(), list[str](), list[Any]()
    monkeypatch.setattr(turns_module, "time", clock)
    runner: Any = SimpleNamespace()
    turns = Turns(runner, SimpleNamespace(), lambda *decision: decisions.append(decision))  # type: ignore[arg-type]
    plan, other, another = (SimpleNamespace(name=name) for name in ("own", "rival", "other sizes"))
    turns.add(plan, other)  # type: ignore[arg-type]

    def run(plan: Any) -> str:
        clock.now += {"own": own, "rival": rivals}.get(plan.name, 1e3)
        ran.append(plan.name)
        return str(plan.name)

    for _ in itertools.takewhile(lambda _: turns.winner is None, range(1000)):
        turns.run(plan, run)  # type: ignore[arg-type]
        assert turns.run(another, run) == "other sizes"  # type: ignore[arg-type]
    assert turns.run(plan, run) == "own"  # type: ignore[arg-type]
    assert turns.winner is (turns.rival if decisions[0][0] else turns.runner)
    return [name for name in ran[:-1] if name != "other sizes"], decisions


@pytest.mark.parametrize(
    ("own", "rivals", "won", "steps"), [(0.1, 0.09, True, 18), (0.1, 0.099, False, 18), (0.011, 0.02, False, 50)]
)
def test_the_faster_wins_after_enough_steps(
    own: float, rivals: float, won: bool, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rival that is hardly faster does not: other kernels round otherwise."""
    ran, decisions = run_until_decided(monkeypatch, own, rivals)
    assert ran == (["own", "rival", "rival", "own"] * steps)[:steps]
    ((has_won, seconds),) = decisions
    assert has_won is won and seconds == pytest.approx((own, rivals))


def test_a_run_that_fails_does_not_count() -> None:
    decisions: list[Any] = []
    turns = Turns(SimpleNamespace(), SimpleNamespace(), lambda *decision: decisions.append(decision))  # type: ignore[arg-type]
    plan: Any = SimpleNamespace(name="own")
    turns.add(plan, SimpleNamespace(name="rival"))  # type: ignore[arg-type]

    def fail(plan: Any) -> None:
        raise RuntimeError(plan.name)

    for _ in range(30):
        with pytest.raises(RuntimeError, match="own"):
            turns.run(plan, fail)

    def name(plan: Any) -> str:
        return str(plan.name)

    assert turns.run(plan, name) == "own" and turns.run(plan, name) == "rival" and not decisions
