"""Artifacts that onnxruntime-training's own generator wrote, and the losses of its own runtime with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn
from torch.nn import functional as F

STEPS = 8
LOSSES = "losses.json"


class _Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.second, self.last = nn.Conv2d(4, 6, 3, stride=2, padding=1), nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.max_pool2d(torch.relu(self.norm(self.first(x))), 2)
        return self.last(torch.sigmoid(F.leaky_relu(self.second(hidden))).flatten(1))


class _Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, activation="gelu")
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.layer(self.embedding(x))[:, 0]))


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.LSTM(5, 6), nn.GRU(6, 7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.first(x)
        return self.last(self.second(hidden)[0][-1])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4)),
    "convolutions": _Convolutions,
    "transformer": _Transformer,
    "recurrent": _Recurrent,
}


def batch(kind: str, number: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Returns inputs and labels, of two sizes in turn."""
    random, size = np.random.default_rng(number), 3 + number % 2
    if kind == "transformer":
        return random.integers(0, 11, (size, 5)), random.integers(0, 3, size)
    if kind == "recurrent":
        return random.standard_normal((4, size, 5)).astype(np.float32), random.integers(0, 3, size)
    shape, classes = ((size, 6), 4) if kind == "mlp" else ((size, 1, 8, 8), 5)
    return random.standard_normal(shape).astype(np.float32), random.integers(0, classes, size)


def train(module: Any, optimizer: Any, kind: str) -> list[float]:
    """Trains with either API, and returns the losses. Every third gradient adds to the one before."""
    losses = []
    for number in range(STEPS):
        losses.append(float(np.asarray(module(*batch(kind, number))).reshape(())))
        if number % 3 != 1:
            optimizer.step()
            module.lazy_reset_grad()
    return losses


def write(kind: str, folder: Path) -> None:
    """Writes artifacts with onnxruntime-training, the losses of its runtime, and the checkpoint after them."""
    from onnxruntime.training import api, artifacts

    torch.manual_seed(3)
    model, file = MODELS[kind]().train(), folder.with_suffix(".onnx")
    folder.mkdir()
    torch.onnx.export(
        model,
        (torch.as_tensor(batch(kind, 0)[0]),),
        str(file),
        training=torch.onnx.TrainingMode.TRAINING,
        do_constant_folding=False,
        opset_version=15,
        dynamo=False,
        input_names=["x"],
        output_names=["y"],
        dynamic_axes={"x": {int(kind == "recurrent"): "n"}, "y": {0: "n"}},
    )
    proto = onnx.load(file)
    file.unlink()
    names, weights = [value.name for value in proto.graph.initializer], dict(model.named_parameters())
    artifacts.generate_artifacts(
        proto,
        requires_grad=[name for name in names if name in weights],
        frozen_params=[name for name in names if name not in weights],
        loss=artifacts.LossType.CrossEntropyLoss,
        optimizer=artifacts.OptimType.SGD if kind == "mlp" else artifacts.OptimType.AdamW,
        artifact_directory=str(folder),
    )
    path = folder / "optimizer_model.onnx"
    optimizer_model = onnx.load(path)
    optimizer_model.ir_version = 10  # the installed onnx writes a newer one than this runtime reads
    onnx.save(optimizer_model, path)
    state = api.CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    module = api.Module(str(folder / "training_model.onnx"), state)
    losses = train(module, api.Optimizer(str(path), module), kind)
    api.CheckpointState.save_checkpoint(state, str(folder / "trained"), include_optimizer_state=True)
    (folder / LOSSES).write_text(json.dumps(losses) + "\n")
