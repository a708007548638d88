"""What a user controls during training: rates per group, windows and their weights, parameters and gradients."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from ort_trainer import ORTTrainer, ORTTrainerOptions, amp, optim

from ..helpers import (
    MLP,
    MLP_DESC,
    Reference,
    assert_close,
    assert_same_training,
    assert_same_weights,
    mlp_batches,
    mlp_trainer,
)
from ..zoo import Tied

FIRST = ["fc1.weight", "fc1.bias"]


def torch_groups(model: Any) -> list[dict[str, Any]]:
    return [{"params": list(model.fc1.parameters()), "lr": 0.05}, {"params": list(model.fc2.parameters())}]


RULES = {
    "sgd": (lambda g: optim.SGDConfig(g, lr=0.01), lambda g: torch.optim.SGD(g, lr=0.01)),
    "adam": (
        lambda g: optim.AdamConfig(g, lr=0.01, lambda_coef=0.1),
        lambda g: torch.optim.AdamW(g, lr=0.01, weight_decay=0.1),
    ),
    "adamw": (lambda g: optim.AdamWConfig(g, lr=0.01), lambda g: torch.optim.AdamW(g, lr=0.01)),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_learning_rate_per_group(rule: str) -> None:
    make, make_torch = RULES[rule]
    config = make([{"params": FIRST, "lr": 0.05}])
    assert config.learning_rates == [0.05, 0.01] and config.lr == 0.01
    assert_same_training(MLP(), MLP_DESC, mlp_batches(6), config, lambda m: make_torch(torch_groups(m)))


def test_lamb_takes_a_learning_rate_per_group() -> None:
    """Two trainers with one rate each: every layer moves as in the trainer that has its rate, until they interact."""
    batch = mlp_batches(1)[0]
    model = MLP()
    moved = {}
    for name, config in {
        "fc1": optim.LambConfig(lr=0.05),
        "fc2": optim.LambConfig(lr=0.01),
        "both": optim.LambConfig([{"params": FIRST, "lr": 0.05}], lr=0.01),
    }.items():
        trainer = mlp_trainer(config=config, model=copy.deepcopy(model))
        trainer.train_step(*batch)
        moved[name] = trainer.state_dict(pytorch_format=True)
    for name, value in moved["both"].items():
        assert torch.equal(value, moved[name[:3]][name]), name
    assert not torch.equal(moved["fc1"]["fc1.weight"], moved["fc2"]["fc1.weight"])


class Halving(optim._LRScheduler):
    def get_lr(self, train_step_info):
        return [rate / 2**train_step_info.optimization_step for rate in train_step_info.optimizer_config.learning_rates]


@pytest.mark.parametrize("kind", ["own", "warm-up"])
def test_schedules_of_groups(kind: str) -> None:
    model = MLP()
    theirs = Reference(model, lambda m: torch.optim.AdamW(torch_groups(m), lr=0.01))
    if kind == "own":
        schedule: Any = torch.optim.lr_scheduler.LambdaLR(theirs.optimizer, lambda s: 0.5**s)
        ours: Any = Halving()
    else:
        schedule = torch.optim.lr_scheduler.LambdaLR(theirs.optimizer, lambda s: s / 3 if s < 3 else (6 - s) / 3)
        ours = optim.LinearWarmupLRScheduler(6, 0.5)
    config = optim.AdamWConfig([{"params": FIRST, "lr": 0.05}], lr=0.01)
    trainer = mlp_trainer({"lr_scheduler": ours}, config, model)
    for batch in mlp_batches(6):
        trainer.train_step(*batch)
        expected = [group["lr"] for group in theirs.optimizer.param_groups]
        assert trainer.lr_scheduler is ours and ours.get_last_lr() == pytest.approx(expected)
        theirs.step(*batch)
        schedule.step()
    assert_same_weights(trainer, theirs.model, 1e-5)


def test_rates_are_assigned_live() -> None:
    model = MLP()
    theirs = Reference(model, lambda m: torch.optim.SGD(torch_groups(m), lr=0.01))
    config = optim.SGDConfig([{"params": FIRST, "lr": 0.05}], lr=0.01)
    trainer = mlp_trainer(config=config, model=model)
    first, second = theirs.optimizer.param_groups
    for number, batch in enumerate(mlp_batches(3)):
        if number == 1:
            config.lr = second["lr"] = 0.2
        if number == 2:
            config.learning_rates = [0.0, 0.3]
            first["lr"], second["lr"] = 0.0, 0.3
        trainer.train_step(*batch)
        theirs.step(*batch)
    assert_same_weights(trainer, theirs.model, 1e-5)
    plain = optim.AdamConfig([{"params": FIRST, "alpha": 0.5}], lr=0.1)
    plain.lr = 0.2
    assert plain.learning_rates == [0.2, 0.2] and not plain.has_group_rates
    plain.learning_rates = [0.2, 0.2]
    assert not plain.has_group_rates, "a group follows lr until it is given another"
    with pytest.raises(ValueError, match="'learning_rates' must have 2 values"):
        plain.learning_rates = [0.1]
    with pytest.raises(ValueError, match="'lr' must be at least 0, but -1"):
        plain.learning_rates = [-1, 0.1]
    assert plain.learning_rates == [0.2, 0.2]


def test_schedules_that_do_not_fit_the_groups() -> None:
    class Own(optim._LRScheduler):
        rates: Any

        def get_lr(self, train_step_info):
            return self.rates

    groups = [{"params": FIRST, "lr": 0.1}]
    grouped, plain = (mlp_trainer({"lr_scheduler": Own()}, optim.SGDConfig(g, lr=0.1)) for g in (groups, []))
    cases: list[tuple[ORTTrainer, Any, type[Exception], str]] = [
        (grouped, [0.1], ValueError, r"returned one learning rate, \[0.1\], which would override those of the param"),
        (grouped, [0.1] * 3, ValueError, "must return one learning rate, or 2: one per parameter group"),
        (plain, [0.1, 0.2], ValueError, "must return one learning rate, but it returned"),
        (plain, [], ValueError, "must return one learning rate, but it returned"),
        (plain, [-0.1], ValueError, "must return finite numbers, at least 0"),
        (plain, [float("nan")], ValueError, "must return finite numbers, at least 0"),
        (plain, ["fast"], TypeError, "must return a list of numbers"),
        (plain, "no", TypeError, "must return a list of numbers"),
    ]
    for trainer, rates, error, message in cases:
        trainer.lr_scheduler.rates = rates
        with pytest.raises(error, match=f"get_lr\\(\\) of Own {message}"):
            trainer.train_step(*mlp_batches(1)[0])
        assert trainer.train_step_info.step == 0 and trainer.loop.window.micro_batches == 0


def test_one_rate_serves_groups_without_their_own() -> None:
    class Own(optim._LRScheduler):
        def get_lr(self, train_step_info):
            return 0.05  # a bare number is as good as a list of it

    def theirs(m: Any) -> torch.optim.Optimizer:
        first, second = torch_groups(m)
        return torch.optim.AdamW([{**first, "lr": 0.05, "weight_decay": 0.1}, second], lr=0.05, weight_decay=0.0)

    config = optim.AdamConfig([{"params": FIRST, "lambda_coef": 0.1}], lr=1.0)
    options = {"lr_scheduler": Own()}
    trainer = assert_same_training(MLP(), MLP_DESC, mlp_batches(3), config, theirs, options=options)
    assert trainer.lr_scheduler.get_last_lr() == [0.05] and trainer.state_dict()["lr_scheduler"] == {"last_lr": [0.05]}


def test_adamw_is_torchs() -> None:
    settings: dict[str, Any] = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
    config = optim.AdamWConfig(**settings)
    assert (config.betas, config.eps, config.weight_decay) == ((0.8, 0.95), 1e-6, 0.1)
    trainer = assert_same_training(
        MLP(), MLP_DESC, mlp_batches(6), config, lambda m: torch.optim.AdamW(m.parameters(), **settings),
        loss_fn=lambda p, y: 100 * F.cross_entropy(p, y),  # gradients that a limit of 1.0 would clip
        options={"utils": {"grad_norm_clip": True}},
    )  # fmt: skip
    other = mlp_trainer(config=optim.AdamConfig())
    other.load_state_dict(trainer.state_dict())


@pytest.mark.parametrize("rule", RULES)
def test_max_grad_norm(rule: str) -> None:
    make, make_torch = RULES[rule]
    config, limit = make([{"params": FIRST, "lr": 0.05}]), 0.2
    assert_same_training(
        MLP(), MLP_DESC, mlp_batches(6), config, lambda m: make_torch(torch_groups(m)), clip=limit, accumulation=2,
        options={"utils": {"max_grad_norm": limit}},
    )  # fmt: skip


@pytest.mark.engine
def test_the_limit_of_a_config() -> None:
    groups = [{"params": ["fc1.weight", "fc2.weight"], "alpha": 0.8, "beta": 0.9, "lambda_coef": 0.1, "epsilon": 1e-3}]

    def theirs(m: Any) -> torch.optim.Optimizer:
        weights = {"params": [m.fc1.weight, m.fc2.weight], "betas": (0.8, 0.9), "weight_decay": 0.1, "eps": 1e-3}
        return torch.optim.AdamW([weights, {"params": [m.fc1.bias, m.fc2.bias], "weight_decay": 0.0}], lr=0.01)

    config = optim.AdamConfig(groups, lr=0.01, max_norm_clip=0.3)
    assert_same_training(MLP(), MLP_DESC, mlp_batches(20), config, theirs, accumulation=4, clip=0.3)


# ---- windows


def test_the_window_can_change_between_updates(tmp_path: Path) -> None:
    model = MLP()
    theirs = Reference(model, torch.optim.AdamW, lr=0.01, weight_decay=0.0)
    config = optim.AdamConfig(lr=0.01)
    options = {"batch": {"gradient_accumulation_steps": 2}, "utils": {"grad_norm_clip": False}}
    trainer = mlp_trainer(options, config, model)
    batches = iter(mlp_batches(12))

    def window(size: int) -> None:
        while theirs.count < size:
            batch = next(batches)
            trainer.train_step(*batch)
            theirs.backward(*batch)
        theirs.update()
        assert_same_weights(trainer, theirs.model, 1e-5)

    window(2)
    trainer.gradient_accumulation_steps = 3
    window(3)
    assert trainer.train_step_info.step == 5 and trainer.train_step_info.optimization_step == 2
    batch = next(batches)
    trainer.train_step(*batch)
    theirs.backward(*batch)
    with pytest.raises(RuntimeError, match="can't become 4 after 1 of 3 micro-batches"):
        trainer.gradient_accumulation_steps = 4
    trainer.gradient_accumulation_steps = 3  # no change
    trainer.save_checkpoint(tmp_path / "inside.ortckpt")
    trainer = mlp_trainer(options, config)
    trainer.load_checkpoint(tmp_path / "inside.ortckpt")
    assert trainer.gradient_accumulation_steps == 3, "what was assigned is state"
    trainer.prepare(batch)
    window(3)
    trainer.gradient_accumulation_steps = 1
    window(1)
    # A size from the options is not state: the new trainer uses its own.
    plain = mlp_trainer({"batch": {"gradient_accumulation_steps": 4}}, config)
    plain.prepare(batch)
    plain.load_state_dict(mlp_trainer_state())
    assert plain.gradient_accumulation_steps == 4


def mlp_trainer_state() -> dict[str, Any]:
    trainer = mlp_trainer(config=optim.AdamConfig())
    trainer.train_step(*mlp_batches(1)[0])
    return trainer.state_dict()


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [(0, ValueError, "must be at least 1, but 0"), (1.5, TypeError, "must be an int"), (True, TypeError, "an int")],
)
def test_windows_of_a_wrong_size(value: Any, error: type[Exception], message: str) -> None:
    trainer = mlp_trainer()
    with pytest.raises(error, match=f"gradient_accumulation_steps {message}|{message}"):
        trainer.gradient_accumulation_steps = value
    assert trainer.gradient_accumulation_steps == 1


def test_the_sum_of_a_windows_gradients() -> None:
    model = MLP()
    theirs = Reference(model, lr=0.1)
    options = {"batch": {"gradient_accumulation_steps": 3, "gradient_reduction": "sum"}}
    trainer = mlp_trainer(options, optim.SGDConfig(lr=0.1), model)
    for number, batch in enumerate(mlp_batches(6), start=1):
        trainer.train_step(*batch)
        theirs.backward(*batch)
        if number % 3 == 0:
            theirs.update(divisor=1)
    assert_same_weights(trainer, theirs.model, 1e-5)


def token_batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Returns batches that differ in the number of labels that are not ignored."""
    batches = []
    for number, (x, y) in enumerate(mlp_batches(count, size=7)):
        y[: number % 5 + 1] = -100
        batches.append((x, y))
    return batches


