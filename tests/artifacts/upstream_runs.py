"""Trainers with artifacts for onnxruntime-training's runtime, and training with that runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, ORTTrainerOptions

from ..helpers import MLP, MLP_DESC

Batch = tuple[torch.Tensor, ...]
FLAVOR = "onnxruntime-training"
# Makes the trainer run the exported graphs, so only one export is needed.
STANDARD = {"utils": {"kernels": "onnxruntime"}}
STANDARD_OPTIONS = ORTTrainerOptions(STANDARD)


def make_trainer(config: Any, model: nn.Module | None = None, desc: Any = None, **options: Any) -> ORTTrainer:
    settings = {**STANDARD, **options, "utils": {**STANDARD["utils"], **options.get("utils", {})}}
    model, desc = model or MLP(), desc or MLP_DESC
    return ORTTrainer(model, desc, config, loss_fn=F.cross_entropy, options=ORTTrainerOptions(settings))


def write(trainer: ORTTrainer, directory: Path, batch: Batch, **arguments: Any) -> None:
    if trainer.loop.executor is None:
        trainer.prepare(batch)
    trainer.export_artifacts(directory, flavor=FLAVOR, **arguments)


class Upstream:
    """onnxruntime-training's own API on a folder of artifacts."""

    def __init__(
        self, directory: Path, checkpoint: str = "checkpoint", lr: float | None = None, values: Any = None
    ) -> None:
        from onnxruntime.training import api

        self.api = api
        self.state = api.CheckpointState.load_checkpoint(str(directory / checkpoint))
        models = (str(directory / f"{name}_model.onnx") for name in ("training", "eval", "optimizer"))
        training, evaluation, optimizer = models
        self.module = api.Module(training, self.state, evaluation)
        if values is not None:  # would crash once there is an optimizer
            self.module.copy_buffer_to_parameters(values, trainable_only=False)
        self.optimizer = api.Optimizer(optimizer, self.module)
        if lr is not None:
            self.optimizer.set_learning_rate(lr)

    def train(self, batch: Batch, update: bool = True) -> list[np.ndarray[Any, Any]]:
        outputs = self.module.train()(*(value.numpy() for value in batch))
        if update:
            self.optimizer.step()
            self.module.lazy_reset_grad()
        return list(outputs) if isinstance(outputs, tuple) else [outputs]

    def evaluate(self, batch: Batch) -> list[np.ndarray[Any, Any]]:
        outputs = self.module.eval()(*(value.numpy() for value in batch))
        return list(outputs) if isinstance(outputs, tuple) else [outputs]

    def parameters(self) -> dict[str, np.ndarray[Any, Any]]:
        return {name: parameter.data for name, parameter in self.state.parameters}

    def save(self, path: Path, include_optimizer_state: bool = True) -> None:
        self.api.CheckpointState.save_checkpoint(self.state, str(path), include_optimizer_state)
