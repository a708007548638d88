"""Products by oneDNN at NaN, infinities and zeros of either sign, against PyTorch's own."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from ort_trainer.engine.programs import linear as products
from ort_trainer.engine.programs.linear import grouped_mm, linear

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


@pytest.mark.parametrize("ends", [[70, 70, 75, 200], [0, 64, 256, 256], [3, 5, 133, 134]])
@pytest.mark.parametrize("dtype, is_slow", [(torch.float32, True), (torch.float32, False), (torch.bfloat16, True)])
def test_groups_of_rows(ends: list[int], dtype: torch.dtype, is_slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without a slow MKL; groups may be empty, and rows may belong to none."""
    by_groups, calls = products._by_groups, []
    monkeypatch.setattr(products, "_by_groups", lambda *values: calls.append(None) or by_groups(*values))
    monkeypatch.setattr(products, "slow_mkl", lambda: is_slow)
    monkeypatch.setattr(products, "is_faster", lambda *_: True)
    monkeypatch.setattr(products, "_LARGE_GROUP", 0)
    x, gradient = torch.randn(256, 32, dtype=dtype), torch.randn(256, 48, dtype=dtype)
    offsets, groups = torch.tensor(ends, dtype=torch.int32), [slice(*each) for each in pairwise([0, *ends])]
    for weights in (torch.randn(4, 32, 48, dtype=dtype), torch.randn(4, 48, 32, dtype=dtype).mT):
        rows = grouped_mm(x, weights, offsets)
        assert rows.shape == (256, 48) and rows.is_contiguous()
        expected = torch.cat([x[group] @ weights[number] for number, group in enumerate(groups)])
        torch.testing.assert_close(rows[: ends[-1]], expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(grouped_mm(x, weights, offsets)[: ends[-1]], rows[: ends[-1]])
    sums = grouped_mm(x.t(), gradient, offsets)
    assert sums.is_contiguous() and torch.equal(grouped_mm(x.t(), gradient, offsets), sums)
    expected = torch.stack([x[group].t() @ gradient[group] for group in groups])
    torch.testing.assert_close(sums, expected, rtol=1e-4, atol=1e-4)
    assert len(calls) == (6 if is_slow and dtype == torch.float32 else 0)
