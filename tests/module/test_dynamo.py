"""``torch.compile(model, backend="ort_trainer")`` against the model itself."""

from __future__ import annotations

import copy
import operator
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from ort_trainer import ExportError
from ort_trainer.export.dynamo import ort_trainer
from ort_trainer.kernels.programs.partition import partition

from ..zoo import Applies
from .pairs import Heads, assert_same_gradients, close

X = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))


def compiled(module: nn.Module) -> Any:
    torch._dynamo.reset()
    return torch.compile(copy.deepcopy(module), backend=ort_trainer)


def test_it_is_found_by_its_name() -> None:
    assert "ort_trainer" in torch._dynamo.list_backends()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.heads, self.drop = Heads(), nn.Dropout(0.3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.heads(x)["heads"]
        self.calls += 1
        if first.sum() > 0:  # a graph can't do this
            first = -first
        return self.drop(first).sum() + second[: int(x[0, 0].abs() * 0) + 2].sum()


def test_values_decide_what_runs() -> None:
    eager = Branches()
    ours = compiled(eager)
    for x in (X, X[:3], -X[:4]):

        def run(module: nn.Module, x: torch.Tensor = x) -> None:
            torch.manual_seed(2)
            module(x).backward()

        assert_same_gradients(eager, ours, run)
    close(ours._orig_mod.state_dict(), eager.state_dict())
    assert ours.calls == eager.calls == 3


def test_a_number_that_changes_needs_no_pytorch() -> None:
    eager = Applies(lambda layer, x: (layer(x) * layer.factor).square().sum(), 6)
    eager.linear.factor = 1.0
    ours = compiled(eager)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as the one that PyTorch runs a part
        for factor in (1.0, 0.7, 0.4, 0.3):
            eager.linear.factor = ours._orig_mod.linear.factor = factor
            assert_same_gradients(eager, ours, lambda module: module(X).backward())


def test_order_in_memory() -> None:
    eager = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2))
    eager = eager.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    ours = compiled(eager)
    for x in (torch.randn(2, 3, 6, 6), torch.randn(4, 3, 6, 6)):
        found, expected = ours(x), eager(x)
        close(found, expected)
        assert found.stride() == expected.stride()
        assert_same_gradients(eager, ours, lambda module: module(x).square().sum().backward())  # noqa: B023


def test_what_no_program_can_run_runs_in_pytorch() -> None:
    class Complex(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten._foreach_add.List([x], [x])[0] * torch.ops.prims.abs(x)

    with pytest.warns(UserWarning, match="lets PyTorch run a part of the model"):
        close(compiled(Complex())(X), 2 * X * X.abs())


def test_an_operator_on_the_state_of_a_generator() -> None:
    # What TorchDynamo makes of a checkpoint of activations with dropout.
    graph = torch.fx.Graph()
    given = graph.placeholder("x")
    given.meta["val"] = X
    saves = torch.ops.higher_order.run_and_save_rng_state
    both = graph.call_function(saves, (torch.ops.aten.rand_like.default, given))
    drawn = graph.call_function(operator.getitem, (both, 1))
    drawn.meta["val"] = X
    graph.output((drawn,))
    with pytest.raises(ExportError, match="run_and_save_rng_state is not a plain operator"):
        partition(graph)