@pytest.mark.parametrize("half", [False, True])
def test_token_weighted_gradients_are_those_of_one_big_batch(half: bool, tmp_path: Path) -> None:
    model = MLP()
    theirs, relative = Reference(model, torch.optim.AdamW, lr=0.01, weight_decay=0.0), 5e-3 if half else 1e-5
    options: dict[str, Any] = {
        "batch": {"gradient_accumulation_steps": 3, "gradient_reduction": "weighted"},
        "utils": {"grad_norm_clip": False},
    }

    def make() -> ORTTrainer:
        if half:
            options["mixed_precision"] = {"enabled": True, "loss_scaler": amp.DynamicLossScaler(loss_scale=256.0)}
        return mlp_trainer(options, optim.AdamConfig(lr=0.01), model)

    trainer = make()
    batches = token_batches(9)
    for number, (x, y) in enumerate(batches):
        weight = int((y != -100).sum())
        loss, _ = trainer.train_step(x, y, gradient_weight=weight * 1000)  # only their proportions matter
        assert_close(loss, theirs.loss(x, y).detach(), relative, "the loss is not weighted")
        if number == 4:  # inside a window
            trainer.save_checkpoint(tmp_path / "inside.ortckpt")
            trainer = make()
            trainer.load_checkpoint(tmp_path / "inside.ortckpt")
        if number % 3 == 2:
            theirs.step(*map(torch.cat, zip(*batches[number - 2 : number + 1], strict=True)))
    assert trainer.train_step_info.optimization_step == 3
    assert_same_weights(trainer, theirs.model, relative)


