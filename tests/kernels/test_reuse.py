"""Results overwrite operands only if nothing reads those afterwards, and the numbers stay the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ort_trainer.kernels.programs.reuse import _ROW_BY_ROW

from .calls import LARGE, Function, trained

PLACES = torch.randint(0, 250, (128, 250))
WIDE = torch.ones(250, dtype=torch.float64)
# Functions of a linear layer's (128, 250) results, and the overload that must be called, or must not.
REUSED: dict[str, tuple[Function, str]] = {
    "a chain": (lambda x: torch.sigmoid(torch.tanh(x * 2)), "aten.tanh.out"),
    "a view": (lambda x: torch.tanh((x * 2).view(-1)), "aten.tanh.out"),
    "a transposed operand": (lambda x: torch.tanh((x * 2).t()), "aten.tanh.out"),
    "the second operand": (lambda x: x[:1] + x * 2, "aten.add.out"),
    "a number": (lambda x: (x + 3) * 0.5, "aten.mul.out"),
    "a gradient": (F.gelu, "aten.gelu_backward.grad_input"),
    "rows": (lambda x: torch.softmax(x * 2, 1) * 100, "aten._softmax.out"),
    "what some elements are put into": (lambda x: (x * 2).scatter_add(1, PLACES, x), "aten.scatter_add_.default"),
}
KEPT: dict[str, tuple[Function, str]] = {
    "read later": (lambda x: torch.tanh(h := x * 2) * torch.sin(h), "aten.tanh.out"),
    "read by the backward pass": (lambda x: torch.sin(x * 2), "aten.sin.out"),
    "a view that is read later": (lambda x: torch.tanh(h := x * 2) * torch.sin(h.t()).t(), "aten.tanh.out"),
    "another view of it": (lambda x: (h := (x * 2)[:, :128]) + h.t(), "aten.add.out"),
    "a part": (lambda x: torch.tanh((x * 2)[:100]), "aten.tanh.out"),
    "smaller than the result": (lambda x: torch.atan2((x * 2).mean(0) + 3, x.detach()), "aten.atan2.out"),
    "what else is put into it": (lambda x: (h := x * 2).scatter(1, PLACES, h), "aten.scatter_.src"),
    "another type": (lambda x: x * 2 + WIDE, "aten.add.out"),
}


@pytest.mark.parametrize("name", REUSED)
def test_a_result_takes_the_place_of_what_is_not_read_again(name: str) -> None:
    function, overload = REUSED[name]
    assert trained(function, *LARGE)[overload]


@pytest.mark.parametrize("name", KEPT)
def test_what_is_still_read_stays(name: str) -> None:
    function, overload = KEPT[name]
    assert not trained(function, *LARGE)[overload]


def test_small_tensors_stay() -> None:
    assert not trained(REUSED["a chain"][0])["aten.tanh.out"]


@pytest.mark.parametrize("shape", [(3, 5), (100, 1000), (7, 100_001), (64, 12, 33)])
def test_kernels_that_go_by_rows_can_write_over_what_they_read(shape: tuple[int, ...]) -> None:
    """Results are bit-equal to those in new memory, for every dimension, odd sizes and rows larger than a block."""
    aten = torch.ops.aten
    assert {aten._softmax.default, aten._log_softmax.default, aten._softmax_backward_data.default} == _ROW_BY_ROW
    for axis in range(len(shape)):
        x, gradient = torch.randn(shape), torch.randn(shape)
        for operator in (aten._softmax, aten._log_softmax):
            expected = operator.default(x, axis, False)
            given = x.clone()
            assert torch.equal(operator.out(given, axis, False, out=given), expected)
        result = aten._softmax.default(x, axis, False)
        expected = aten._softmax_backward_data.default(gradient, result, axis, torch.float32)
        for given in (gradient.clone(), result.clone()):
            pair = (given, result) if torch.equal(given, gradient) else (gradient, given)
            found = aten._softmax_backward_data.out(*pair, axis, torch.float32, grad_input=given)
            assert torch.equal(found, expected)
