"""The cases that the processes of test_adasum.py run."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ort_trainer import ORTTrainer, ORTTrainerOptions, amp, optim
from ort_trainer.distributed.buckets import Buckets
from ort_trainer.distributed.processes import Processes
from ort_trainer.distributed.reduction import Adasum

from .data_parallel_cases import LOSS, batches, mlp, part

SHAPES = {"matrix": (5, 7), "vector": (3,), "scalar": (), "large": (11, 13)}


def gradients(rank: int) -> dict[str, np.ndarray]:
    """Returns gradients that are neither parallel nor orthogonal; one is zero on some ranks, and one is small."""
    generator = np.random.default_rng(rank)
    common = np.random.default_rng(99)
    found = {name: common.normal(size=shape) + generator.normal(size=shape) for name, shape in SHAPES.items()}
    found["vector"] *= rank % 2
    found["matrix"] *= 1e-25  # float32 can't represent the squares
    return {name: np.asarray(value, np.float32) for name, value in found.items()}


def combined(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the Adasum of the gradients of all ranks."""
    tensors = {name: torch.as_tensor(value, dtype=torch.float32) for name, value in given.items()}
    processes = Processes(torch.device("cpu"), 60.0)
    buckets = Buckets(tensors, processes.size, 300)  # several buckets
    for name, view in buckets.views.items():
        view.copy_(tensors[name])
    Adasum(processes).reduce(list(buckets))
    return {name: view.numpy() for name, view in buckets.views.items()}


def of_any(rank: int, size: int) -> dict[str, Any]:
    ORTTrainer(mlp(), "auto", optim.SGDConfig(), LOSS)  # joins the group
    return combined(gradients(rank))


def of_known(rank: int, size: int) -> dict[str, Any]:
    equal, axis = np.arange(1, 7).reshape(2, 3), np.eye(size)[rank]
    return combined({"equal": equal, "orthogonal": axis, "opposite": [(-1.0) ** rank * 2.0]})


def of_overflows(rank: int, size: int) -> dict[str, Any]:
    last = rank == size - 1
    found = {"infinite": [1.0, np.inf if last else 1.0], "unknown": [np.nan if last else 0.0, 0.0], "fine": [rank]}
    return combined(found)


def train(rank: int, size: int, options: dict[str, Any], skips: bool = False) -> dict[str, Any]:
    given = ORTTrainerOptions({"distributed": {"enable_adasum": True}, **options})
    trainer = ORTTrainer(mlp(), "auto", optim.SGDConfig(lr=0.5), LOSS, given)
    for count, batch in enumerate(batches(4)):
        x, y = part(batch, rank, size)
        trainer.train_step(x * (torch.inf if skips and rank and count == 2 else 1.0), y)
    found = {name: value.numpy() for name, value in trainer.state_dict(pytorch_format=True).items()}
    return {**found, "updates": trainer.train_step_info.optimization_step}


def of_training(rank: int, size: int) -> dict[str, Any]:
    return train(rank, size, {"batch": {"gradient_accumulation_steps": 2}})


def of_skipped(rank: int, size: int) -> dict[str, Any]:
    scaler = amp.DynamicLossScaler(loss_scale=1024.0)
    return train(rank, size, {"mixed_precision": {"enabled": True, "loss_scaler": scaler}}, skips=True)


def of_own_loop(rank: int, size: int) -> dict[str, Any]:
    """Returns what a user's own loop finds in p.grad."""
    model = mlp()
    given = ORTTrainerOptions({"distributed": {"enable_adasum": True}})
    trainer = ORTTrainer(model, "auto", optim.SGDConfig(), LOSS, given)
    trainer.forward_backward(*part(batches(1)[0], rank, size))
    return {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
