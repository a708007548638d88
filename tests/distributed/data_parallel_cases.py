"""What the processes of a world do in test_data_parallel.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batches(count: int, size: int = 24) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 8, generator=generator), torch.randint(0, 4, (size,), generator=generator))
        for _ in range(count)
    ]


def result(trainer: ORTTrainer, losses: list[float]) -> dict[str, Any]:
    state = trainer.state_dict(pytorch_format=True)
    return {"losses": np.array(losses), **{f"weight.{name}": value.numpy() for name, value in state.items()}}


def train(rank: int, size: int, config: optim.OptimizerConfig, options: dict[str, Any], steps: int) -> dict[str, Any]:
    """Trains on this rank's part of each batch."""
    trainer = ORTTrainer(model(), "auto", config, nn.CrossEntropyLoss(), ORTTrainerOptions(options))
    losses = [float(trainer.train_step(x.chunk(size)[rank], y.chunk(size)[rank])[0]) for x, y in batches(steps)]
    return result(trainer, losses)


def adam(rank: int, size: int) -> dict[str, Any]:
    return train(rank, size, optim.AdamConfig(lr=0.01), {"batch": {"gradient_accumulation_steps": 2}}, 20)
