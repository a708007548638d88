"""Empty batches and labels of uint8: what PyTorch does with them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer

X, LABEL = torch.randn(6, 5, 4), torch.tensor([0, 1, 2, 2, 1, 0])


class LSTM(nn.Module):
    """oneDNN's kernel takes no empty batch."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(20, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.head(x.flatten(1))
        return torch.cat([logits, self.head.weight[:1, :3]]) if x.shape[0] == 0 else logits


def loss_of_all(prediction: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return prediction.sum() + label.sum()


@pytest.mark.parametrize("kernels", ["auto", "onnxruntime"])
@pytest.mark.parametrize(
    ("model", "loss_fn"),
    [
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(20, 8), nn.LayerNorm(8), nn.Linear(8, 3)), F.cross_entropy),
        (LSTM, F.cross_entropy),
        (Branches, loss_of_all),
    ],
)
def test_an_empty_batch(model: Callable[[], nn.Module], loss_fn: Callable[..., torch.Tensor], kernels: str) -> None:
    ours = model()
    theirs = copy.deepcopy(ours)
    updates = torch.optim.AdamW(theirs.parameters(), lr=0.1)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.1)
    trainer = ORTTrainer(ours, "auto", optimizer, loss_fn=loss_fn, options={"utils": {"kernels": kernels}})
    for count in (6, 0, 6):
        loss, prediction = trainer.train_step(X[:count], LABEL[:count])
        expected = theirs(X[:count])
        updates.zero_grad()
        loss_fn(expected, LABEL[:count]).backward()
        updates.step()
        torch.testing.assert_close(loss, loss_fn(expected, LABEL[:count]).detach(), equal_nan=True)
        torch.testing.assert_close(prediction, expected.detach())
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernels", ["auto", "onnxruntime"])
@pytest.mark.parametrize(
    "loss_fn", [F.cross_entropy, lambda p, label: F.nll_loss(F.log_softmax(p, 1), label, ignore_index=2)]
)
def test_labels_of_uint8(loss_fn: Callable[..., torch.Tensor], kernels: str) -> None:
    model, label = nn.Sequential(nn.Flatten(), nn.Linear(20, 3)), LABEL.to(torch.uint8)
    expected = loss_fn(model(X), label)
    gradient = torch.autograd.grad(expected, model[1].weight)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = ORTTrainer(model, "auto", optimizer, loss_fn=loss_fn, options={"utils": {"kernels": kernels}})
    torch.testing.assert_close(trainer.train_step(X, label)[0], expected.detach())
    torch.testing.assert_close(trainer.get_gradient("1.weight"), gradient)
    with pytest.raises(IndexError, match="input 'label' has the value 9"):
        trainer.train_step(X, torch.full_like(label, 9))
