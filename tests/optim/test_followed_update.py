"""``optim.from_torch``: the optimizer's state is the trainer's, as if the optimizer's own ``step`` had run."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ort_trainer import ORTTrainer, optim
from tests.helpers import MLP, assert_close, mlp_batches, mlp_trainer

Make = Callable[[Any], torch.optim.Optimizer]
KINDS: dict[str, Make] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    "Adam, groups": lambda p: torch.optim.Adam([{"params": p[:2], "lr": 0.02}, {"params": p[2:]}], lr=0.01),
    "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
}


class Both:
    """A trainer with ``from_torch``, and a PyTorch loop; what is done with one optimizer is done with both."""

    def __init__(self, make: Make, options: dict[str, Any] | None = None, before: int = 0) -> None:
        torch.manual_seed(7)
        self.models = MLP(), MLP()
        self.models[0].load_state_dict(self.models[1].state_dict())
        self.optimizers = tuple(make(list(model.parameters())) for model in self.models)
        self.batches = iter(mlp_batches(60))
        for _ in range(before):
            x, y = next(self.batches)
            for model, optimizer in zip(self.models, self.optimizers, strict=True):
                self.eager(model, optimizer, x, y)
        self.trainer: ORTTrainer = mlp_trainer(options, optim.from_torch(self.optimizers[0]), self.models[0])

    def eager(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any) -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    def step(self, count: int = 3) -> None:
        for _ in range(count):
            x, y = next(self.batches)
            self.trainer.train_step(x, y)
            self.eager(self.models[1], self.optimizers[1], x, y)
        self.compare()

    def each(self, action: Callable[[Any, Any], Any]) -> list[Any]:
        return [action(model, optimizer) for model, optimizer in zip(self.models, self.optimizers, strict=True)]

    def compare(self) -> None:
        ours, theirs = (optimizer.state_dict() for optimizer in self.optimizers)
        assert ours["state"].keys() == theirs["state"].keys() and ours["param_groups"] == theirs["param_groups"]
        for number, values in theirs["state"].items():
            values = {key: value for key, value in values.items() if value is not None}
            assert ours["state"][number].keys() == values.keys()
            for key, value in values.items():
                assert_close(ours["state"][number][key], value, 1e-4, key)
        for mine, value in zip(*(model.parameters() for model in self.models), strict=True):
            assert_close(mine, value, 1e-4, "weight")


@pytest.mark.parametrize("name", KINDS)
def test_the_state_is_that_of_pytorch(name: str, tmp_path: Path) -> None:
    both = Both(KINDS[name])
    both.compare()
    both.step()
    weights, state = copy.deepcopy((both.models[1].state_dict(), both.optimizers[1].state_dict()))
    for group in (group for optimizer in both.optimizers for group in optimizer.param_groups):
        group["lr"] /= 2
    both.step()

    def load(model: Any, optimizer: Any) -> None:
        model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(state))

    both.each(load)
    both.trainer.save_checkpoint(tmp_path / "loaded")  # without a step in between
    both.step()
    both.each(lambda model, optimizer: optimizer.state.clear())
    both.step()
    both.trainer.load_checkpoint(tmp_path / "loaded")
    load(both.models[1], both.optimizers[1])
    both.step()
    x, y = next(both.batches)  # a step of the optimizer itself
    both.each(lambda model, optimizer: both.eager(model, optimizer, x, y))
    both.step()


@pytest.mark.parametrize("name", ["AdamW", "SGD, momentum"])
def test_used_optimizers_and_states_before_the_first_step_continue(name: str) -> None:
    used = Both(KINDS[name], before=2)
    used.step()
    state = used.optimizers[1].state_dict()
    loaded = Both(KINDS[name])
    loaded.each(lambda model, optimizer: optimizer.load_state_dict(copy.deepcopy(state)))
    loaded.step()


def test_a_copy_of_the_optimizer_has_the_state() -> None:
    both = Both(KINDS["AdamW"])
    both.step()
    (twin,) = copy.deepcopy(both.optimizers[:1])
    for key, value in both.optimizers[1].state_dict()["state"][0].items():
        assert_close(twin.state_dict()["state"][0][key], value, 1e-4, key)


def test_a_schedule_of_the_options_keeps_its_base_rates() -> None:
    both = Both(KINDS["SGD"], {"lr_scheduler": lambda step: 0.5})
    state = KINDS["SGD"](list(MLP().parameters())).state_dict()  # without initial_lr
    for _ in range(2):
        both.trainer.train_step(*next(both.batches))
        both.optimizers[0].load_state_dict(state)
    both.trainer.train_step(*next(both.batches))
    assert both.optimizers[0].param_groups[0]["lr"] == 0.05


def test_states_that_the_rule_can_not_continue() -> None:
    both = Both(KINDS["AdamW"])
    both.step(1)
    optimizer = both.optimizers[0]
    state = copy.deepcopy(optimizer.state_dict())
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(RuntimeError, match="has changed since from_torch.*amsgrad=True.*the optimizer itself"):
        both.trainer.train_step(*next(both.batches))
    for key, value in {"exp_avg": torch.ones(3), "step": torch.ones(2)}.items():
        wrong = copy.deepcopy(state)
        wrong["state"][0][key] = value
        optimizer.load_state_dict(wrong)
        with pytest.raises(ValueError, match=f"AdamW.state of 'fc1.weight' must have '{key}' of shape"):
            both.trainer.state_dict()
    optimizer.load_state_dict(state)
    both.step(1)
