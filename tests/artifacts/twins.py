"""Compares a trainer with ``ort_trainer.api`` on its export, step by step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ort_trainer import ORTTrainer
from ort_trainer.api import CheckpointState, Module, Optimizer
from ort_trainer.state.state import State
from ort_trainer.state.training_api import from_bytes
from ort_trainer.step.contract import METADATA, OptimizerModel, Step, from_metadata

Batch = Sequence[torch.Tensor]


class Artifacts:
    """Trains from a folder of artifacts.

    Attributes:
        folder: The folder.
        state, module, optimizer: The objects made from it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = CheckpointState.load_checkpoint(folder / "checkpoint")
        self.module = Module(folder / "training_model.onnx", self.state, folder / "eval_model.onnx")
        self.optimizer = Optimizer(folder / "optimizer_model.onnx", self.module)

    def train(self, batch: Batch) -> list[Any]:
        return _listed(self.module.train()(*(value.numpy() for value in batch)))

    def evaluate(self, batch: Batch) -> list[Any]:
        return _listed(self.module.eval()(*(value.numpy() for value in batch)))

    def update(self) -> None:
        self.optimizer.step()
        self.module.lazy_reset_grad()

    def checkpoint(self) -> State:
        return from_bytes(CheckpointState.save_checkpoint_to_buffer(self.state, include_optimizer_state=True))


def _listed(outputs: Any) -> list[Any]:
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def exported(trainer: ORTTrainer, folder: Path) -> Artifacts:
    trainer.export_artifacts(folder)
    return Artifacts(folder)


def described(folder: Path, name: str) -> Step | OptimizerModel:
    """Returns a model's description of itself."""
    import onnx

    props = {entry.key: entry.value for entry in onnx.load(folder / name).metadata_props}
    kind: Any = OptimizerModel if name == "optimizer_model.onnx" else Step
    found: Step | OptimizerModel = from_metadata(kind, props[METADATA], name)
    return found


def assert_near(ours: Any, theirs: Any, relative: float, what: str) -> None:
    """Compares two arrays by the norm of their difference, so elements near zero don't dominate."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, what
    difference = np.linalg.norm((ours.astype(np.float64) - theirs.astype(np.float64)).ravel())
    assert difference <= relative * max(np.linalg.norm(theirs.astype(np.float64).ravel()), 1e-6), (
        f"{what}: {difference}"
    )


def assert_same_state(trainer: ORTTrainer, checkpoint: State, relative: float = 1e-6) -> None:
    """Compares weights, buffers, the optimizer's state and the number of updates."""
    state = trainer.state_dict()
    tensors = {**state["model"]["full_precision"], **state.get("transient_buffers", {})}
    found = {**checkpoint.parameters, **checkpoint.buffers}
    assert found and found.keys() <= tensors.keys()
    for name, value in found.items():
        assert_near(value, tensors[name], relative, name)
    assert checkpoint.optimizer is not None
    for key, value in checkpoint.optimizer.items():
        name, _, slot = key.rpartition(".")
        if key == "Step":
            expected = [state["optimizer"]["shared_optimizer_state"]["Step"]]
        elif key == "Update_Count":
            expected = [kept[key] for kept in state["optimizer"].values()]
        else:
            expected = [state["optimizer"][name][slot]]
        for other in expected:
            assert_near(value, other, relative, key)
    slots = sum(
        len([slot for slot in kept if slot not in ("Update_Count", "Step")]) for kept in state["optimizer"].values()
    )
    assert len([key for key in checkpoint.optimizer if key.rpartition(".")[2] not in ("Update_Count", "Step")]) == slots
    assert checkpoint.optimization_step == trainer.train_step_info.optimization_step


def assert_steps_alike(
    trainer: ORTTrainer,
    artifacts: Artifacts,
    batches: Sequence[Batch],
    relative: float = 1e-6,
    *,
    evaluates: bool = True,
) -> None:
    """Trains both on the same batches, which end with a full window, and compares outputs, rates and state.

    The evaluation at the end costs the trainer one more export.
    """
    for number, batch in enumerate(batches):
        before = trainer.train_step_info.optimization_step
        ours, theirs = _listed(_tuple(trainer.train_step(*batch))), artifacts.train(batch)
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_near(other, mine.numpy(), relative, f"outputs of step {number}")
        if trainer.train_step_info.optimization_step > before:
            rate = artifacts.optimizer.get_learning_rate()
            assert abs(rate - (trainer.train_step_info.learning_rates or [0.0])[-1]) <= 1e-6 * rate
            artifacts.update()
    assert_same_state(trainer, artifacts.checkpoint(), relative)
    if evaluates:
        ours = _listed(_tuple(trainer.eval_step(*batches[0])))
        for mine, other in zip(ours, artifacts.evaluate(batches[0]), strict=True):
            assert_near(other, mine.numpy(), relative, "evaluation")


def _tuple(outputs: Any) -> Any:
    return tuple(outputs) if isinstance(outputs, list) else outputs
