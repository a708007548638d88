from __future__ import annotations

import math

import pytest
import torch

from ort_trainer import TrainStepInfo, optim

from ..helpers import mlp_batches, mlp_trainer


def rates(scheduler: optim._LRScheduler, steps: int, lr: float = 1.0) -> list[float]:
    info = TrainStepInfo(optim.SGDConfig(lr=lr))
    found = []
    for info.optimization_step in range(steps):
        found.append(scheduler._step(info)[0])
        assert scheduler.get_last_lr() == [found[-1]]
    return found


# Expected values are computed by hand from the formulas with T = 10, W = 2 (or 0.02 for the default warm-up).
@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        (optim.ConstantWarmupLRScheduler(10, 0.2), [0, 0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        (optim.LinearWarmupLRScheduler(10, 0.2), [0, 0.5, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8, 0, 0]),
        (
            optim.CosineWarmupLRScheduler(10, 0.5, 0.2),
            [0, 0.5, *(0.5 * (1 + math.cos(math.pi * k / 8)) for k in range(8)), 0, 0],
        ),
        (
            optim.PolyWarmupLRScheduler(10, 0.1, 2.0, 0.2),
            [0, 0.5, *(0.9 * (1 - k / 8) ** 2 + 0.1 for k in range(8)), 0.1, 0.1],
        ),
        (optim.LinearWarmupLRScheduler(10), [0, *((10 - s) / 9.98 for s in range(1, 11)), 0]),
        (optim.LinearWarmupLRScheduler(4, 0.0), [1, 0.75, 0.5, 0.25, 0]),
        (optim.CosineWarmupLRScheduler(4, 1.0, 0.0), [1, 0.5, 0, 0.5, 1, 1]),
    ],
)
def test_values(scheduler: optim._LRScheduler, expected: list[float]) -> None:
    assert rates(scheduler, len(expected)) == pytest.approx(expected, abs=1e-12)
    assert rates(scheduler, len(expected), lr=0.5)[:2] == pytest.approx([e / 2 for e in expected[:2]])


