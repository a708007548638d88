"""What counts as a difference from PyTorch, and what as rounding."""

from __future__ import annotations

import math

import pytest
import torch

from ort_trainer.capture.differences import gradient_floor, report

VALUES = torch.tensor([[1.0, -2.0], [1e-3, 0.0]])


def said(ours: torch.Tensor, theirs: torch.Tensor, spread: float = 0.0, **others: object) -> str:
    rounding = others.pop("rounding", torch.float32)
    return report({"it": ours}, {"it": theirs}, rounding, lambda seed: {"it": theirs + spread}, **others)


@pytest.mark.parametrize(
    ("ours", "theirs", "rounding"),
    [
        (VALUES, VALUES.clone(), torch.float32),
        (VALUES * (1 + 5e-5), VALUES, torch.float32),
        (VALUES + 1e-5, VALUES, torch.float32),
        (VALUES * 1.02, VALUES, torch.bfloat16),
        (VALUES * 1.005, VALUES, torch.float16),
        (VALUES.double() * (1 + 5e-7), VALUES.double(), torch.float64),
        (torch.tensor([math.nan, math.inf, 1.0]), torch.tensor([math.nan, math.inf, 1.0]), torch.float32),
        (torch.empty(0), torch.empty(0), torch.float32),
        (torch.tensor([True, False]), torch.tensor([True, False]), torch.float32),
        (torch.tensor(2**53 - 1), torch.tensor(2**53 - 1), torch.float32),
        (VALUES.to(torch.complex64), VALUES.to(torch.complex64), torch.float32),
    ],
)
def test_rounding(ours: torch.Tensor, theirs: torch.Tensor, rounding: torch.dtype) -> None:
    assert said(ours, theirs, rounding=rounding) == ""


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        (
            VALUES * 1.001,
            VALUES,
            "it is -2.002 at [0, 1], and -2 in PyTorch, a difference of 0.002; rounding",
        ),
        (VALUES + 1e-3, VALUES, "it is 0.001 at [1, 1], and 0 in"),
        (torch.tensor(math.nan), torch.tensor(1.0), "it is nan, and 1 in PyTorch, a difference of inf"),
        (torch.tensor([math.inf]), torch.tensor([-math.inf]), "it is inf at [0], and -inf in PyTorch"),
        (torch.tensor([3, 4]), torch.tensor([3, 5]), "it is 4 at [1], and 5 in PyTorch, a difference of 1; rounding"),
        (torch.zeros(2, 3), torch.zeros(3, 2), "it has the shape [2, 3], and in PyTorch [3, 2]"),
    ],
)
def test_differences(ours: torch.Tensor, theirs: torch.Tensor, message: str) -> None:
    assert said(ours, theirs).startswith(message)


def test_the_first_of_several_is_named() -> None:
    one, two = torch.ones(2), torch.full((2,), 2.0)
    theirs = {"a": one, "b": two, "d": two}
    found = report({"a": one, "b": one, "c": one}, theirs, torch.float32, lambda seed: theirs)
    assert found.startswith("b is 1 at [0]") and found.endswith("3 of 4 tensors differ.")


def test_what_pytorch_itself_does_not_determine_is_no_difference() -> None:
    assert said(VALUES * 1.001, VALUES, spread=1e-3) == ""
    assert said(VALUES * 1.1, VALUES, spread=1e-3)
    assert said(torch.tensor([3, 4]), torch.tensor([3, 5]), spread=1) == ""


def test_gradients_that_are_zero_but_for_rounding() -> None:
    floor = gradient_floor([torch.tensor([100.0, math.inf]), torch.zeros(0)], torch.float32)
    assert floor == pytest.approx(1e-4)
    assert said(torch.full((2,), 5e-5), torch.zeros(2), floors={"it": floor}) == ""
    assert said(torch.full((2,), 5e-4), torch.zeros(2), floors={"it": floor})
    assert gradient_floor([], torch.float32) == 0.0


def test_overflows_of_a_loss_scale() -> None:
    ours, theirs = torch.tensor([math.inf, 1.0]), torch.tensor([65504.0, 1.0])
    assert said(ours, theirs)
    assert said(ours, theirs, only_finite=["it"]) == ""
    assert said(ours, theirs * 2, only_finite=["it"]).startswith("it is 1 at [1]")
