"""Artifacts as the trainer writes them, and the same training in PyTorch."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim

RATE = 0.01
DESCRIPTION = {
    "inputs": [("x", ["batch", 4]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("logits", ["batch", 3])],
}


class Net(torch.nn.Module):
    """Two layers; the first one's weight is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Linear(4, 5)
        self.head = torch.nn.Linear(5, 3)
        self.body.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


@dataclass
class Exported:
    """A folder of artifacts and their origin.

    Attributes:
        folder: The folder of the files.
        model: A PyTorch model with the weights of the checkpoint.
        batches: Inputs with their labels, as NumPy arrays.
        trainer: The trainer that exported them.
    """

    folder: Path
    model: Net
    batches: list[tuple[Any, Any]]
    trainer: ORTTrainer
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.Adam(trained, lr=RATE)

    def file(self, name: str) -> Path:
        return self.folder / name

    def loss(self, number: int) -> float:
        """Returns PyTorch's loss for a batch, and leaves its gradients in the model."""
        x, label = map(torch.from_numpy, self.batches[number])
        self.model.zero_grad()
        loss = F.cross_entropy(self.model(x), label)
        loss.backward()
        return loss.item()

    def train(self, count: int) -> list[float]:
        """Trains the model in PyTorch on the first batches, and returns the losses."""
        losses = []
        for number in range(count):
            losses.append(self.loss(number))
            self.optimizer.step()
        return losses


def export(folder: Path) -> Exported:
    torch.manual_seed(0)
    model = Net()
    options = ORTTrainerOptions({"utils": {"grad_norm_clip": False}})
    trainer = ORTTrainer(model, DESCRIPTION, optim.AdamConfig(lr=RATE), loss_fn=F.cross_entropy, options=options)
    draw = np.random.default_rng(0)
    batches = [(draw.normal(size=(6, 4)).astype(np.float32), draw.integers(3, size=6)) for _ in range(6)]
    trainer.prepare(dict(zip(("x", "label"), map(torch.from_numpy, batches[0]), strict=True)))
    trainer.export_artifacts(folder)
    return Exported(folder, copy.deepcopy(model), batches, trainer)
