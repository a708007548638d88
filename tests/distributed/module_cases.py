"""``DistributedDataParallel(ORTModule(model))`` beside ``DistributedDataParallel(model)``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ort_trainer import ORTModule
from ort_trainer.kernels.programs import partition


def losses(rank: int, size: int) -> dict[str, Any]:
    """Trains on each rank's own data, with two micro-batches in a window; returns losses and weights of both."""
    dist.init_process_group("gloo")
    partition._ENOUGH = 0.0  # each operator is a program, so that the backward pass has stages
    found: dict[str, Any] = {}
    for name in ("eager", "module"):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        joined = DistributedDataParallel(ORTModule(model) if name == "module" else model)
        optimizer = torch.optim.AdamW(joined.parameters(), lr=0.01)
        generator, kept = torch.Generator().manual_seed(rank), []
        for _ in range(10):
            optimizer.zero_grad()
            with joined.no_sync():
                joined(torch.randn(4, 6, generator=generator)).square().sum().backward()
            loss = joined(torch.randn(4, 6, generator=generator)).square().sum()
            loss.backward()
            optimizer.step()
            kept.append(loss.item())
        found[f"{name} losses"] = kept
        found[f"{name} weights"] = torch.cat([value.flatten().double() for value in joined.state_dict().values()])
        found[f"{name} names"] = list(joined.state_dict())
    return found
