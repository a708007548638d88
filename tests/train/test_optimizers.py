"""Twenty steps of every optimizer against torch.optim: every loss and all weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ort_trainer import optim

from ..helpers import MLP, MLP_DESC, assert_close, assert_same_training, mlp_batches, mlp_trainer

GROUPS = [
    {"params": ["fc1.weight", "fc2.weight"], "alpha": 0.8, "beta": 0.9, "lambda_coef": 0.1, "epsilon": 1e-3},
]


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.05)


def adamw_groups(model: Any) -> torch.optim.Optimizer:
    weights = {"params": [model.fc1.weight, model.fc2.weight], "betas": (0.8, 0.9), "weight_decay": 0.1, "eps": 1e-3}
    return torch.optim.AdamW([weights, {"params": [model.fc1.bias, model.fc2.bias], "weight_decay": 0.0}], lr=0.01)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.parametrize("groups", [False, True])
def test_adam(accumulation: int, clip: float | None, groups: bool) -> None:
    limit = {"max_norm_clip": clip} if clip is not None else {}
    config = (
        optim.AdamConfig(GROUPS, lr=0.01, **limit) if groups else optim.AdamConfig(lr=0.01, lambda_coef=0.05, **limit)
    )
    assert_same_training(
        MLP(),
        MLP_DESC,
        mlp_batches(20),
        config,
        adamw_groups if groups else adamw,
        accumulation=accumulation,
        clip=clip,
    )


@pytest.mark.parametrize("accumulation", [1, 4])
def test_sgd(accumulation: int) -> None:
    assert_same_training(
        MLP(),
        MLP_DESC,
        mlp_batches(20),
        optim.SGDConfig(lr=0.1),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        accumulation=accumulation,
    )


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_sgd_with_momentum(accumulation: int, clip: float | None) -> None:
    settings: dict[str, Any] = {"momentum": 0.9, "weight_decay": 1e-2, "nesterov": True}
    assert_same_training(
        MLP(),
        MLP_DESC,
        mlp_batches(20),
        optim.SGDConfig(lr=0.1, **settings),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1, **settings),
        accumulation=accumulation,
        clip=clip,
        options=None if clip is None else {"utils": {"max_grad_norm": clip}},
    )


class PaperLamb(torch.optim.Optimizer):
    """Algorithm 2 of the LAMB paper, in float64."""

    def __init__(self, params: Any, lr: float, decay: float) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                g = p.grad.double()
                m = state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * g
                v = state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * g * g
                direction = m / (v.sqrt() + 1e-6) + group["decay"] * p.double()
                ratio = p.double().norm() / direction.norm()
                p.sub_((group["lr"] * ratio * direction).to(p.dtype))


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("clip", [None, 0.3])
def test_lamb(accumulation: int, clip: float | None) -> None:
    limit = {"max_norm_clip": clip} if clip is not None else {}
    assert_same_training(
        MLP(),
        MLP_DESC,
        mlp_batches(20),
        optim.LambConfig(lr=0.01, lambda_coef=0.1, **limit),
        lambda model: PaperLamb(model.parameters(), 0.01, 0.1),
        accumulation=accumulation,
        clip=clip,
    )


@pytest.mark.parametrize(
    "scheduler",
    [
        optim.ConstantWarmupLRScheduler(20, 0.3),
        optim.LinearWarmupLRScheduler(20, 0.3),
        optim.CosineWarmupLRScheduler(20, 0.5, 0.3),
        optim.PolyWarmupLRScheduler(20, 1e-4, 2.0, 0.3),
    ],
    ids=lambda s: type(s).__name__,
)
def test_schedules_set_the_learning_rate_of_each_update(scheduler: optim._LRScheduler) -> None:
    model = MLP()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.2)
    options = {"lr_scheduler": scheduler, "batch": {"gradient_accumulation_steps": 2}}
    trainer = mlp_trainer(options, optim.SGDConfig(lr=0.2), model)
    rates = []
    for number, (x, y) in enumerate(mlp_batches(20)):
        loss, _ = trainer.train_step(x, y)
        expected = F.cross_entropy(reference(x), y)
        assert_close(loss, expected.detach(), 1e-5, f"loss {number}")
        (expected / 2).backward()
        rates.append(trainer.lr_scheduler.get_last_lr()[0])
        if number % 2:
            optimizer.param_groups[0]["lr"] = rates[-1]
            optimizer.step()
            optimizer.zero_grad()
    assert rates[0::2] == rates[1::2], "the learning rate is constant inside a window"
    assert rates[0] == 0 and len(set(rates)) > 5
    assert trainer.lr_scheduler is scheduler, "the user's own object works"


def test_a_schedule_of_the_users_own_and_a_live_learning_rate() -> None:
    class Halving(optim._LRScheduler):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[tuple[int, int]] = []

        def get_lr(self, train_step_info):
            self.seen.append((train_step_info.step, train_step_info.optimization_step))
            return [train_step_info.optimizer_config.lr / 2**train_step_info.optimization_step]

    own = Halving()
    config = optim.SGDConfig(lr=0.4)
    trainer = mlp_trainer({"lr_scheduler": own}, config)
    for x, y in mlp_batches(3):
        trainer.train_step(x, y)
    assert trainer.lr_scheduler is own and own.seen == [(1, 0), (2, 1), (3, 2)]
    assert own.get_last_lr() == [0.1]

    trainer = mlp_trainer(config=config)
    x, y = mlp_batches(1)[0]
    trainer.train_step(x, y)
    config.lr = 0.0
    before = trainer.state_dict(pytorch_format=True)
    trainer.train_step(x, y)
    after = trainer.state_dict(pytorch_format=True)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_schedule_that_returns_nonsense() -> None:
    class Wrong(optim._LRScheduler):
        def get_lr(self, train_step_info):
            return ["fast"]

    trainer = mlp_trainer({"lr_scheduler": Wrong()})
    with pytest.raises(TypeError, match="get_lr\\(\\) of Wrong must return a list of numbers"):
        trainer.train_step(*mlp_batches(1)[0])
    assert trainer.train_step_info.step == 0
