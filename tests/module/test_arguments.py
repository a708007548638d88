"""What an ``ORTModule`` keeps of arguments and results beyond values: shared memory, strides, objects' attributes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ort_trainer import ORTModule

from ..zoo import Applies
from .pairs import close

X = torch.ones(2, 4)
LONG = torch.arange(48.0)


def check(function: Callable[..., Any], use: Callable[[nn.Module], Any], graphs: int) -> None:
    """Asserts that a use of the module gives the same values and gradients with graphs, and how many there are."""
    eager, ours = Applies(function), ORTModule(Applies(function))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "PyTorch runs this call")
        expected, found = use(eager), use(ours)
    close(found, expected)
    close(ours.linear.weight.grad, eager.linear.weight.grad)
    assert sum(map(len, ours._graphs._by_kind.values())) == graphs


def change_first(module: nn.Module) -> Any:
    """Doubles the first result in place, and differentiates the second."""
    first, second = module(X)
    first.mul_(2)
    second.sum().backward()
    return second.detach()


@pytest.mark.parametrize(
    ("function", "graphs"),
    [
        (lambda y: (y, y), 1),
        (lambda y: (y, y.view(-1)), 1),
        (lambda y: (y, y[:, :2]), 0),
        (lambda y: (y, y.t()), 1),
        (lambda y: (y.t(), y), 1),
        (lambda y: (y.view(-1, 2, 2).permute(2, 0, 1), y), 1),
        (lambda y: (y, y.t()[1:]), 0),
        (lambda y: (y.t(), y.t().unsqueeze(0)), 0),
    ],
    ids=["same", "view", "part", "transposed", "transposed first", "permuted", "part of transposed", "two transposed"],
)
def test_results_that_share_memory(function: Any, graphs: int) -> None:
    check(lambda linear, x: function(linear(x)), change_first, graphs)


@pytest.mark.parametrize(
    ("view", "graphs"),
    [(lambda y: y.t(), 1), (lambda y: y.unsqueeze(1), 1), (lambda y: y.view(-1, 2, 2), 1), (lambda y: y[:1], 1)],
    ids=["transposed", "one more axis", "other axes", "first row"],
)
def test_results_of_one_row_that_share_memory(view: Any, graphs: int) -> None:
    """In memory, a row looks like a column; more rows don't."""

    def use(module: nn.Module) -> Any:
        results = [module(LONG[: rows * 4].view(rows, 4) / 48) for rows in (1, 3)]
        results[1][1].exp().sum().backward()
        return [value.detach() for result in results for value in result]

    def of(linear: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = linear(x)
        return y, view(y)

    check(of, use, graphs)


def test_a_transposed_result_of_one_element() -> None:
    """In memory, it looks like the result itself: PyTorch computes what grows in both dimensions."""

    def use(module: nn.Module) -> Any:
        sizes = ((3, 5), (1, 1), (1, 4), (4, 6))
        return [module(LONG[: rows * columns].view(rows, columns))[1].detach() for rows, columns in sizes]

    check(lambda linear, x: (y := x * linear.weight[0, 0], y.t()), use, 2)


def test_parts_of_one_memory_that_do_not_overlap() -> None:
    check(lambda linear, x: linear(x).chunk(2, 1), lambda module: module(X)[1].sum().backward(), 1)


@pytest.mark.parametrize(
    ("view", "graphs"),
    [(lambda x: x, 1), (lambda x: x.view(-1), 1), (lambda x: x.t(), 1), (lambda x: x[0], 0)],
    ids=["same", "view", "transposed", "part"],
)
def test_arguments_that_are_returned(view: Any, graphs: int) -> None:
    def use(module: nn.Module) -> Any:
        x = X.clone()
        view_of_x, result = module(x)
        result.sum().backward()
        view_of_x.add_(1)
        return x, view_of_x is x

    check(lambda linear, x: (view(x), linear(x)), use, graphs)


def test_a_weight_that_is_returned() -> None:
    ours = ORTModule(Applies(lambda linear, x: (linear.weight, linear(x))))
    assert ours(X)[0] is ours.linear.weight


def test_one_tensor_for_two_arguments() -> None:
    def add(linear: nn.Module, a: torch.Tensor, value: torch.Tensor) -> Any:
        a.add_(1)
        return linear(a) * value * (2 if a is value else 3)

    def use(module: nn.Module) -> Any:
        both, results = X.clone(), []
        for a, value in ((X.clone(), X.clone()), (both, both), (X.clone(), X.clone())):
            results.append(module(a, value=value))
            results[-1].sum().backward()
        overlapping = torch.ones(3, 4)
        return *(result.detach() for result in results), module(overlapping[:2], overlapping[1:]).detach()

    check(add, use, 2)


@pytest.mark.parametrize(
    ("function", "graphs"),
    [
        (lambda linear, x: x.as_strided((x.shape[0], 3), (x.stride(0), x.stride(1))) * linear.weight.sum(), 2),
        (lambda linear, x: x.reshape(-1)[: x.shape[0]] * linear.weight.sum() * (2 if x.is_contiguous() else 3), 3),
        (lambda linear, x: x * linear.weight.sum() * (2 if x.storage_offset() else 3), 0),
    ],
    ids=["strides", "contiguous", "offset"],
)
def test_memory_that_forward_reads(function: Any, graphs: int) -> None:
    turned, offset, gaps = LONG.view(8, 6).t(), LONG.view(6, 8)[1:], torch.arange(96.0).view(12, 8)[::2]

    def use(module: nn.Module) -> Any:
        results = [module(value) for value in (LONG.view(6, 8), turned, offset, gaps)]
        sum(result.sum() for result in results).backward()
        return [result.detach() for result in results]

    check(function, use, graphs)


class Settings:
    """A plain object."""

    def __init__(self, scale: float) -> None:
        self.scale = scale


class Slotted:
    __slots__ = ("scale",)

    def __init__(self, scale: float) -> None:
        self.scale = scale


@pytest.mark.parametrize("kind", [Settings, Slotted])
def test_attributes_of_objects(kind: Any) -> None:
    def use(module: nn.Module) -> Any:
        settings = kind(1.0)
        first = module(X, settings)
        settings.scale = 5.0
        return first.detach(), module(X, settings).detach(), module(X, settings).detach()

    check(lambda linear, x, settings: linear(x) * settings.scale, use, 2)


def test_closures() -> None:
    def use(module: nn.Module) -> Any:
        scale, results = 1.0, []

        def scaled(x: torch.Tensor) -> torch.Tensor:
            return x * scale

        for scale in (1.0, 5.0):  # noqa: B007 - the function reads it
            results.append(module(X, scaled).detach())
        return results

    check(lambda linear, x, function: function(linear(x)), use, 2)


def _generator() -> Iterator[float]:
    yield from (1.0, 2.0, 3.0)


@pytest.mark.parametrize("make", [lambda: iter([1.0, 2.0]), _generator, lambda: Applies(lambda *_: 2.0).cpu])
def test_what_has_a_state_that_cannot_be_seen(make: Any) -> None:
    def use(module: nn.Module) -> Any:
        value = make()
        return [module(X, value).detach() for _ in range(2)]

    check(lambda linear, x, value: linear(x) * (next(value) if hasattr(value, "__next__") else 2), use, 0)


def test_arguments_that_forward_fills() -> None:
    def add(linear: nn.Module, x: torch.Tensor, kept: list[Any], settings: Settings) -> torch.Tensor:
        kept.append(linear(x))
        settings.scale += 1
        return kept[-1] * 2

    def use(module: nn.Module) -> Any:
        kept, settings = [], Settings(0.0)
        for _ in range(2):
            module(X, kept, settings)
        return [value.detach() for value in kept], settings.scale

    check(add, use, 0)


def _fills(linear: nn.Module, x: torch.Tensor, features: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    """Changes two dicts and returns one, as modules of sentence-transformers do."""
    features["y"] = linear(features["x"]).tanh()
    features.update(mean=features["y"].mean(0), kind="embedding", x=x)
    rest["first"] = features.pop("first")
    return features


def test_dicts_that_forward_fills() -> None:
    def use(module: nn.Module) -> Any:
        found = []
        for size in (3, 3, 5):
            x, first, settings = torch.ones(size, 4), torch.arange(size), [1, 2]
            features, rest = {"x": x * 2, "first": first, "settings": settings}, {}
            result = module(x, features, rest=rest)
            assert result is features and features["settings"] is settings
            assert features["x"] is x and rest["first"] is first
            (features["y"].square().sum() + features["mean"].sum()).backward()
            found += [list(features), *features.values(), rest]
        return found

    check(_fills, use, 1)
    with pytest.warns(UserWarning, match=r"a dict among its arguments, which debug.verify_every can't compare"):
        ORTModule(Applies(_fills), {"debug": {"verify_every": 1}})(X, {"x": X, "first": X}, {})


def test_lists_in_dicts_that_forward_fills() -> None:
    def add(linear: nn.Module, features: dict[str, Any]) -> torch.Tensor:
        features["kept"].append(linear(features["x"]))
        return features["kept"][-1]

    def use(module: nn.Module) -> Any:
        kept: list[Any] = []
        module({"x": X, "kept": kept}).sum().backward()
        return kept[0].detach()

    check(add, use, 0)


def test_numbers_that_are_equal_and_differ() -> None:
    def use(module: nn.Module) -> Any:
        return [module(X, value).detach() for value in (0.0, -0.0, float("nan"), float("nan"))]

    check(lambda linear, x, z: linear(x).detach().copysign(torch.tensor(1.0 if z != z else z)), use, 3)
