"""Graphs of programs as one function, against their programs run one by one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from ort_trainer import ORTTrainer, optim
from ort_trainer.core.dims import evaluate, evaluate_number
from ort_trainer.engine.programs import Program
from ort_trainer.engine.programs.compiler import loaded
from ort_trainer.engine.programs.program import find_operator
from ort_trainer.engine.programs.runner import ProgramRunner
from ort_trainer.step import ProgramGraph, Step
from ort_trainer.step.program_graph import Constant, ProgramCall

from ...helpers import MLP, mlp_batches, mlp_trainer
from ...train.test_kernels import MODELS, trainer


def interpreted(graph: Step, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Runs a graph node after node; nothing is compiled or freed."""
    assert graph.programs is not None
    calls, constants = loaded(graph.programs)
    values = {**values, **constants}
    for call in calls:
        taken = [values[name] for name in call.inputs]
        sizes = {symbol: taken[index].shape[axis] for symbol, (index, axis) in call.program.symbols.items()}
        values.update(zip(call.outputs, results_of(call.program, taken, sizes), strict=True))
    return values


def results_of(program: Program, taken: list[torch.Tensor], sizes: dict[str, int]) -> list[torch.Tensor]:
    known: dict[str, list[Any]] = {"v": [], "x": [back(*pair) for pair in zip(taken, program.inputs, strict=True)]}

    def value(argument: Any) -> Any:
        if isinstance(argument, list):
            return [value(entry) for entry in argument]
        if not isinstance(argument, dict):
            return argument
        ((kind, what),) = argument.items()
        computed = {"dim": evaluate, "number": evaluate_number, "torch": lambda name, _: getattr(torch, name)}
        return computed[kind](what, sizes) if kind in computed else known[kind][what]

    for target, args, kwargs in program.steps:
        known["v"].append(find_operator(target)(*map(value, args), **{name: value(kwargs[name]) for name in kwargs}))
    results = [(known["v"][step], order) for step, order in program.results]
    return [(result if order is None else result.permute(order)).contiguous() for result, order in results]


def back(value: torch.Tensor, order: list[int] | None) -> torch.Tensor:
    return value if order is None else value.permute([order.index(axis) for axis in range(len(order))])


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_as_one_function_gives_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several steps: dropout, attention, an LSTM, convolutions with batch norm, and batches of several sizes."""
    make, batch, shape = MODELS[name]
    model = make()

    def train() -> tuple[list[torch.Tensor], ORTTrainer]:
        torch.manual_seed(1)
        ours = trainer(copy.deepcopy(model), shape, kernels="pytorch")
        return [value for size in (4, 4, 6, 1) for value in ours.train_step(*batch(size))], ours

    found, ours = train()

    def uncompiled(runner: ProgramRunner, outputs: list[str]) -> Callable[..., tuple[torch.Tensor, ...]]:
        def run(values: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
            results = interpreted(runner.step, dict(zip(runner.inputs, values, strict=True)))
            return tuple(results[name] for name in outputs)

        return run

    with monkeypatch.context() as patch:
        patch.setattr(ProgramRunner, "compiled", uncompiled)
        expected, theirs = train()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    states = [each.state_dict(pytorch_format=True) for each in (ours, theirs)]
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())


def test_a_damaged_graph_is_refused() -> None:
    call = ProgramCall("node", "key", ("x",), ("y",))
    data = ProgramGraph({"key": "{}"}, (call,), {"c": Constant("float32", (2,), b"1234")}).to_bytes()
    with pytest.raises(ValueError, match="constant 'c' is damaged: 4 bytes of float32, shape \\[2\\]"):
        loaded(ProgramGraph.from_bytes(data))
    for wrong in (data[:-1], data + b"1", data[:20], ProgramGraph({}, (call,)).to_bytes()):
        with pytest.raises(ValueError, match="this is not a graph of programs"):
            ProgramGraph.from_bytes(wrong)


def test_a_part_of_a_graph() -> None:
    constants = {"c": Constant("bool", (), b"1"), "d": Constant("bool", (), b"1")}
    calls = (
        ProgramCall("a", "1", ("x", "c"), ("y", "z")),
        ProgramCall("b", "2", ("w", "d"), ("v",)),
        ProgramCall("c", "1", ("y",), ("u",)),
    )
    part = ProgramGraph({"1": "one", "2": "two"}, calls, constants).pruned(["u"])
    assert part == ProgramGraph({"1": "one"}, (calls[0], calls[2]), {"c": constants["c"]})
    assert part.inputs == {"x"}


def test_scatters_are_deterministic_if_that_is_asked_for() -> None:
    """PyTorch adds values at equal indices in any order, with several threads."""

    class Gathers(MLP):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = x[:, 0].abs().long().clamp(max=2).repeat_interleave(200_000)
            return super().forward(x) + (self.table[rows] * x[0, 0]).view(len(x), -1).sum(1, keepdim=True).sin()

    (x, label), *_ = mlp_batches(1, 8)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        options = {"utils": {"kernels": "pytorch"}, "debug": {"deterministic_compute": True}}
        ours = mlp_trainer(options, optim.SGDConfig(lr=0.0), Gathers())
        gradients = []
        for _ in range(4):
            ours.train_step(x, label)
            gradients.append(ours.get_gradient("table").clone())
    finally:
        torch.set_num_threads(threads)
    assert not torch.are_deterministic_algorithms_enabled()
    assert all(torch.equal(gradients[0], other) for other in gradients)
