"""Products by oneDNN at NaN, infinities and zeros of either sign, against PyTorch's own."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from ort_trainer.engine.programs.linear import linear

from ...helpers import assert_same_edges


@pytest.mark.parametrize("edge", [math.nan, math.inf, -math.inf, -0.0, 1e30])
@pytest.mark.parametrize("place", ["value", "weight", "bias"])
def test_edges_go_through_as_in_pytorch(edge: float, place: str) -> None:
    tensors = {"value": torch.randn(64, 32), "weight": torch.randn(48, 32), "bias": torch.randn(48)}
    tensors[place].view(-1)[3] = edge
    value, weight, bias = tensors.values()
    for other in (bias, None):
        ours, theirs = linear(value, weight, other), F.linear(value, weight, other)
        assert_same_edges(ours, theirs, 1e-5, place)
        assert_same_edges(ours.relu_(), theirs.relu(), 1e-5, f"ReLU of {place}")


def test_an_empty_product() -> None:
    assert torch.equal(linear(torch.ones(3, 0), torch.ones(2, 0), torch.ones(2)), torch.ones(3, 2))


def test_operands_with_gaps() -> None:
    """Such as a column as the bias, of which oneDNN read the memory beside it."""
    wide, column = torch.randn(64, 64), torch.randn(48, 7)[:, 3]
    for value, weight in ((wide[:, ::2], wide[:48, 1::2]), (wide[:32].t(), wide[:1, :32].expand(48, 32))):
        for bias in (column, column[:1].expand(48)):
            torch.testing.assert_close(linear(value, weight, bias), F.linear(value, weight, bias))
