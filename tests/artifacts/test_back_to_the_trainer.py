"""Loading state trained from artifacts back into the trainer, and updates of incomplete windows."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ort_trainer import CheckpointError, ORTTrainer, optim
from ort_trainer.api import CheckpointState, Module
from ort_trainer.artifacts import trainer_state_dict
from ort_trainer.state.devices import for_trainer
from ort_trainer.state.state import State
from ort_trainer.state.state_dict import to_state_dict
from ort_trainer.state.training_api import from_bytes, to_bytes

from ..api.artifacts import as_version_2
from ..helpers import MLP, mlp_batches, mlp_trainer
from .twins import Artifacts, assert_near, assert_same_state, described, exported

OWN: dict[str, Any] = {"utils": {"kernels": "onnxruntime"}}
# A checkpoint's record of the trainer, with only the options that are read.
SOUND: dict[str, Any] = {
    "trainer_options": {"gradient_accumulation_steps": 1},
    "window": {"reduction": "mean", "assigned_size": None},
}


def windowed(size: int, reduction: str = "mean", config: Any = None, **more: Any) -> ORTTrainer:
    batch = {"gradient_accumulation_steps": size, "gradient_reduction": reduction}
    return mlp_trainer({**OWN, "batch": batch, **more}, config or optim.SGDConfig(lr=0.1, momentum=0.9))


@pytest.mark.engine
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_windows_of_any_length(reduction: str, tmp_path: Path) -> None:
    """Windows shorter and longer than their size; at the export, the first is incomplete and already too long."""
    config = optim.AdamConfig(lr=0.01, max_norm_clip=0.2) if reduction == "mean" else None
    trainer, batches = windowed(3, reduction, config), iter(mlp_batches(30))
    trainer.prepare(mlp_batches(1)[0])
    for _ in range(4):
        trainer.session.train_step(next(batches))
    artifacts = exported(trainer, tmp_path)

    def train() -> None:
        batch = next(batches)
        trainer.session.train_step(batch)
        artifacts.train(batch)

    def update() -> None:
        trainer.optimizer_step()
        artifacts.update()
        assert_same_state(trainer, artifacts.checkpoint(), 3e-6)

    for steps in (1, 1, 3, 2, 5):
        for number in range(steps):
            if steps == 2 and number == 1:  # in the middle of a window
                CheckpointState.save_checkpoint(artifacts.state, tmp_path / "checkpoint", include_optimizer_state=True)
                artifacts = Artifacts(tmp_path)
            train()
        update()
    artifacts.train(next(batches))
    artifacts.module.lazy_reset_grad()  # resets the count too
    train()
    update()


@pytest.mark.engine
def test_models_and_checkpoints_as_they_were_before(tmp_path: Path) -> None:
    """They lack the count, as models of a window of one still do, and the record of the trainer."""
    trainer, batches = windowed(1, config=optim.AdamWConfig(lr=0.01)), mlp_batches(4)
    trainer.train_step(*batches[0])
    artifacts = exported(trainer, tmp_path)
    said: Any = described(tmp_path, "optimizer_model.onnx")
    assert said.micro_batches is None
    assert b"micro_batches" not in (tmp_path / "optimizer_model.onnx").read_bytes()
    (tmp_path / "checkpoint").write_bytes(as_version_2(to_bytes(artifacts.checkpoint())))
    artifacts = Artifacts(tmp_path)
    for batch in batches[1:]:
        trainer.train_step(*batch)
        artifacts.train(batch)
        artifacts.update()
    assert_same_state(trainer, artifacts.checkpoint())
    state = trainer_state_dict(tmp_path / "checkpoint")
    with pytest.raises(RuntimeError, match="optimizer_name"):
        trainer.load_state_dict(state)
    trainer.load_state_dict(state, strict=False)
    assert trainer.train_step_info.optimization_step == 1


class Whole(MLP):
    """Has dropout, running statistics, a non-persistent buffer, and unused parameters."""

    def __init__(self) -> None:
        super().__init__(dropout=0.2)
        self.norm = nn.BatchNorm1d(16)
        self.unused = nn.Linear(3, 3)
        self.register_buffer("factor", torch.tensor(2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.dropout(self.norm(torch.tanh(self.fc1(x))))) * self.factor


def whole(config: Any) -> ORTTrainer:
    schedule = optim.LinearWarmupLRScheduler(20, 0.2)
    more = {**OWN, "batch": {"gradient_accumulation_steps": 3}, "lr_scheduler": schedule}
    return mlp_trainer(more, config, Whole())


def assert_near_everywhere(ours: Any, theirs: Any, what: str = "state") -> None:
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), what
        for key, value in theirs.items():
            assert_near_everywhere(ours[key], value, f"{what}[{key}]")
    elif isinstance(theirs, np.ndarray):
        assert_near(ours, theirs, 1e-6 if theirs.dtype.kind == "f" else 0.0, what)
    else:
        assert ours == pytest.approx(theirs), what


@pytest.mark.engine
def test_back_in_the_trainer_all_is_as_if_it_had_trained_there(tmp_path: Path) -> None:
    trainer, batches = whole(optim.LambConfig(lr=0.01)), mlp_batches(10)
    for batch in batches[:4]:
        trainer.train_step(*batch)
    artifacts = exported(trainer, tmp_path)
    for batch in batches[4:]:
        before = trainer.train_step_info.optimization_step
        trainer.train_step(*batch)
        artifacts.train(batch)
        if trainer.train_step_info.optimization_step > before:
            artifacts.update()
    CheckpointState.save_checkpoint(artifacts.state, tmp_path / "trained", include_optimizer_state=True)
    state, expected = trainer_state_dict(tmp_path / "trained"), trainer.state_dict()
    assert state["window"]["micro_batches"] == 1 and state["gradients"]
    with torch.no_grad():
        for value in trainer.session.parameters.values():
            value.zero_()
    trainer.session.generator.manual_seed(5)
    trainer.lazy_reset_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is missing
        trainer.load_state_dict(state)
    assert_near_everywhere(trainer.state_dict(), expected)
    other = whole(optim.LionConfig(lr=0.01))
    with pytest.raises(ValueError, match="state is from LambConfig, but the trainer uses LionConfig"):
        other.load_state_dict(state)


@pytest.mark.engine
def test_a_parameter_that_was_frozen_after_training(tmp_path: Path) -> None:
    """No model has its moments, so the file has none, and the trainer keeps its own."""
    model, (first, second) = MLP(), mlp_batches(2)
    trainer = mlp_trainer(OWN, optim.SGDConfig(lr=0.1, momentum=0.9), model)
    trainer.train_step(*first)
    model.fc1.weight.requires_grad_(False)
    trainer.train_step(*second)
    expected = trainer.state_dict()["optimizer"]
    exported(trainer, tmp_path)
    state = trainer_state_dict(tmp_path / "checkpoint")
    with pytest.raises(RuntimeError, match=r"Missing keys: \['fc1.weight'\] in state_dict\[optimizer\]"):
        trainer.load_state_dict(state)
    trainer.load_state_dict(state, strict=False)
    assert expected["fc1.weight"]["Momentum"].any()
    assert_near_everywhere(trainer.state_dict()["optimizer"], expected)


def test_counts_that_differ() -> None:
    weights = {name: np.ones(2, np.float32) for name in ("a", "b")}

    def read(optimizer: dict[str, Any]) -> Any:
        state = State(weights, ["a", "b"], optimizer=optimizer, **SOUND)
        return to_state_dict(for_trainer(state))["optimizer"]

    two, five = np.array([2]), np.array([5])
    assert read({"a.Update_Count": two, "b.Update_Count": five}) == {
        "a": {"Update_Count": two}, "b": {"Update_Count": five}
    }  # fmt: skip
    shared = {"shared_optimizer_state": {"Step": five}}
    assert read({"a.Step": two, "b.Step": five}) == read({"Step": five}) == shared


def test_a_damaged_part_for_the_trainer() -> None:
    weights = {"a": np.ones(2, np.float32)}
    changes: list[Any] = [
        {"trainer_options": {}},
        {"trainer_options": {"gradient_accumulation_steps": 0}},
        {"trainer_options": {"gradient_accumulation_steps": 10**400}},
        {"transient": ["a", "a"]},
        {"transient": [3]},
        {"idle": {"a": [{}]}},
        {"window": {}},
        {"transient": ["b"]},
        {"idle": {"b": []}},
        {"idle": 3},
    ]
    sound = from_bytes(to_bytes(State(weights, ["a"], **SOUND)))
    assert {key: getattr(sound, key) for key in SOUND} == SOUND
    for change in changes:
        with pytest.raises(CheckpointError, match="is damaged"):
            from_bytes(to_bytes(State(weights, ["a"], **{**SOUND, **change})))
    for count in (-1, 1 << 62):
        with pytest.raises(CheckpointError, match="is damaged.*micro_batches"):
            from_bytes(to_bytes(State(weights, ["a"], micro_batches=count)))
    with pytest.raises(CheckpointError, match="is damaged.*micro_batches"):  # the gradients need a count
        from_bytes(to_bytes(State(weights, ["a"], gradients=weights, **SOUND)))


@pytest.mark.engine
def test_a_window_that_is_not_full_counts_in_other_modules_too(tmp_path: Path) -> None:
    """The count is part of the state, like the gradients."""
    trainer, (first, second) = windowed(4), mlp_batches(2)
    trainer.prepare(first)
    artifacts = exported(trainer, tmp_path)
    other = Module(tmp_path / "training_model.onnx", artifacts.state)
    artifacts.train(first)
    other(*(value.numpy() for value in second))
    artifacts.update()
    for batch in (first, second):
        trainer.session.train_step(batch)
    trainer.optimizer_step()
    assert_same_state(trainer, artifacts.checkpoint())
