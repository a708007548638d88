"""Functions that are assigned to ``forward`` of an ``ORTModule``, as TRL and accelerate do."""

from __future__ import annotations

import copy
import functools
import types
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from ort_trainer import ORTModule

from .pairs import assert_same_gradients, close

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
KEPT: dict[str, Any] = {}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)

    def predict(self, x: torch.Tensor) -> Any:
        """Calls forward() in two ways."""
        return self(x).argmax(1), self.forward(x)


def other(self: Any, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
    """Another forward pass."""
    return self.second(x).tanh() * scale


@pytest.fixture
def nets() -> tuple[Net, Any, list[int]]:
    """A module, its copy as an ORTModule, and a list that gets an entry for each export."""
    exports: list[int] = []
    eager = Net()
    ours = ORTModule(copy.deepcopy(eager))
    ours._graphs.exported = lambda *_: exports.append(1)
    return eager, ours, exports


@pytest.mark.parametrize("bind", [types.MethodType, lambda function, net: functools.partial(function, net)])
def test_another_forward_pass_becomes_a_graph(bind: Any, nets: tuple[Net, Any, list[int]]) -> None:
    eager, ours, exports = nets
    ours(X)
    for net in (eager, ours):
        net.forward = bind(other, net)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "PyTorch runs this call")
        assert_same_gradients(eager, ours, lambda net: net(X).sum().backward())
        assert_same_gradients(eager, ours, lambda net: net(X, scale=3.0).sum().backward())
    assert len(exports) == 3 and ours.first.weight.grad is None
    close(ours.predict(X), eager.predict(X))
    duplicate = copy.deepcopy(ours)
    with torch.no_grad():
        duplicate.second.weight.zero_()
    close(ours(X), eager(X))
    close(duplicate(X), (torch.zeros(4, 3) + eager.second.bias).tanh() * 2)
    for net in (eager, ours, duplicate):
        del net.forward
    close(ours(X), eager(X))
    close(ours.predict(X), eager.predict(X))
    close(duplicate(X), eager(X))


def _around(before: Any) -> Any:
    return lambda x: before(x) + 1


def _in_a_global(before: Any) -> Any:
    KEPT["before"] = before
    return lambda x: KEPT["before"](x) + 1


class _Adds:
    def __init__(self, before: Any) -> None:
        self.before = before

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.before(x) + 1


def _of_a_hook(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return net._before(x) + 1


@pytest.mark.parametrize("make", [_around, _Adds, None, _in_a_global], ids=["closure", "object", "hook", "hidden"])
def test_functions_around_the_graphs(make: Any, nets: tuple[Net, Any, list[int]]) -> None:
    """They call the graphs that are there; one whose way to them is hidden is itself captured."""
    eager, ours, exports = nets
    close(ours(X), eager(X))
    before = ours.forward
    if make is None:
        ours._before = before
        ours.forward = functools.partial(_of_a_hook, ours)
    else:
        ours.forward = make(before)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "PyTorch runs this call")
        for _ in range(2):
            close(ours(X), eager(X) + 1)
    assert len(exports) == (2 if make is _in_a_global else 1)
    duplicate = copy.deepcopy(ours)
    with torch.no_grad():
        ours.first.weight.add_(1)
    if make is not _in_a_global:  # which is of the original, as in PyTorch
        close(duplicate(X), eager(X) + 1)
    with torch.no_grad():
        ours.first.weight.copy_(eager.first.weight)
    around = ours.forward
    ours.forward = before
    assert ours.forward is before
    close(ours(X), eager(X))
    ours.forward = around
    assert ours.forward is around
    close(ours(X), eager(X) + 1)


def _with_another_way(net: Any) -> Any:
    """Returns another forward pass for some calls, as TRL assigns it."""
    before = net.forward

    @functools.wraps(type(net).forward)
    def forward(self: Any, x: torch.Tensor, other: bool = False) -> torch.Tensor:
        return self.second(x).tanh() if other else before(x)

    return types.MethodType(forward, net)


def test_a_function_that_does_not_call_the_graphs_becomes_one(nets: tuple[Net, Any, list[int]]) -> None:
    eager, ours, exports = nets
    for net in (eager, ours):
        net.forward = _with_another_way(net)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "PyTorch runs this call")
        close(ours(X), eager(X))
        for count in (1, 2, 2):  # the first call shows that it does not
            assert_same_gradients(eager, ours, lambda net: net(X, other=True).sum().backward())
            assert len(exports) == count
        around = ours.forward
        ours.forward = lambda *args, **kwargs: around(*args, **kwargs) + 1
        close(ours(X, other=True), eager(X, other=True) + 1)
        close(ours(X), eager(X) + 1)
    close(ours.predict(X), eager.predict(X))


class _Shrinking:
    """Keeps results, and returns smaller ones of them, as MatryoshkaLoss of sentence-transformers does."""

    def __init__(self, before: Any) -> None:
        self.before, self.kept = before, None

    def __call__(self, x: torch.Tensor, size: int) -> torch.Tensor:
        if self.kept is None:
            self.kept = self.before(x)
        return self.kept[:, :size]


def test_a_function_that_keeps_results_is_not_captured(nets: tuple[Net, Any, list[int]]) -> None:
    eager, ours, exports = nets

    def step(net: Any) -> None:
        before = net.forward
        net.forward = _Shrinking(before)
        (net(X, 3).sum() + net(X, 2).square().sum() + net(X, 1).sum()).backward()
        net.forward = before

    for _ in range(3):
        assert_same_gradients(eager, ours, step)
    assert len(exports) == 1
