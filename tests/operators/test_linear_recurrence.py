"""Linear recurrences, as in state-space models: one graph for all lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ort_trainer import optim
from ort_trainer.operators.recurrent import _is_linear, _scan_of_pairs

from ..helpers import assert_close, assert_same_training


def combine(left: Any, right: Any) -> Any:
    return left[0] * right[0], right[0] * left[1] + right[1]


def is_exporting() -> bool:
    return torch.compiler.is_exporting()


def run(factors: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    """Chooses between a loop and a scan, as transformers does."""
    from torch._higher_order_ops.associative_scan import associative_scan

    if torch.compiler.is_compiling() and not is_exporting():
        return associative_scan(combine, (factors, terms), dim=1, combine_mode="generic")[1]
    state, states = torch.zeros_like(terms[:, 0]), []
    for index in range(terms.shape[1]):
        state = factors[:, index] * state + terms[:, index]
        states.append(state)
    return torch.stack(states, 1)


class StateSpace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.factors = nn.Embedding(12, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 12)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.head(run(self.factors(x).sigmoid(), x)).transpose(1, 2)


@pytest.mark.engine
def test_one_graph_for_all_lengths() -> None:
    model = StateSpace()
    batches = [(tokens, tokens) for tokens in (torch.randint(0, 12, (3, length)) for length in (5, 5, 9))]
    trainer = assert_same_training(
        model, "auto", batches, optim.SGDConfig(lr=0.1), lambda m: torch.optim.SGD(m.parameters(), lr=0.1)
    )
    for length in (9, 4):
        tokens = torch.randint(0, 12, (3, length))
        assert_close(trainer.eval_step(tokens, tokens)[1], model(tokens).detach(), 1e-5, "output")
    assert len(trainer.session.graphs(True)) == len(trainer.session.graphs(False)) == 1


@pytest.mark.parametrize("reverse", [False, True])
def test_the_scan_and_its_gradient(reverse: bool) -> None:
    def loop(factors: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
        flipped = run(*(x.flip(1) if reverse else x for x in (factors, terms)))
        return flipped.flip(1) if reverse else flipped

    inputs = [torch.rand(2, 5, 3, requires_grad=True) for _ in range(2)]
    products, states = _scan_of_pairs(combine, inputs, 1, reverse)
    expected = loop(*inputs)
    torch.testing.assert_close(states, expected)
    assert products.shape == expected.shape
    weight = torch.randn(2, 5, 3)
    found = torch.autograd.grad((states * weight).sum(), inputs)
    torch.testing.assert_close(found, torch.autograd.grad((expected * weight).sum(), inputs))


def test_which_scans_are_linear_recurrences() -> None:
    assert _is_linear(combine)
    assert not _is_linear(lambda left, right: (left[0] + right[0], left[1] + right[1]))
    assert not _is_linear(lambda left, right: (torch.maximum(left[0], right[0]), right[1]))
