"""Artifacts of a trainer for onnxruntime-training's own runtime, and training with both."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, ORTTrainerOptions
from ort_trainer.api.checkpoint_file import Checkpoint
from ort_trainer.artifacts.upstream.write import write_upstream_artifacts
from ort_trainer.optim.update_writer import ParameterUpdate

from ..helpers import MLP, MLP_DESC

Batch = tuple[torch.Tensor, ...]
STANDARD = {"utils": {"kernels": "onnxruntime"}}
STANDARD_OPTIONS = ORTTrainerOptions(STANDARD)


def make_trainer(config: Any, model: nn.Module | None = None, desc: Any = None, **options: Any) -> ORTTrainer:
    settings = {**STANDARD, **options, "utils": {**STANDARD["utils"], **options.get("utils", {})}}
    model, desc = model or MLP(), desc or MLP_DESC
    return ORTTrainer(model, desc, config, loss_fn=F.cross_entropy, options=ORTTrainerOptions(settings))


def checkpoint_of(trainer: ORTTrainer) -> Checkpoint:
    """The state of a trainer as the checkpoint of an export has it."""
    session, loop = trainer.loop.session, trainer.loop
    assert session is not None
    buffers = {name: value.numpy().copy() for name, value in session.buffers.items()}
    floats = {name: value for name, value in buffers.items() if value.dtype.kind == "f"}
    optimizer = {
        f"{name}.{slot}": value.numpy().copy()
        for name, slots in session.optimizer.slots.items()
        for slot, value in slots.items()
    }
    optimizer |= {
        f"{name}.Update_Count": np.array([int(count) + 1], np.int64) for name, count in session.optimizer.counts.items()
    }
    return Checkpoint(
        export="",
        parameters={name: value.numpy().copy() for name, value in session.parameters.items()} | floats,
        trainable=list(loop.layout.trainable),
        buffers={name: value for name, value in buffers.items() if name not in floats},
        learning_rates=list(loop.config.learning_rates),
        optimizer=optimizer,
        optimization_step=loop.info.optimization_step,
    )


def write(
    trainer: ORTTrainer, directory: Path, batch: Batch, state: Mapping[str, Any] | None = None, **arguments: Any
) -> None:
    """What ``trainer.export_artifacts(directory, flavor="onnxruntime-training")`` is to do."""
    loop, session = trainer.loop, trainer.loop.session
    if session is None or not session.graphs(True):
        trainer.prepare(batch)
    trainer.eval_step(*batch)
    session, rule = trainer.loop.session, loop.config.rule
    assert session is not None
    updates = {
        name: ParameterUpdate(
            rule,
            rule.slots_for(hyper),
            rule.keeps_count(hyper),
            index,
            hyper,
            limit,
            loop.options.utils.max_grad_value or math.inf,
        )
        for index, hyper, limit, names in session.optimizer.groups
        for name in names
    }
    (training,), (evaluation,) = session.graphs(True), session.graphs(False)
    checkpoint = dataclasses.replace(checkpoint_of(trainer), **(state or {}))
    write_upstream_artifacts(directory, training, evaluation, updates, checkpoint, list(session.buffers), **arguments)


class Upstream:
    """onnxruntime-training's own API on a directory of artifacts."""

    def __init__(
        self, directory: Path, checkpoint: str = "checkpoint", lr: float | None = None, values: Any = None
    ) -> None:
        from onnxruntime.training import api

        self.api = api
        self.state = api.CheckpointState.load_checkpoint(str(directory / checkpoint))
        models = (str(directory / f"{name}_model.onnx") for name in ("training", "eval", "optimizer"))
        training, evaluation, optimizer = models
        self.module = api.Module(training, self.state, evaluation)
        if values is not None:  # before there is an optimizer, which would crash
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
