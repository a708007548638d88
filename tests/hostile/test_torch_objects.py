"""Wrong values in a checkpoint's part of a PyTorch optimizer or schedule: refused at once, or harmless."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from ort_trainer import CheckpointError
from ort_trainer.optim.torch_optimizer import TorchOptimizerConfig
from ort_trainer.state import load_checkpoint_file, save_checkpoint_file
from ort_trainer.train.learning_rates import learning_rates

from .readers import same

WRONG: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 30, 1 << 70, 0.5, math.nan, math.inf, -math.inf, 1e300, "text", "", "max"),
    *([], {}, [[1]], [0.5, 0.5], {"a": 1}, np.zeros((0,)), np.ones((1, 1, 1), np.float32)),
    *(torch.ones(()), torch.tensor(math.nan), torch.ones(3, 2), torch.ones(3, dtype=torch.complex64)),
)
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.1),
    "Adam, fused": lambda p: torch.optim.Adam(p, 0.1, fused=True, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(
        [{"params": [p[0]], "lr": torch.tensor(0.1)}, {"params": p[1:]}], foreach=False
    ),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.1, decoupled_weight_decay=True),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.1, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.1),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.1),
    "Muon": lambda p: torch.optim.Muon(p[:1], 0.1),
    "LBFGS": lambda p: torch.optim.LBFGS(p, 0.1, max_iter=4, history_size=3, line_search_fn="strong_wolfe"),
}


class Factor:
    """A function with state, which a schedule saves."""

    def __init__(self) -> None:
        self.base = 0.9

    def __call__(self, epoch: int) -> float:
        return 0.9**epoch


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    "LambdaLR of an object": lambda o: lr_scheduler.LambdaLR(o, Factor()),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda epoch: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=6),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.5, total_iters=6),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6, 1.5),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 6),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "CyclicLR with a function": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, scale_fn=Factor()),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20, three_phase=True),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, total_iters=6), lr_scheduler.MultiStepLR(o, [2, 5])]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(o, 6)], [4]
    ),
}


class Trained:
    """A model with an optimizer and perhaps a schedule, trained as in PyTorch, whose state a checkpoint holds."""

    def __init__(self, optimizer: str, schedule: str = "", steps: int = 3) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 3)
        self.optimizer = OPTIMIZERS[optimizer](list(self.model.parameters()))
        self.scheduler = SCHEDULES[schedule](self.optimizer) if schedule else None
        self.config = TorchOptimizerConfig(self.optimizer)
        self.config.bind(self.model)
        self.rates = learning_rates(self.config, self.scheduler)
        self.step(steps)

    def step(self, count: int) -> None:
        """Makes steps, whose rates the trainer has to be able to read."""

        def closure() -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = self.model(torch.ones(2, 4)).pow(4).sum()
            loss.backward()
            return loss

        for _ in range(count):
            self.optimizer.step(closure)
            if self.scheduler is not None:
                self.rates.updated()
            assert all(map(math.isfinite, self.config.learning_rates))

    def state(self) -> dict[str, Any]:
        state = {"torch_optimizer": self.config.state_dict()}
        return state | ({} if self.scheduler is None else {"lr_scheduler": copy.deepcopy(self.rates.state_dict())})

    def load(self, state: dict[str, Any]) -> None:
        if self.scheduler is not None:
            self.rates.check_state(state["lr_scheduler"], True)
        optimizer = self.config.read_state(state["torch_optimizer"])
        self.rates.load_state_dict(state.get("lr_scheduler"), True)
        self.config.load_state_dict(optimizer)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield from places(entry, (*path, key))


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    save_checkpoint_file(file, state, {})
    file.seek(0)
    return load_checkpoint_file(file)[0]


def check_wrong_values(optimizer: str, schedule: str, part: str) -> None:
    trained = Trained(optimizer, schedule)
    whole, refused, cases = through_a_file(trained.state()), 0, 0
    for *above, last in places(whole[part]):
        for wrong in WRONG:
            state = {**whole, part: copy.deepcopy(whole[part])}
            inner = state[part]
            for key in above:
                inner = inner[key]
            inner[last], cases = copy.deepcopy(wrong), cases + 1  # a step may change it in place
            before, where = trained.state(), (*above, last, wrong)
            try:
                trained.load(state)
            except CheckpointError as error:
                assert same(trained.state(), before) and part in str(error), where
                refused += 1
                continue
            except RuntimeError as error:  # other names
                assert same(trained.state(), before) and ("Unexpected" in str(error) or "other parameter" in str(error))
                refused += 1
                continue
            try:
                trained.step(12)
                through_a_file(trained.state())
                trained.load(whole)
            except Exception as error:
                raise AssertionError(f"{where} was loaded: {error!r}") from error
            trained = Trained(optimizer, schedule)
    assert refused > cases // 2


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_wrong_values_of_an_optimizer(name: str) -> None:
    check_wrong_values(name, "", "torch_optimizer")


@pytest.mark.parametrize("name", SCHEDULES)
def test_wrong_values_of_a_schedule(name: str) -> None:
    check_wrong_values("SGD with momentum", name, "lr_scheduler")


@pytest.mark.parametrize("steps", [0, 1, 3, 20])
@pytest.mark.parametrize(("optimizer", "schedule"), [*((o, "") for o in OPTIMIZERS), *(("SGD", s) for s in SCHEDULES)])
def test_sound_states_go_on_loading(optimizer: str, schedule: str, steps: int) -> None:
    """From any step, before the first one and after the last one of a schedule, into a used and an unused object."""
    optimizer = "SGD with momentum" if schedule.startswith(("OneCycle", "Cyclic")) else optimizer
    one = Trained(optimizer, schedule, steps)
    state = through_a_file(one.state())
    for other in (Trained(optimizer, schedule, 0), Trained(optimizer, schedule, 2)):
        other.load(state)
        assert same(other.state(), one.state())


def test_rates_may_grow() -> None:
    """A schedule of another factor is tried for as many steps, at which its rates would be infinite."""
    one, other = Trained("SGD", "ExponentialLR", 0), Trained("SGD", "ExponentialLR", 0)
    state = one.state()
    state["lr_scheduler"].update(gamma=1e3, last_epoch=900, _step_count=901)
    other.load(state)
    assert other.scheduler.gamma == 1e3
