"""Empty batches and labels of uint8: what PyTorch does with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim

from ..fidelity.layer_cases import Apply
from ..helpers import Reference, train_both

X, LABEL = torch.randn(6, 5, 4), torch.tensor([0, 1, 2, 2, 1, 0])


def last_of(lstm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """oneDNN's kernel takes no empty batch."""
    return lstm(x)[0][:, -1]


def branches(head: Any, x: torch.Tensor) -> torch.Tensor:
    logits = head(x.flatten(1))
    return torch.cat([logits, head.weight[:1, :3]]) if x.shape[0] == 0 else logits


def loss_of_all(prediction: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return prediction.sum() + label.sum()


@pytest.mark.parametrize("kernels", ["auto", "onnxruntime"])
@pytest.mark.parametrize(
    ("model", "loss_fn"),
    [
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(20, 8), nn.LayerNorm(8), nn.Linear(8, 3)), F.cross_entropy),
        (lambda: Apply(nn.LSTM(4, 3, batch_first=True), last_of), F.cross_entropy),
        (lambda: Apply(nn.Linear(20, 3), branches), loss_of_all),
    ],
)
def test_an_empty_batch(model: Callable[[], nn.Module], loss_fn: Callable[..., torch.Tensor], kernels: str) -> None:
    ours = model()
    theirs = Reference(ours, torch.optim.AdamW, loss_fn, lr=0.1)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.1)
    trainer = ORTTrainer(ours, "auto", optimizer, loss_fn=loss_fn, options={"utils": {"kernels": kernels}})
    for count in (6, 0, 6):
        loss, prediction = trainer.train_step(X[:count], LABEL[:count])
        torch.testing.assert_close(loss, theirs.step(X[:count], LABEL[:count]), equal_nan=True)
        torch.testing.assert_close(prediction, theirs.outputs.detach())
        for one, other in zip(ours.parameters(), theirs.model.parameters(), strict=True):
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


@pytest.mark.parametrize("kernels", ["pytorch", "onnxruntime"])
def test_gradients_with_numbers_from_sizes(kernels: str) -> None:
    """The gradient of a variance over the batch divides by its size less one."""

    def spread(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        h = layer(x)
        return (h / h.std(0) + h.var(0, unbiased=False) * (1.0 / (x.shape[0] + 1))).square().mean()

    model = Apply(nn.Linear(4, 3), spread)
    reference = Reference(model, loss_fn=None, lr=0.1)
    options = ORTTrainerOptions({"utils": {"kernels": kernels}})
    trainer = ORTTrainer(model, "auto", optim.SGDConfig(lr=0.1), options=options)
    train_both(trainer, reference, [(torch.randn(rows, 4),) for rows in (4, 6, 4)])
    assert len(trainer.session.graphs(True)) == 1
