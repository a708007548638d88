"""Checkpoints loaded by a different trainer: other precision, other accumulation, other batch size."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ort_trainer import ORTTrainer, optim

from ..helpers import MLP, Reference, assert_same_weights, mlp_batches, mlp_trainer

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp16": {"mixed_precision": {"enabled": True, "dtype": "float16"}},
    "bf16": {"mixed_precision": {"enabled": True, "dtype": "bfloat16"}},
}
BATCHES = [*mlp_batches(3), *mlp_batches(7, size=9, seed=2)]
"""Three before the checkpoint, and more of another size after it."""


def make(model: torch.nn.Module, accumulation: int, precision: str = "fp32", reduction: str = "mean") -> ORTTrainer:
    options = {
        "batch": {"gradient_accumulation_steps": accumulation, "gradient_reduction": reduction},
        "utils": {"grad_norm_clip": False},
        **PRECISIONS[precision],
    }
    return mlp_trainer(options, optim.SGDConfig(lr=0.2, momentum=0.9), copy.deepcopy(model))


@pytest.fixture(scope="module")
def model() -> MLP:
    torch.manual_seed(5)
    return MLP()


def train(trainer: ORTTrainer, start: int, stop: int) -> None:
    for x, label in BATCHES[start:stop]:
        trainer.train_step(x, label)


def trained_by_pytorch(model: MLP, windows: Sequence[int]) -> torch.nn.Module:
    """Returns a copy trained by PyTorch, with the given numbers of micro-batches per window."""
    reference, batches = Reference(model, lr=0.2, momentum=0.9), iter(BATCHES)
    for size in windows:
        for _ in range(size):
            reference.backward(*next(batches))
        reference.update()
    return reference.model


@pytest.fixture(scope="module")
def saved(model: MLP, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of each precision after 3 micro-batches of a window of 4."""
    folder = tmp_path_factory.mktemp("saved")
    for precision in ("fp32", "fp16"):
        trainer = make(model, 4, precision)
        train(trainer, 0, 3)
        trainer.save_checkpoint(folder / precision)
    return folder


@pytest.mark.engine
@pytest.mark.parametrize(("before", "after"), [("fp32", "fp16"), ("fp16", "fp32"), ("fp16", "bf16")])
def test_another_precision_in_the_middle_of_a_window(before: str, after: str, model: MLP, saved: Path) -> None:
    trainer = make(model, 4, after)
    message = "Missing key: loss_scaler" if after == "fp16" else "The trainer has no loss_scaler, so it ignores that"
    with pytest.warns(UserWarning, match=message):
        trainer.load_checkpoint(saved / before)
    train(trainer, 3, 8)
    assert (trainer.train_step_info.step, trainer.train_step_info.optimization_step) == (8, 2)
    # The narrow dtypes have 11 and 8 bits.
    assert_same_weights(trainer, trained_by_pytorch(model, [4, 4]), 2e-2 if after == "bf16" else 5e-3)


@pytest.mark.engine
@pytest.mark.parametrize(("accumulation", "windows"), [(2, [4, 2, 2, 2]), (5, [5, 5])])
@pytest.mark.parametrize("prepared", [False, True])
def test_another_accumulation_and_batch_size(
    accumulation: int, windows: list[int], prepared: bool, model: MLP, saved: Path
) -> None:
    trainer = make(model, accumulation)
    if prepared:
        trainer.prepare(BATCHES[5])
    trainer.load_checkpoint(saved / "fp32")
    train(trainer, 3, 10)
    assert trainer.train_step_info.optimization_step == len(windows)
    assert_same_weights(trainer, trained_by_pytorch(model, windows), 1e-5)


def test_another_reduction_and_its_way_out(model: MLP, saved: Path, tmp_path: Path) -> None:
    other = make(model, 4, reduction="sum")
    with pytest.raises(
        ValueError, match=r"load it with the same reduction, end the window \(trainer.optimizer_step\(\)\)"
    ):
        other.load_checkpoint(saved / "fp32")
    trainer = make(model, 4)
    trainer.load_checkpoint(saved / "fp32")
    trainer.prepare(BATCHES[0])
    trainer.optimizer_step()
    trainer.save_checkpoint(tmp_path / "ended")
    other.load_checkpoint(tmp_path / "ended")
    other.prepare(BATCHES[0])
    assert_same_weights(other, trained_by_pytorch(model, [3]), 1e-5)
