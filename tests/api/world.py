"""Shared by the checks of documented names: fresh objects from an export, and PyTorch's numbers."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from ort_trainer.api import CheckpointState, Module, Optimizer, TrainingSession

from ..helpers import Checks
from .exported import NAMES, RATE, Exported

__all__ = ["CHECKS", "PYTHON", "World", "checks", "close", "flat", "same_weights"]

PYTHON = "onnxruntime.training.api."
CHECKS = Checks()
checks = CHECKS.register


class World:
    """Creates fresh objects from the files of an export, and computes PyTorch's results.

    Args:
        exported: The export.
        folder: A folder for files.
    """

    def __init__(self, exported: Exported, folder: Path) -> None:
        self.exported = exported
        self.folder = folder
        self.batches = exported.batches

    def file(self, kind: str) -> str:
        return str(self.exported.file(f"{kind}_model.onnx"))

    def bytes(self, kind: str) -> bytes:
        return Path(self.file(kind)).read_bytes()

    @cached_property
    def state(self) -> CheckpointState:
        return CheckpointState.load_checkpoint(self.exported.file("checkpoint"))

    @cached_property
    def session(self) -> TrainingSession:
        return TrainingSession(self.state, self.file("training"), self.file("eval"), self.file("optimizer"))

    @cached_property
    def module(self) -> Module:
        return Module(self.file("training"), self.state, self.file("eval"))

    @cached_property
    def optimizer(self) -> Optimizer:
        return Optimizer(self.file("optimizer"), self.module)

    def step(self, number: int = 0) -> list[Any]:
        outputs = self.session.train_step(list(self.batches[number]))
        self.session.optimizer_step()
        self.session.lazy_reset_grad()
        return outputs

    def outputs(self, model: torch.nn.Module | None = None) -> list[Any]:
        """Returns PyTorch's loss and logits for the first batch."""
        x, label = map(torch.from_numpy, self.batches[0])
        logits = (model or self.exported.model)(x)
        return [F.cross_entropy(logits, label).detach().numpy(), logits.detach().numpy()]

    def trained(self, rates: list[float]) -> torch.nn.Module:
        """Returns the PyTorch model after updates with these rates, all on the first batch."""
        model = copy.deepcopy(self.exported.model)
        optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=RATE)
        x, label = map(torch.from_numpy, self.batches[0])
        for rate in rates:
            optimizer.param_groups[0]["lr"] = rate
            model.zero_grad()
            F.cross_entropy(model(x), label).backward()
            optimizer.step()
        return model

    def gradients(self, *numbers: int) -> dict[str, Any]:
        """Returns PyTorch's sums of the gradients of some batches."""
        model = copy.deepcopy(self.exported.model)
        model.zero_grad()
        for x, label in (map(torch.from_numpy, self.batches[number]) for number in numbers):
            F.cross_entropy(model(x), label).backward()
        return {name: p.grad.numpy() for name, p in model.named_parameters() if p.requires_grad and p.grad is not None}

    def weights(self, model: torch.nn.Module | None = None) -> dict[str, Any]:
        return {name: p.detach().numpy() for name, p in (model or self.exported.model).named_parameters()}


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def same_weights(state: CheckpointState, expected: Mapping[str, Any]) -> None:
    assert list(state.parameters) == list(expected)
    for name, value in expected.items():
        close(state.parameters[name].data, value)


def flat(values: Mapping[str, Any], names: tuple[str, ...] = NAMES) -> Any:
    return np.concatenate([values[name].ravel() for name in names])
