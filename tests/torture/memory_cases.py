"""The actions that are repeated while memory is measured. Run as a program: ``FILE CASE COUNT ...``, writes JSON."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ort_trainer import CheckpointManager, ORTTrainer, ORTTrainerOptions, optim

from ..helpers import MLP, mlp_batches, mlp_trainer
from .memory import growth

FP16 = {"mixed_precision": {"enabled": True, "dtype": "float16"}}


def options(kernels: str, more: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"batch": {"gradient_accumulation_steps": 3}, "utils": {"kernels": kernels}, **(more or {})}


def steps(kernels: str, more: dict[str, Any] | None = None) -> Callable[[int], object]:
    """Returns steps with accumulation and dropout, and occasional evaluations."""
    trainer, batches = mlp_trainer(options(kernels, more), model=MLP(dropout=0.1)), mlp_batches(7)

    def action(number: int) -> None:
        trainer.train_step(*batches[number % 7])
        if number % 10 == 0:
            trainer.eval_step(*batches[number % 7])

    return action


def shapes(kernels: str) -> Callable[[int], object]:
    """Returns steps with a different batch size each time."""
    trainer = mlp_trainer(options(kernels), model=MLP(dropout=0.1))
    ((x, label),) = mlp_batches(1, size=10_007)

    def action(number: int) -> None:
        size = 2 + number * 7919 % 10_005  # 7919 is prime, so no size repeats
        trainer.train_step(x[:size], label[:size])

    return action


class Text(nn.Module):
    """A layer of a transformer over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embedding(tokens))).transpose(1, 2)


def texts(kernels: str) -> Callable[[int], object]:
    """Returns steps on texts, with a different batch size and length each time."""
    desc = {"inputs": [("tokens", ["n", "l"]), ("label", ["n", "l"])], "outputs": [("loss", [], True)]}
    given = ORTTrainerOptions(options(kernels))
    trainer = ORTTrainer(Text(), desc, optim.AdamConfig(lr=1e-3), loss_fn=F.cross_entropy, options=given)
    tokens = torch.randint(0, 50, (101, 103))

    def action(number: int) -> None:
        batch = tokens[: 2 + number * 37 % 99, : 2 + number * 41 % 101].contiguous()
        trainer.train_step(batch, batch)

    return action


def saves(later: bool) -> Callable[[int], object]:
    """Returns steps, each followed by a checkpoint."""
    trainer, batches = mlp_trainer(model=MLP(hidden=2000)), mlp_batches(7)
    manager = CheckpointManager(tempfile.mkdtemp(), keep_last=2, async_save=later)

    def action(number: int) -> None:
        trainer.train_step(*batches[number % 7])
        manager.save(trainer, metrics={"loss": number}, user_dict={"number": number})
        if not later:
            trainer.save_checkpoint(manager.directory / "own.ortckpt", overwrite=True)
            trainer.load_checkpoint(manager.directory / "own.ortckpt")

    return action


class Samples(Dataset[Any]):
    """Samples that the workers make."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return torch.full((8,), index / 64), index % 3


def epoch(start: str | None) -> tuple[ORTTrainer, Callable[[int], object]]:
    """Returns a trainer, and epochs over a loader whose two workers restart for each; without workers for None."""
    trainer, workers = mlp_trainer(), 0 if start is None else 2
    batches = DataLoader(Samples(), batch_size=4, shuffle=True, num_workers=workers, multiprocessing_context=start)

    def action(number: int) -> None:
        for batch in batches:
            trainer.train_step(*batch)
        assert trainer.train_step_info.step == 16 * (number + 1)

    return trainer, action


CASES: dict[str, Callable[[], Callable[[int], object]]] = {
    "steps": lambda: steps("auto"),
    "steps, ONNX Runtime's kernels": lambda: steps("onnxruntime"),
    "steps in fp16": lambda: steps("auto", FP16),
    "steps in fp16, ONNX Runtime's kernels": lambda: steps("onnxruntime", FP16),
    "shapes": lambda: shapes("auto"),
    "shapes, ONNX Runtime's kernels": lambda: shapes("onnxruntime"),
    "texts": lambda: texts("auto"),
    "texts, ONNX Runtime's kernels": lambda: texts("onnxruntime"),
    "saves": lambda: saves(later=False),
    "saves in a thread": lambda: saves(later=True),
    "workers by fork": lambda: epoch("fork")[1],
    "workers by spawn": lambda: epoch("spawn")[1],
}


def main(arguments: list[str]) -> None:
    found = {}
    for name, count in zip(arguments[::2], arguments[1::2], strict=True):
        torch.manual_seed(0)
        each, sizes = growth(CASES[name](), int(count))
        found[name] = {"bytes": each, "sizes": sizes}
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[2:])
