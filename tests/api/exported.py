"""Artifacts as the trainer writes them, and the same training in PyTorch."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from ort_trainer import ORTTrainer, optim

from ..helpers import MLP, mlp_batches, mlp_trainer

RATE = 0.01


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
    model: MLP
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
    """Exports an MLP whose first weight is frozen."""
    torch.manual_seed(0)
    model = MLP()
    model.fc1.weight.requires_grad_(False)
    trainer = mlp_trainer({"utils": {"grad_norm_clip": False}}, optim.AdamConfig(lr=RATE), model)
    batches = mlp_batches(6)
    trainer.prepare(batches[0])
    trainer.export_artifacts(folder)
    return Exported(folder, copy.deepcopy(model), [(x.numpy(), label.numpy()) for x, label in batches], trainer)
