"""When a run is captured, as far as it can be tested without CUDA: with stand-ins for graph and generator."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from ort_trainer.engine.programs import cuda_graphs
from ort_trainer.engine.programs.cuda_graphs import CapturedRun, Captures

META = torch.device("meta")
STATE = [torch.ones(2, device=META)]


class Graph:
    """Stands for a captured run."""

    def __init__(self, function: Any, state: Any, others: Any, beside: Any = None) -> None:
        self.function, self.state, self.beside = function, state, beside

    def run(self, others: Any) -> Any:
        return ("captured", *self.function([*self.state, *others]))


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "CapturedRun", Graph)
    monkeypatch.setattr(cuda_graphs, "default_generator", lambda _: torch.Generator())
    monkeypatch.setattr(cuda_graphs, "_no_waiting", contextlib.nullcontext)


def function(values: list[torch.Tensor]) -> tuple[Any, ...]:
    return (len(values),)


def test_a_size_is_captured_when_it_comes_for_the_fourth_time_and_at_most_four_are() -> None:
    captures: Any = Captures("auto", META)
    plans: list[dict[Any, Any]] = [{} for _ in range(5)]
    runs = [[captures.run(plan, function, STATE, []) for _ in range(5)] for plan in plans]
    assert runs[:4] == [[(1,)] * 3 + [("captured", 1)] * 2] * 4
    assert runs[4] == [(1,)] * 5, "each keeps its gradients in memory"
    assert plans[0][Graph].beside is None and plans[1][Graph].beside is not None
    plans[0].clear()  # as after a parameter has moved
    assert captures.run(plans[0], function, STATE, []) == (1,)


@pytest.mark.parametrize("way", ["auto", "on"])
def test_what_reads_values_back_is_not_captured(way: str) -> None:
    count = 0

    def reads(values: list[torch.Tensor]) -> tuple[Any, ...]:
        nonlocal count
        count += 1
        if count == 3:
            raise RuntimeError("called a synchronizing CUDA operation")
        return (count,)

    captures: Any = Captures(way, META)
    plan: dict[Any, Any] = {}
    with (
        pytest.raises(RuntimeError, match="the step can't be a CUDA graph: an operator reads values back: called")
        if (way == "on")
        else contextlib.nullcontext()
    ):
        assert [captures.run(plan, reads, STATE, []) for _ in range(4)] == [(1,), (2,), (4,), (5,)]
    if way == "on":
        with pytest.raises(RuntimeError, match="utils.cuda_graphs is 'on'"):
            captures.run(plan, reads, STATE, [])


def test_a_number_on_the_cpu_would_be_kept_by_a_graph() -> None:
    captures: Any = Captures("auto", META)
    plan: dict[Any, Any] = {}
    assert [captures.run(plan, function, [*STATE, torch.tensor(2.0)], []) for _ in range(6)] == [(2,)] * 6
    assert CapturedRun not in plan
