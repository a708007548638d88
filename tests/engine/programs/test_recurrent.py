"""Recurrent cells at NaN, infinities and zeros of either sign, against PyTorch's layers without oneDNN."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ort_trainer.engine.programs.recurrent import linear_recurrence, steps

from ...helpers import assert_same_edges

EDGES = [math.nan, math.inf, -math.inf, -0.0]
aten = torch.ops.aten


def place(edge: float, where: str) -> dict[str, torch.Tensor]:
    """Returns inputs before activation, a state and a weight, one of which has an edge value."""
    tensors = {"gates": torch.randn(4, 3, 5), "state": torch.randn(3, 5), "weight": torch.randn(5, 5)}
    tensors[where].view(-1)[1] = edge
    return tensors


@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("where", ["gates", "state", "weight"])
def test_a_plain_layer(activation: str, edge: float, where: str) -> None:
    """The ReLU's gradient is that of the result above it where a state is NaN, and 0 at 0 for infinite gradients."""
    gates, state, weight = place(edge, where).values()
    value = gates.clone().requires_grad_()
    h, states = state, []
    for gate in value:
        h = getattr(torch, activation)(torch.addmm(gate, h, weight.t()))
        states.append(h)
    _, ours = steps(f"rnn_{activation}", False, [state], [gates], [weight])
    assert_same_edges(ours, torch.stack(states).detach(), 1e-6, "states")
    for of_loss in (1.0, edge):
        d_output = torch.full_like(gates, of_loss)
        (theirs,) = torch.autograd.grad(torch.stack(states), value, d_output, retain_graph=True)
        given: list[Any] = [[torch.zeros_like(state)], [d_output, ours], [weight]]
        _, d_gates = steps(f"rnn_{activation}_backward", True, *given)
        # Sums of products may begin with a zero of either sign.
        assert_same_edges(d_gates + 0.0, theirs + 0.0, 1e-5, f"gradient for {of_loss}")


@pytest.mark.parametrize("edge", EDGES)
def test_a_linear_recurrence(edge: float) -> None:
    for where in range(2):
        pair = [torch.randn(4, 3), torch.randn(4, 3)]
        pair[where][1, 1] = edge
        h, states = torch.zeros(3), []
        for factor, term in zip(*pair, strict=True):
            h = factor * h + term
            states.append(h)
        assert_same_edges(linear_recurrence(*pair), torch.stack(states), 1e-6, "states")
