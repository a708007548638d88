"""Random histories of training from artifacts: the weights are PyTorch's at each stop."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from torch import nn

from ort_trainer import ORTTrainer, optim
from ort_trainer.api import CheckpointState, Module, Optimizer
from ort_trainer.artifacts import trainer_state_dict

from ..helpers import assert_close

SIZES = st.sampled_from([4, 5, 7])


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 3))


def trainer_of(trained: nn.Module) -> ORTTrainer:
    return ORTTrainer(trained, "auto", optim.AdamWConfig(lr=0.01), loss_fn=F.cross_entropy)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("artifacts")
    trainer = trainer_of(model())
    trainer.prepare((torch.randn(4, 6), torch.zeros(4, dtype=torch.int64)))
    trainer.export_artifacts(found)
    return found


def histories_in(folder: Path) -> type[RuleBasedStateMachine]:
    """Returns the histories of the artifacts in a folder."""

    class History(RuleBasedStateMachine):
        """A module, an optimizer and a state, and the same in PyTorch."""

        @initialize()
        def begin(self) -> None:
            self.theirs, self.drawn = model(), 0
            self.optimizer = torch.optim.AdamW(self.theirs.parameters(), lr=0.01)
            self.load(CheckpointState.load_checkpoint(folder / "checkpoint"))

        def load(self, state: CheckpointState) -> None:
            self.state = state
            self.ours = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
            self.update = Optimizer(folder / "optimizer_model.onnx", self.ours)

        def batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
            self.drawn += 1
            generator = torch.Generator().manual_seed(self.drawn)
            return torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator)

        @rule(size=SIZES)
        def backward(self, size: int) -> None:
            x, y = self.batch(size)
            loss = F.cross_entropy(self.theirs(x), y)
            loss.backward()
            found = self.ours.train()(x.numpy(), y.numpy())[0]
            assert_close(torch.as_tensor(found), loss.detach(), 1e-4, "loss")

        @rule(size=SIZES)
        def step(self, size: int) -> None:
            self.backward(size)
            self.update.step()
            self.optimizer.step()
            self.reset()

        @rule()
        def reset(self) -> None:
            self.ours.lazy_reset_grad()
            self.optimizer.zero_grad()

        @rule(size=SIZES)
        def evaluate(self, size: int) -> None:
            x, y = self.batch(size)
            with torch.no_grad():
                logits = copy.deepcopy(self.theirs).eval()(x)
            loss, found = self.ours.eval()(x.numpy(), y.numpy())
            assert_close(torch.as_tensor(found), logits, 1e-4, "logits")
            assert_close(torch.as_tensor(loss), F.cross_entropy(logits, y), 1e-4, "loss of an evaluation")

        @rule(rate=st.sampled_from([0.003, 0.02]))
        def change_rate(self, rate: float) -> None:
            self.update.set_learning_rate(rate)
            self.optimizer.param_groups[0]["lr"] = rate

        @rule(name=st.sampled_from(["0.weight", "3.bias", "2.weight"]), factor=st.sampled_from([0.5, 1.5]))
        def change_a_parameter(self, name: str, factor: float) -> None:
            with torch.no_grad():
                self.theirs.get_parameter(name).mul_(factor)
            self.state.parameters[name].data = self.state.parameters[name].data * np.float32(factor)

        @rule(factor=st.sampled_from([0.5, 1.5]))
        def change_all(self, factor: float) -> None:
            with torch.no_grad():
                for parameter in self.theirs.parameters():
                    parameter.mul_(factor)
            buffer = self.ours.get_contiguous_parameters(trainable_only=True).numpy()
            self.ours.copy_buffer_to_parameters(buffer * np.float32(factor), trainable_only=True)

        @rule(in_memory=st.booleans())
        def save_and_load(self, in_memory: bool) -> None:
            rate = self.update.get_learning_rate()
            if in_memory:
                stored = CheckpointState.save_checkpoint_to_buffer(self.state, include_optimizer_state=True)
                self.load(CheckpointState.load_checkpoint_from_buffer(stored))
            else:
                path = folder / "kept"
                CheckpointState.save_checkpoint(self.state, path, include_optimizer_state=True)
                self.load(CheckpointState.load_checkpoint(path))
            assert self.update.get_learning_rate() == pytest.approx(rate)

        @rule()
        def go_on_in_a_trainer(self) -> None:
            path = folder / "kept"
            CheckpointState.save_checkpoint(self.state, path, include_optimizer_state=True)
            ours = model()
            trainer = trainer_of(ours)
            trainer.load_state_dict(trainer_state_dict(path))
            for name, value in self.theirs.state_dict().items():
                assert_close(ours.state_dict()[name], value, 1e-4, name)

        @rule(
            bad=st.sampled_from(
                [
                    lambda x, y: (x.astype(np.float64), y),
                    lambda x, y: (x[:, :2], y),
                    lambda x, y: (x, y[:1]),
                    lambda x, y: (x, y + 5),
                    lambda x, y: (x,),
                    lambda x, y: (x.tolist(), y),
                ]
            )
        )
        def give_a_bad_batch(self, bad: Callable[..., Any]) -> None:
            x, y = self.batch(4)
            with pytest.raises((TypeError, ValueError, IndexError)):
                self.ours.train()(*bad(x.numpy(), y.numpy()))

        @invariant()
        def is_pytorchs(self) -> None:
            if hasattr(self, "ours"):
                for name, value in self.theirs.named_parameters():
                    ours = torch.as_tensor(np.array(self.state.parameters[name].data))
                    assert_close(ours, value.detach(), 1e-4, name)

    return History


def run(folder: Path, count: int, actions: int) -> None:
    chosen = settings(
        max_examples=count,
        stateful_step_count=actions,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(histories_in(folder), settings=chosen)


def test_histories(folder: Path) -> None:
    run(folder, 20, 20)


@pytest.mark.torture
def test_many_histories(folder: Path) -> None:
    run(folder, int(os.environ.get("HISTORIES", "200")), 30)