def test_cosine_does_not_rise_after_the_end() -> None:
    assert rates(optim.CosineWarmupLRScheduler(5), 20)[5:] == [0.0] * 15


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: optim.ConstantWarmupLRScheduler(0), ValueError, "'total_steps' must be at least 1"),
        (lambda: optim.ConstantWarmupLRScheduler(1.5), TypeError, "'total_steps' must be an int"),
        (lambda: optim.LinearWarmupLRScheduler(10, 1.0), ValueError, "'warmup' is a share of total_steps"),
        (lambda: optim.LinearWarmupLRScheduler(10, -0.1), ValueError, "'warmup' must be at least 0"),
        (lambda: optim.LinearWarmupLRScheduler(10, "a"), TypeError, "'warmup' must be a number"),
        (lambda: optim.CosineWarmupLRScheduler(10, cycles=0), ValueError, "'cycles' must be positive"),
        (lambda: optim.PolyWarmupLRScheduler(10, lr_end=-1.0), ValueError, "'lr_end' must be at least 0"),
        (lambda: optim.PolyWarmupLRScheduler(10, power=-1.0), ValueError, "'power' must be at least 0"),
        (lambda: rates(optim.PolyWarmupLRScheduler(10, lr_end=2.0), 2), ValueError, "'lr_end' 2.0 must be below"),
        (lambda: rates(optim._LRScheduler(), 1), NotImplementedError, "must override get_lr"),
    ],
)
def test_errors(make, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_state() -> None:
    scheduler = optim.LinearWarmupLRScheduler(10)
    assert scheduler.get_last_lr() == []
    rates(scheduler, 3)
    other = optim.LinearWarmupLRScheduler(10)
    other.load_state_dict(scheduler.state_dict())
    assert other.get_last_lr() == scheduler.get_last_lr() != []


def test_a_group_that_is_held_stays_so() -> None:
    config = optim.SGDConfig([{"params": ["a"], "lr": 0.0}], lr=1.0)
    info = TrainStepInfo(config, optimization_step=5)
    assert optim.PolyWarmupLRScheduler(10, warmup=0.0, lr_end=0.5).get_lr(info) == [0.0, 0.75]


def test_a_schedule_of_a_trainer_says_what_the_first_step_will_use() -> None:
    asked = []

    class Own(optim.LRScheduler):
        def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
            asked.append(train_step_info.optimization_step)
            return [train_step_info.optimizer_config.lr * 0.5]

    schedule = Own()
    trainer = mlp_trainer({"lr_scheduler": schedule}, optim.SGDConfig(lr=0.2))
    assert asked == [] and schedule.state_dict() == {"last_lr": []}
    assert schedule.get_last_lr()[0] == trainer.options.lr_scheduler.get_last_lr()[0] == 0.1 and asked == [0, 0]
    trainer.train_step(*mlp_batches(1)[0])
    assert schedule.get_last_lr() == [0.1] and asked == [0, 0, 0]


class Plateau(optim.LRScheduler):
    """Halves the rate when a number has not become smaller for some updates; written as a subclass that counts."""

    def __init__(self, patience: int) -> None:
        self.patience, self.best, self.bad, self.factor = patience, math.inf, 0, 1.0
        self.seen: list[float] = []
        self.unstorable = object()

    def tell(self, value: float) -> None:
        self.seen.append(value)
        self.bad = 0 if value < self.best else self.bad + 1
        self.best = min(self.best, value)
        if self.bad > self.patience:
            self.bad, self.factor = 0, self.factor / 2

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        return [train_step_info.optimizer_config.lr * self.factor]


@pytest.mark.parametrize(
    "kind", ["ConstantWarmupLRScheduler", "LinearWarmupLRScheduler", "CosineWarmupLRScheduler", "PolyWarmupLRScheduler"]
)
def test_the_number_of_steps_may_be_set_before_the_first_step(kind: str) -> None:
    info = TrainStepInfo(optim.SGDConfig(lr=0.2), optimization_step=3)
    schedule, other = getattr(optim, kind)(warmup=0.5), getattr(optim, kind)(total_steps=8, warmup=0.5)
    with pytest.raises(ValueError, match=rf"{kind} has no total_steps, .* {kind}\(total_steps=10_000\), or set its"):
        schedule.get_lr(info)
    schedule.total_steps = 8
    assert schedule.get_lr(info) == other.get_lr(info)
    schedule.total_steps = -8
    with pytest.raises(ValueError, match="'total_steps' must be at least 1"):
        schedule.get_lr(info)


def test_a_schedule_of_your_own_goes_on_with_its_attributes() -> None:
    first, second = Plateau(1), Plateau(1)
    trainer = mlp_trainer({"lr_scheduler": first}, optim.SGDConfig(lr=0.2))
    other = mlp_trainer({"lr_scheduler": second}, optim.SGDConfig(lr=0.2))
    batches = mlp_batches(6)
    for value, (x, y) in zip([3.0, 2.0, 2.5], batches, strict=False):
        trainer.train_step(x, y)
        first.tell(value)
    state = trainer.state_dict()
    other.load_state_dict(state)
    assert (second.bad, second.best, second.seen) == (1, 2.0, [3.0, 2.0, 2.5]) and second.seen is not first.seen
    for value, (x, y) in zip([2.5, 2.5, 2.5], batches[3:], strict=True):
        assert torch.equal(trainer.train_step(x, y)[0], other.train_step(x, y)[0])
        assert first.get_last_lr() == second.get_last_lr()
        first.tell(value)
        second.tell(value)
    assert first.get_last_lr() == [0.1]

    early = {**state, "lr_scheduler": {"last_lr": [0.2]}}  # as versions before this wrote it
    other.load_state_dict(early)
    assert second.seen == first.seen and second.get_last_lr() == [0.2]
    for wrong in ({"patience": object()}, {"_last_lr": [3.0]}, {"nothing": 1}, [], {"get_lr": 1}):
        damaged = {**state, "lr_scheduler": {"last_lr": [0.2], "attributes": wrong}}
        with pytest.raises(ValueError, match=r"state_dict\[lr_scheduler\] is invalid for Plateau"):
            other.load_state_dict(damaged)
