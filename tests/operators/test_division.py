"""Rounding division: floats by the remainder, large and negative integers, zeros and infinities."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from ..export.against_pytorch import Call, Comparison, assert_same

pytestmark = pytest.mark.engine

FLOATS = torch.tensor([3.3000002, 3.7, 1.0, -1.0, 0.3, 0.0, -0.0, -0.3, 5.0, -5.0, 1e10, math.inf, -math.inf, math.nan])
DIVISORS = torch.tensor([0.1, -0.1, 0.3, 2.0, -2.0, 0.0, -0.0, math.inf, -math.inf, 3.0])[:, None]
INTEGERS = torch.tensor([7, -7, 6, -6, 0, 1, -1, 2**31 - 1, -(2**31), 123456789])
INTEGER_DIVISORS = torch.tensor([3, -3, 2, -2, 1, -1, 7, 16777217])[:, None]


def floor_divide(a: torch.Tensor, b: torch.Tensor | float) -> torch.Tensor:
    """Detaches the operands, because PyTorch has no gradient of floor_divide."""
    return torch.floor_divide(a.detach(), b.detach() if isinstance(b, torch.Tensor) else b)


FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "floor_divide": floor_divide,
    "floor": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "trunc": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "true": lambda a, b: torch.div(a, b, rounding_mode=None),
    "remainder": torch.remainder,
    "fmod": torch.fmod,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_floats(name: str) -> None:
    assert_same(lambda a, b: FUNCTIONS[name](a, b), FLOATS, DIVISORS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers(name: str) -> None:
    function = FUNCTIONS[name]
    assert_same(lambda a: [function(a, b) for b in (0.1, -0.3, 2, 0.0)], FLOATS)


@pytest.mark.parametrize("name", ["floor", "trunc", "remainder", "fmod"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_floats(name: str, dtype: torch.dtype) -> None:
    function = FUNCTIONS[name]
    assert_same(lambda a, b: [function(a.to(dtype), b.to(dtype)), function(a.to(dtype), 0.1)], FLOATS, DIVISORS)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_integers(name: str, dtype: torch.dtype) -> None:
    function = FUNCTIONS[name]
    a, b = INTEGERS.to(dtype), INTEGER_DIVISORS.to(dtype)
    if dtype == torch.int32:
        b = b[b != -1][:, None]  # the negative of the lowest integer overflows
    assert_same(lambda a, b: [function(a, b), function(a, -3), function(a, 0.1)], a, b)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.uint8])
def test_short_integers(dtype: torch.dtype) -> None:
    a = torch.tensor([7, 100, 0, 1, 23]).to(dtype)
    assert_same(lambda a: [function(a, 3) for function in FUNCTIONS.values()], a)


def test_mixed_types() -> None:
    divisor = torch.tensor([0.1, -0.7, 2.5])[:, None]
    whole = torch.tensor([7, -7, 0, 12])
    assert_same(lambda a, b: [function(a, b) for function in FUNCTIONS.values()], whole, divisor)
    assert_same(lambda b: [1 // b.detach(), 3.7 % b.detach(), -2.0 // b.detach()], divisor)


def test_the_example_of_the_documentation() -> None:
    """The result is 37.0 if the quotient is rounded, 36.0 if it is corrected."""
    x = torch.tensor([3.7])
    assert (x // 0.1).item() == 36.0
    assert_same(lambda x: x.detach() // 0.1, x)


def test_numbers_in_double_precision() -> None:
    """torch.onnx would round them to single precision on the way."""
    x = torch.tensor([3.7, 1.0, 1e6], dtype=torch.float64)
    function = lambda x: [torch.full_like(x, 0.1), x * 0.1 - x / 10, 0.1 - x, torch.where(x > 1, 0.1, x)]  # noqa: E731
    comparison = Comparison([Call(function, [x])])
    for ours, theirs in zip(comparison.ours()[0][0], comparison.theirs(0)[0], strict=True):
        assert torch.equal(ours, theirs)
