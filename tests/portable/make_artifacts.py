"""Writes what the tests in JavaScript and C++ compare with, to build/portable: artifacts and how Python trains them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.api import CheckpointState, Module, Optimizer

from expressions import DIVISIONS_BY_ZERO, REFUSED, SIZES, VALUES  # isort: skip, beside this file
from onnx_encodings import write_encodings  # isort: skip

BUILD = Path(__file__).parents[2] / "build" / "portable"
# Numbers and texts that other languages write in another way than Python.
PROPERTIES = {
    "3": 3,
    "1": 1.0,
    "tiny": 5e-324,
    "small": 1e-05,
    "large": 1e16,
    "below": 123456789012345.0,
    "long": 2**62,
    "minus zero": -0.0,
    "text": 'ünï "\\ \x7f € 😀 \n',
}


class Net(nn.Module):
    """Indices, batch norm, and dropout of more elements than one stream draws."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.layers = nn.Sequential(
            nn.Linear(64, 9000), nn.GELU(), nn.Dropout(0.3), nn.Linear(9000, 32), nn.BatchNorm1d(32), nn.Linear(32, 10)
        )

    def forward(self, image: torch.Tensor, words: torch.Tensor) -> Any:
        """Returns logits (batch, 10) for images (batch, 64) and words (batch, 4)."""
        return self.layers(image + self.embedding(words).flatten(1))


def write(name: str, module: nn.Module, desc: Any, config: Any, scheduler: Any, batches: Any, loss: Any) -> None:
    """Exports a module, trains it in Python by two micro-batches an update, and writes both."""
    folder = BUILD / name
    options = {"lr_scheduler": scheduler, "batch": {"gradient_accumulation_steps": 2}}
    trainer = ORTTrainer(module, desc, config, loss_fn=loss, options=ORTTrainerOptions(options))
    trainer.prepare(tuple(map(torch.from_numpy, batches[0])))
    trainer.export_artifacts(folder)
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    step = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    optimizer = Optimizer(folder / "optimizer_model.onnx", step)
    losses, rates = [], []
    for number, batch in enumerate(batches, 1):
        losses.append(float(step(*batch)[0]))
        if number == len(batches) // 2 + 1:
            state.properties.update(PROPERTIES)
            CheckpointState.save_checkpoint(state, folder / "middle", True)
            CheckpointState.save_checkpoint(state, folder / "weights")
        if number % 2 == 0:
            rates.append(optimizer.get_learning_rate())
            optimizer.step()
            step.lazy_reset_grad()
    step.eval()
    plan = {
        "losses": losses,
        "rates": rates,
        "loss": float(step(*batches[0])[0]),
        "inputs": [
            [
                {"name": input, "dtype": str(part.dtype), "shape": part.shape, "values": part.reshape(-1).tolist()}
                for input, part in zip(step.input_names(), batch, strict=True)
            ]
            for batch in batches
        ],
    }
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")


def main() -> None:
    """Writes all folders."""
    BUILD.mkdir(parents=True, exist_ok=True)
    known = {"sizes": SIZES, "values": VALUES, "refused": REFUSED, "divisions": DIVISIONS_BY_ZERO}
    (BUILD.parent / "expressions.json").write_text(json.dumps(known), encoding="utf-8")
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    desc = {
        "inputs": [("image", ["batch", 64]), ("words", ["batch", 4]), ("label", ["batch"])],
        "outputs": [("loss", [], True), ("logits", ["batch", 10])],
    }
    net = Net()
    biases = [name for name, _ in net.named_parameters() if name.endswith("bias")]
    config = optim.AdamConfig([{"params": biases, "lambda_coef": 0.0, "lr": 1e-3}], lr=2e-3, lambda_coef=1e-2)
    batches = [
        (rng.standard_normal((size, 64)).astype(np.float32), rng.integers(0, 11, (size, 4)), rng.integers(0, 10, size))
        for size in (32, 17, 32, 32) * 5
    ]
    schedule = optim.lr_scheduler.CosineWarmupLRScheduler(12, warmup=0.1)
    write("net", net, desc, config, schedule, batches, nn.functional.cross_entropy)

    small = [tuple(rng.standard_normal((8, size)).astype(np.float32) for size in (4, 2)) for _ in range(20)]
    desc = {"inputs": [("input", [8, 4]), ("y", [8, 2])], "outputs": [("loss", [], True), ("out", [8, 2])]}
    schedules = optim.lr_scheduler
    for name, config, scheduler in (
        ("constant", optim.SGDConfig(lr=0.1), schedules.ConstantWarmupLRScheduler(8, warmup=0.3)),
        ("linear", optim.LambConfig(lr=0.1), schedules.LinearWarmupLRScheduler(8, warmup=0.3)),
        ("poly", optim.LionConfig(lr=0.01), schedules.PolyWarmupLRScheduler(8, warmup=0.3)),
        ("none", optim.AdamWConfig(lr=0.1), None),
    ):
        write(name, nn.Linear(4, 2), desc, config, scheduler, small, nn.functional.mse_loss)
    write_encodings(BUILD.parent / "encodings", (BUILD / "none" / "eval_model.onnx").read_bytes())


if __name__ == "__main__":
    main()
