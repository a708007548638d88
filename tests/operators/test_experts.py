"""Products of groups of rows, each with its own matrix: the experts of a mixture."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import optim
from ort_trainer.operators.linear_algebra import _grouped_mm_of_all

from ..helpers import assert_close, assert_same_training


class Experts(nn.Module):
    """Applies to each row the expert that a router chooses, computed as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.weights = nn.Parameter(torch.randn(4, 16, 8))
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        ends = F.one_hot(chosen, 4).sum(0).cumsum(0).to(torch.int32)
        rows = F.grouped_mm(x[order], self.weights.transpose(-2, -1), offs=ends)
        return self.head(torch.empty_like(rows).index_copy(0, order, rows) * scores[:, None])


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.engine
@pytest.mark.parametrize("kernels", ["auto", "onnxruntime"])
def test_experts_train_and_evaluate_as_in_pytorch(kernels: str) -> None:
    model = Experts()
    batches = [(torch.randn(size, 8), torch.randint(0, 3, (size,))) for size in (12, 12, 7)]
    options = {"utils": {"kernels": kernels, "grad_norm_clip": False}}
    trainer = assert_same_training(model, "auto", batches, optim.SGDConfig(lr=0.1), sgd, options=options)
    assert len(trainer.session.graphs(True)) == 1
    x, label = batches[-1]
    assert_close(trainer.eval_step(x, label)[1], model(x).detach(), 1e-5, "output")


@pytest.mark.parametrize("ends", [[2, 2, 5, 6], [0, 0, 0, 6], [1, 2, 3, 4]])
def test_the_products_of_all_groups(ends: list[int]) -> None:
    """Rows after the last group belong to none."""
    first, second, offsets = torch.randn(6, 4), torch.randn(4, 4, 8), torch.tensor(ends, dtype=torch.int32)
    found = _grouped_mm_of_all(first, second, offsets)
    assert torch.allclose(found[: ends[-1]], F.grouped_mm(first, second, offs=offsets)[: ends[-1]], atol=1e-5)
    assert not found[ends[-1] :].any()
    rows = torch.randn(6, 8)
    found = _grouped_mm_of_all(first.mT, rows, offsets)
    assert torch.allclose(found, F.grouped_mm(first.mT, rows, offs=offsets), atol=1e-5)