@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (None, TypeError, "needs the weight of every micro-batch"),
        ("7", TypeError, "gradient_weight must be a number, but '7'"),
        (True, TypeError, "gradient_weight must be a number"),
        (0, ValueError, "gradient_weight must be positive and finite, but 0"),
        (-1.0, ValueError, "must be positive and finite"),
        (float("nan"), ValueError, "must be positive and finite"),
        (float("inf"), ValueError, "must be positive and finite"),
    ],
)
def test_wrong_weights(weight: Any, error: type[Exception], message: str) -> None:
    trainer = mlp_trainer({"batch": {"gradient_reduction": "weighted"}})
    with pytest.raises(error, match=message):
        trainer.train_step(*mlp_batches(1)[0], gradient_weight=weight)
    assert trainer.train_step_info.step == 0 and trainer.session is None


def test_the_weights_name_does_not_hide_an_input() -> None:
    class Weighted(MLP):
        def forward(self, x: torch.Tensor, gradient_weight: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * gradient_weight

    desc = {**MLP_DESC, "inputs": [("x", ["b", 8]), ("gradient_weight", ["b", 1]), ("label", ["b"])]}
    desc["outputs"] = [("loss", [], True)]
    for given in (desc, "auto"):
        with pytest.raises(ValueError, match="reserves the argument 'gradient_weight' of train_step"):
            options = ORTTrainerOptions({"batch": {"gradient_reduction": "weighted"}})
            ORTTrainer(Weighted(), given, optim.SGDConfig(), loss_fn=F.cross_entropy, options=options)
    trainer = ORTTrainer(Weighted(), desc, optim.SGDConfig(), loss_fn=F.cross_entropy)
    x, y = mlp_batches(1)[0]
    doubled = trainer.train_step(x, gradient_weight=torch.full((5, 1), 2.0), label=y)
    assert not torch.equal(doubled, trainer.eval_step(x, gradient_weight=torch.ones(5, 1), label=y))
    with pytest.raises(TypeError, match="gradient_weight was given, but batch.gradient_reduction is 'mean'"):
        mlp_trainer().train_step(x, y, gradient_weight=3)


def test_a_window_of_another_reduction_is_refused() -> None:
    batch = {"gradient_accumulation_steps": 2}
    trainer = mlp_trainer({"batch": batch})
    trainer.train_step(*mlp_batches(1)[0])
    state = trainer.state_dict()
    other = mlp_trainer({"batch": {**batch, "gradient_reduction": "sum"}})
    with pytest.raises(ValueError, match="in the middle of a window of reduction 'mean', but the trainer has .*'sum'"):
        other.load_state_dict(state)
    for edit in (
        {"micro_batches": -1},
        {"weight": float("nan")},
        {"scale": 0},
        {"assigned_size": 0},
    ):
        with pytest.raises(ValueError, match=r"state_dict\[window\]"):
            mlp_trainer({"batch": batch}).load_state_dict({**state, "window": {**state["window"], **edit}})
    del state["gradients"]
    with pytest.warns(UserWarning, match="after 1 of 2 micro-batches of a window, without their gradients"):
        other.load_state_dict(state)
    assert other.train_step_info.step == 0


# ---- parameters and gradients by name


@pytest.mark.parametrize("reduction", ["mean", "sum", "weighted"])
def test_gradients_by_name(reduction: str) -> None:
    model = Tied()
    theirs = Reference(model, dtype=torch.bfloat16, lr=0.1)
    options = {
        "batch": {"gradient_accumulation_steps": 3, "gradient_reduction": reduction},
        # bfloat16 needs no scale; a scaler from the user must not affect the gradients.
        "mixed_precision": {"enabled": True, "dtype": "bfloat16", "loss_scaler": amp.LossScaler(64.0)},
        "utils": {"grad_norm_clip": False},
    }
    trainer = mlp_trainer(options, optim.SGDConfig(lr=0.1), model)
    assert trainer.get_gradient("first.weight") is None
    weights = [2.0, 6.0, 1.0] if reduction == "weighted" else [1.0, 1.0, 1.0]
    total = 0.0
    for number, (x, y) in enumerate(mlp_batches(3)):
        extra = {"gradient_weight": weights[number]} if reduction == "weighted" else {}
        trainer.train_step(x, y, **extra)
        total += weights[number]
        theirs.backward(x, y, scale=weights[number])
        divisor = 1.0 if reduction == "sum" else total
        if number == 2:
            break
        for name, parameter in theirs.model.named_parameters():
            found = trainer.get_gradient(name)
            assert (found is None) == (parameter.grad is None)
            if found is not None:
                assert_close(found, parameter.grad / divisor, 2e-2, name)
        if number == 1:
            doubled = trainer.get_gradient("second.weight") * 2
            trainer.set_gradient("second.weight", doubled)
            torch.testing.assert_close(trainer.get_gradient("first.weight"), doubled)
            theirs.model.first.weight.grad.mul_(2)
    for name, parameter in theirs.model.named_parameters():  # what the update used is there until the next step
        found = trainer.get_gradient(name)
        assert (found is None) == (parameter.grad is None)
        assert found is None or bool(found.any())
    theirs.update(divisor)
    assert_same_weights(trainer, theirs.model, 1e-3)


def test_parameters_by_name() -> None:
    model = Tied()
    trainer = mlp_trainer(model=model, config=optim.AdamConfig(lr=0.01))
    assert torch.equal(trainer.get_parameter("second.weight"), model.first.weight)
    assert not trainer.get_parameter("second.weight").requires_grad
    trainer.set_parameter("fixed", torch.zeros(3))
    assert not model.fixed.any(), "before the first step, too"
    assert trainer.get_gradient("first.weight") is None
    with pytest.raises(RuntimeError, match="there are no gradients now"):
        trainer.set_gradient("first.weight", torch.zeros(8, 8))
    state = {name: torch.full_like(value, 0.5) for name, value in model.state_dict().items()}
    trainer.load_state_dict(state)
    assert torch.equal(trainer.get_parameter("unused"), torch.full((2,), 0.5)), "what training will begin with"
    x, y = mlp_batches(1)[0]
    trainer.train_step(x, y)
    value = torch.randn(8, 8)
    trainer.set_parameter("second.weight", value)
    trainer.set_parameter("fixed", np.array([1, 2, 3], np.float32))
    value.zero_()
    assert trainer.get_parameter("first.weight").any(), "copies are kept"
    trainer.get_parameter("first.weight").zero_()
    assert trainer.get_parameter("first.weight").any(), "copies are given"
    reference = Tied()
    reference.load_state_dict(trainer.state_dict(pytorch_format=True))
    assert torch.equal(reference.fixed, torch.tensor([1.0, 2.0, 3.0]))
    assert_close(trainer.eval_step(x, y)[0], F.cross_entropy(reference(x), y).detach(), 1e-5, "the graphs see it")
    cases: list[tuple[Any, Any, str]] = [
        ("nowhere", torch.zeros(1), "'nowhere' is not a parameter of the model, which has"),
        ("fixed", torch.zeros(4), r"'fixed' has shape \[3\] and dtype torch.float32, but \[4\] and"),
        ("fixed", torch.zeros(3, dtype=torch.float64), "but .* and torch.float64 were given"),
    ]
    for name, wrong, message in cases:
        with pytest.raises(ValueError, match=message):
            trainer.set_parameter(name, wrong)
    with pytest.raises(TypeError, match="'fixed' must be a torch.Tensor or a numpy array"):
        trainer.set_parameter("fixed", [1, 2, 3])
    with pytest.raises(ValueError, match="'fixed' is not trained"):
        trainer.set_gradient("fixed", torch.zeros(3))
    with pytest.raises(ValueError, match="'nowhere' is not a parameter"):
        trainer.get_gradient("nowhere")
    with pytest.raises(RuntimeError, match=r"call set_gradient\(\) inside an accumulation window"):
        trainer.set_gradient("first.weight", torch.zeros(8, 8))
    assert trainer.get_gradient("unused") is None


def test_nothing_warns_about_a_whole_window() -> None:
    state = mlp_trainer_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mlp_trainer(config=optim.AdamConfig()).load_state_dict(state)


def test_a_state_without_a_window_is_read_by_its_steps() -> None:
    """Files written before windows had their own state have no window."""
    options = {"batch": {"gradient_accumulation_steps": 3}}
    trainer = mlp_trainer(options)
    batches = mlp_batches(6)
    for x, y in batches[:5]:
        trainer.train_step(x, y)
    state = trainer.state_dict()
    del state["window"]
    other = mlp_trainer(options)
    other.load_state_dict(state)
    for one in (trainer, other):
        one.train_step(*batches[5])
        assert one.train_step_info.optimization_step == 2
    for name, value in trainer.state_dict(pytorch_format=True).items():
        assert torch.equal(other.state_dict(pytorch_format=True)[name], value)


def test_a_refused_rate_leaves_no_trace(tmp_path: Path) -> None:
    class Own(optim._LRScheduler):
        rates: ClassVar[list[Any]] = [np.array([0.1]), torch.tensor(0.2), None]

        def get_lr(self, train_step_info):
            return self.rates[train_step_info.step - 1]

    trainer = mlp_trainer({"lr_scheduler": Own()}, optim.SGDConfig(lr=1.0))
    (x, y) = mlp_batches(1)[0]
    for expected in (0.1, 0.2):
        trainer.train_step(x, y)
        assert trainer.lr_scheduler.get_last_lr() == [pytest.approx(expected)]
    for wrong in ("fast", [float("nan")], [0.3, 0.4], np.ones((1, 1))):
        Own.rates[2] = wrong
        with pytest.raises((TypeError, ValueError), match=r"get_lr\(\) of Own"):
            trainer.train_step(x, y)
        assert trainer.lr_scheduler.get_last_lr() == [pytest.approx(0.2)] and trainer.train_step_info.step == 2
    trainer.save_checkpoint(tmp_path / "kept.ortckpt")
    other = mlp_trainer({"lr_scheduler": Own()}, optim.SGDConfig(lr=1.0))
    other.load_checkpoint(tmp_path / "kept.ortckpt")
    assert other.lr_scheduler.get_last_lr() == [pytest.approx(0.2)]


def test_a_state_without_an_assigned_window_restores_that_of_the_options() -> None:
    batches = mlp_batches(5)
    trainer = mlp_trainer({"batch": {"gradient_accumulation_steps": 3}}, optim.SGDConfig(lr=0.1))
    trainer.train_step(*batches[0])
    state = trainer.state_dict()
    expected = [trainer.train_step(*batch)[0].item() for batch in batches]
    trainer.train_step(*batches[0])  # ends the second window
    trainer.train_step(*batches[0])
    trainer.train_step(*batches[0])
    assert trainer.train_step_info.step % 3 == 0
    trainer.gradient_accumulation_steps = 2
    trainer.load_state_dict(state)
    assert trainer.gradient_accumulation_steps == 3
    assert [trainer.train_step(*batch)[0].item() for batch in batches] == pytest.approx(expected, rel=1e-6)


def test_the_name_of_a_parameter_is_a_str() -> None:
    with pytest.raises(TypeError, match=r"the name of a parameter must be a str, but \['fc1.bias'\] \(list\)"):
        mlp_trainer().get_parameter(["fc1.bias"])
