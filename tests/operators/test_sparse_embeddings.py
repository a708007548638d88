"""Embeddings with ``sparse=True``: gradients are dense, training gives PyTorch's numbers (operators/indexing.py)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTModule, ORTTrainer, optim

DESC = {
    "inputs": [("tokens", ["batch", "time"]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("logits", ["batch", 3])],
}


class Sparse(nn.Module):
    """A layer, a function of a weight, and bags."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bag = nn.Embedding(20, 4, sparse=True, padding_idx=1), nn.EmbeddingBag(20, 4, sparse=True)
        self.table, self.head = nn.Parameter(torch.randn(20, 4)), nn.Linear(4, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(tokens) + F.embedding(tokens, self.table, sparse=True)
        return self.head(hidden.mean(1) + self.bag(tokens))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randint(0, 20, (6, 5)), torch.randint(0, 3, (6,))) for _ in range(3)]


def in_pytorch(
    model: nn.Module, data: list[tuple[torch.Tensor, torch.Tensor]], optimizer: torch.optim.Optimizer
) -> None:
    for tokens, label in data:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens), label).backward()
        optimizer.step()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_trainer_gives_pytorchs_weights(momentum: float) -> None:
    model, data = Sparse(), batches()
    reference = copy.deepcopy(model)
    in_pytorch(reference, data, torch.optim.SGD(reference.parameters(), lr=0.5, momentum=momentum))
    assert reference.table.grad is not None and reference.table.grad.is_sparse
    trainer = ORTTrainer(model, DESC, optim.SGDConfig(lr=0.5, momentum=momentum), loss_fn=F.cross_entropy)
    for tokens, label in data:
        trainer.train_step(tokens, label)
    torch.testing.assert_close(dict(model.named_parameters()), dict(reference.named_parameters()))


@pytest.mark.parametrize("kind", ["module", "dynamo"])
def test_a_module_gives_dense_gradients(kind: str) -> None:
    model, data = Sparse(), batches()
    reference = copy.deepcopy(model)
    compiled = ORTModule(model) if kind == "module" else torch.compile(model, backend="ort_trainer")
    in_pytorch(reference, data, torch.optim.SGD(reference.parameters(), lr=0.5))
    in_pytorch(compiled, data, torch.optim.SGD(model.parameters(), lr=0.5))
    torch.testing.assert_close(dict(model.named_parameters()), dict(reference.named_parameters()))
    assert model.table.grad is not None and model.table.grad.layout is torch.strided
    with pytest.raises(RuntimeError, match="SparseAdam does not support dense gradients"):
        torch.optim.SparseAdam([model.table]).step()
