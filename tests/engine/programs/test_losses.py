"""Losses with gradients of their own at NaN, infinities and zeros of either sign, against PyTorch's."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from ort_trainer.engine.programs import linear, losses
from ort_trainer.engine.programs.losses import cross_entropy_backward, linear_cross_entropy

from ...helpers import assert_same_edges

EDGES = [math.nan, math.inf, -math.inf, -0.0]
REDUCTIONS = ["none", "mean", "sum"]
IGNORED = -100


def labels(ignored: str) -> torch.Tensor:
    values = torch.arange(12) % 5
    if ignored != "none":
        values[:: 2 if ignored == "some" else 1] = IGNORED
    return values


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("ignored", ["none", "some"])
def test_the_gradient_of_a_cross_entropy(edge: float, reduction: str, ignored: str) -> None:
    target = labels(ignored)
    for row in (0, 1):
        for of_loss in (1.0, edge):
            logits = torch.randn(12, 5)
            logits[row, 2] = edge
            logits.requires_grad_()
            loss = F.cross_entropy(logits, target, reduction=reduction, ignore_index=IGNORED)
            gradient = torch.full_like(loss, of_loss)
            (theirs,) = torch.autograd.grad(loss, logits, gradient)
            number, total = REDUCTIONS.index(reduction), (target != IGNORED).sum().float()
            ours = cross_entropy_backward(gradient, logits.log_softmax(1).detach(), target, number, IGNORED, total)
            assert_same_edges(ours, theirs, 1e-6, f"row {row}, gradient {of_loss}")


@pytest.mark.parametrize("onednn", [False, True])
@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("place", ["hidden", "weight", "bias", "gradient"])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
def test_logits_that_are_never_made(
    edge: float, place: str, ignored: str, onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not finite in an ignored row makes PyTorch's gradients NaN, although the loss is finite."""
    for module in (linear, losses):
        monkeypatch.setattr(module, "is_faster", lambda *_: onednn)
    target = labels(ignored)
    for reduction in REDUCTIONS:
        for row in (0, 1):
            tensors = {"hidden": torch.randn(12, 4), "weight": torch.randn(5, 4), "bias": torch.randn(5)}
            if place != "gradient":
                tensors[place][row] = edge
            leaves = [tensor.requires_grad_() for tensor in tensors.values()]
            loss = F.cross_entropy(F.linear(*leaves), target, reduction=reduction, ignore_index=IGNORED)
            gradient = torch.full_like(loss, 0.5)
            if place == "gradient":
                gradient.view(-1)[row % gradient.numel()] = edge
            theirs = [loss, *torch.autograd.grad(loss, leaves, gradient)]
            given = [leaf.detach() for leaf in leaves]
            number, wanted = REDUCTIONS.index(reduction), [True] * 3
            ours = linear_cross_entropy(*given, target, gradient, number, IGNORED, wanted)  # type: ignore[call-arg]
            for name, a, b in zip(("loss", *tensors), ours, theirs, strict=True):
                # Products of zeros may have either sign.
                assert_same_edges(a + 0.0, b.detach() + 0.0, 1e-5, f"{name} for row {row}, {reduction}")


def test_rows_are_left_out_while_all_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    by_blocks = losses._by_blocks
    monkeypatch.setattr(losses, "_by_blocks", lambda rows, *rest: computed.append(len(rows)) or by_blocks(rows, *rest))
    hidden, weight, target = torch.randn(12, 4), torch.randn(5, 4), labels("some")
    for wanted in ([True, True, True], [False, True, True]):
        linear_cross_entropy(hidden, weight, None, target, torch.tensor(1.0), 1, IGNORED, wanted)
    assert computed == [6, 6]
    weight[0, 0] = math.nan
    for wanted in ([True, True, True], [False, True, True]):
        linear_cross_entropy(hidden, weight, None, target, torch.tensor(1.0), 1, IGNORED, wanted)
    assert computed == [6, 6, 6, 12, 6, 12]
