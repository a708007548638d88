"""Optimizers and schedules of ``torch.optim``: the same losses and weights as PyTorch's own loop, and checkpoints."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.optim.torch_optimizer import TorchOptimizerConfig
from tests.helpers import MLP, MLP_DESC, Reference, assert_close, assert_same_parameters, mlp_batches, mlp_trainer

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adam with L2": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.05),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=3, line_search_fn="strong_wolfe"),
    "learning rate as a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), foreach=False),
}
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 5)),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 7], 0.5),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=40),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], [4]
    ),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, total_iters=4),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=20),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, total_iters=20, power=2.0),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def test_all_of_torch_are_tested() -> None:
    other = {"Optimizer", "SparseAdam"}
    tested = {name.partition(",")[0].partition(" with")[0] for name in OPTIMIZERS}
    assert {name for name in torch.optim.__all__ if name[0].isupper()} - other <= tested
    assert set(lr_scheduler.__all__) == {*SCHEDULES, "LRScheduler", "ReduceLROnPlateau"}


class Both:
    """A model trained by the trainer, and a copy trained in a PyTorch loop."""

    def __init__(
        self,
        make: Make,
        schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
        config: Callable[[torch.optim.Optimizer], Any] = lambda optimizer: optimizer,
        options: dict[str, Any] | None = None,
        groups: Callable[[nn.Module], Any] = lambda model: model.parameters(),
    ) -> None:
        torch.manual_seed(7)
        self.model = MLP()
        self.optimizer, self.options = make(groups(self.model)), options or {}
        self.theirs = Reference(
            self.model, lambda model: make(groups(model)), clip=self.options.get("utils", {}).get("max_grad_norm")
        )
        self.schedule = self.their_schedule = None
        if schedule is not None:
            self.schedule, self.their_schedule = schedule(self.optimizer), schedule(self.theirs.optimizer)
        self.trainer = mlp_trainer({"lr_scheduler": self.schedule, **self.options}, config(self.optimizer), self.model)
        self.accumulation = self.trainer.gradient_accumulation_steps
        self.batches = iter(mlp_batches(200))

    def step(self, count: int = 20, relative: float = 1e-5) -> None:
        for _ in range(count):
            micro_batches = [next(self.batches) for _ in range(self.accumulation)]
            if isinstance(self.optimizer, torch.optim.LBFGS):
                losses = [self.theirs.optimizer.step(lambda batch=micro_batches[0]: self.closure(*batch)).detach()]
            else:
                losses = [self.theirs.backward(*batch) for batch in micro_batches]
                self.theirs.update()
            for batch, loss in zip(micro_batches, losses, strict=True):
                assert_close(self.trainer.train_step(*batch)[0], loss, relative, "loss")
            if self.their_schedule is not None:
                self.their_schedule.step()
            assert_same_parameters(self.model, self.theirs.model, relative)

    def closure(self, *batch: torch.Tensor) -> torch.Tensor:
        self.theirs.reset()
        loss = self.theirs.loss(*batch)
        loss.backward()
        return loss


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str, tmp_path: Path) -> None:
    both = Both(OPTIMIZERS[name])
    # A line search may depend on the last bit.
    both.step(20, relative=1e-3 if name == "LBFGS" else 1e-5)
    both.trainer.save_checkpoint(tmp_path / "state")
    other = Both(OPTIMIZERS[name])
    other.trainer.load_checkpoint(tmp_path / "state")
    for batch in mlp_batches(3, seed=9):
        assert torch.equal(both.trainer.train_step(*batch)[0], other.trainer.train_step(*batch)[0])
    assert all(map(torch.equal, both.model.parameters(), other.model.parameters()))


@pytest.mark.engine
def test_windows_and_clipping() -> None:
    options = {"batch": {"gradient_accumulation_steps": 3}, "utils": {"max_grad_norm": 0.3}}
    both = Both(OPTIMIZERS["Adam with L2"], options=options)
    both.step()
    # The gradients that the update used are kept until the next step.
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in both.model.parameters()])
    assert float(norm) == pytest.approx(0.3, rel=1e-4) and both.trainer.train_step_info.grad_norm > 0.3
    assert torch.equal(both.trainer.get_gradient("fc1.weight"), both.model.fc1.weight.grad)


@pytest.mark.parametrize(
    ("name", "follow"), [*((name, False) for name in SCHEDULES), ("StepLR", True), ("CyclicLR", True)]
)
def test_schedules(name: str, follow: bool, tmp_path: Path) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)

    config = optim.from_torch if follow else lambda optimizer: optimizer
    both = Both(make, SCHEDULES[name], config)
    both.step(11)
    assert both.schedule.get_last_lr() == pytest.approx(both.their_schedule.get_last_lr())
    both.trainer.save_checkpoint(tmp_path / "state")
    other = Both(make, SCHEDULES[name], config)
    other.trainer.load_checkpoint(tmp_path / "state")
    assert other.schedule.get_last_lr() == both.schedule.get_last_lr()
    both.step(3)
    for batch in mlp_batches(14)[11:]:
        other.trainer.train_step(*batch)
    assert_same_parameters(other.model, both.model, 0.0)


@pytest.mark.parametrize("follow", [False, True], ids=["optimizer", "from_torch"])
def test_schedules_that_the_user_steps(follow: bool) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.05)

    both = Both(make, config=optim.from_torch if follow else lambda optimizer: optimizer)
    pair = [lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5) for o in (both.optimizer, both.theirs.optimizer)]
    for _ in range(4):
        both.step(3)
        for scheduler in pair:
            scheduler.step(1.0)
    assert both.trainer.train_step_info.learning_rate == 0.05 * 0.25
    both.optimizer.param_groups[0]["lr"] = 0.0
    before = copy.deepcopy(both.model)
    both.trainer.train_step(*mlp_batches(1)[0])
    assert_same_parameters(both.model, before, 0.0)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": model.fc1.parameters(), "lr": 0.02}, {"params": [model.fc2.weight]}]


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adam"])
def test_equivalent_configs(name: str) -> None:
    """Two groups; fc2.bias is in neither, and not trained."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        extra = {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1} if name == "SGD" else {}
        return getattr(torch.optim, name)(parameters, lr=0.05, **extra)

    both = Both(make, config=optim.from_torch, groups=groups)
    both.step()
    assert torch.equal(both.model.fc2.bias, both.theirs.model.fc2.bias)
    # The rule and checkpoints are those of the config.
    config = optim.SGDConfig if name == "SGD" else optim.AdamWConfig
    assert both.trainer.state_dict()["trainer_options"]["optimizer_name"] == config().name


@pytest.mark.parametrize("torch_optimizer", [True, False])
@pytest.mark.parametrize("is_function", [True, False])
def test_schedules_as_functions_and_of_this_package(torch_optimizer: bool, is_function: bool) -> None:
    """The rate of update number n (from 0) is the base times factor(n)."""

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / 5)

    schedule = factor if is_function else optim.LinearWarmupLRScheduler(total_steps=20, warmup=0.25)
    model = MLP()
    theirs = Reference(model, torch.optim.AdamW, lr=0.02)
    ours = torch.optim.AdamW(model.parameters(), lr=0.02) if torch_optimizer else optim.AdamWConfig(lr=0.02)
    trainer = mlp_trainer({"lr_scheduler": schedule}, ours, model)
    assert trainer.lr_scheduler is schedule
    for number, batch in enumerate(mlp_batches(10)):
        expected = 0.02 * (factor(number) if is_function else min(number / 5, (20 - number) / 15))
        trainer.train_step(*batch)
        assert trainer.train_step_info.learning_rate == pytest.approx(expected)
        theirs.optimizer.param_groups[0]["lr"] = expected
        theirs.step(*batch)
    assert_same_parameters(model, theirs.model)


def test_an_overflow_steps_neither_optimizer_nor_schedule() -> None:
    model = MLP()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    schedule = lr_scheduler.StepLR(optimizer, 1, 0.5)
    trainer = mlp_trainer(
        {"lr_scheduler": schedule, "mixed_precision": {"enabled": True, "dtype": "float16"}}, optimizer, model
    )
    x, y = mlp_batches(1)[0]
    before = copy.deepcopy(model.state_dict())
    trainer.train_step(x * float("inf"), y)
    assert schedule.get_last_lr() == [0.1] and not optimizer.state
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    trainer.train_step(x, y)
    assert schedule.get_last_lr() == [0.05]


class Twice(torch.optim.Optimizer):
    """A user's own optimizer: subtracts a hundredth of the gradient, twice."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-2 * group["lr"])


def test_an_optimizer_of_the_users_own() -> None:
    both = Both(Twice)
    both.theirs.optimizer = torch.optim.SGD(both.theirs.model.parameters(), lr=0.02)
    both.step()


def test_parameters_may_wait_frozen() -> None:
    both = Both(OPTIMIZERS["Adam with L2"])
    for requires in (False, True):
        for model in (both.model, both.theirs.model):
            model.fc1.requires_grad_(requires)
        both.step(3)
    both.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(RuntimeError, match="has 5 parameters, but had 4 when the trainer was created"):
        both.trainer.train_step(*mlp_batches(1)[0])


def _freezes(model: nn.Module) -> Any:
    model.fc1.requires_grad_(False)
    return model.parameters()


def _has_an_unused_module(model: nn.Module) -> Any:
    model.spare = nn.PReLU(2)
    return model.parameters()


@pytest.mark.parametrize("prepared", [_freezes, _has_an_unused_module])
def test_an_optimizer_may_have_parameters_that_are_not_trained(prepared: Callable[[nn.Module], Any]) -> None:
    Both(OPTIMIZERS["Adam with L2"], groups=prepared).step(3)


def test_an_optimizer_may_have_frozen_weights() -> None:
    both = Both(OPTIMIZERS["Adam with L2"], options={"utils": {"frozen_weights": ["fc1.weight"]}})
    both.theirs.model.fc1.weight.requires_grad_(False)
    both.step(3)
    # The two halves of a step, separately.
    batch = mlp_batches(1, seed=3)[0]
    both.trainer.forward_backward(*batch)
    both.trainer.optimizer_step()
    both.theirs.step(*batch)
    assert_same_parameters(both.model, both.theirs.model)


def test_an_optimizer_in_a_librarys_wrapper() -> None:
    from accelerate import Accelerator

    model = MLP()
    wrapped = Accelerator(cpu=True).prepare(torch.optim.AdamW(model.parameters(), lr=0.01))
    trainer = mlp_trainer({}, wrapped, model)
    assert trainer.optim_config.optimizer is wrapped.optimizer
    assert optim.from_torch(wrapped).optimizer is wrapped.optimizer
    trainer.train_step(*mlp_batches(1)[0])
    assert len(wrapped.state) == 4

    class Lookahead(torch.optim.SGD):  # wraps another optimizer and overrides step()
        optimizer = wrapped.optimizer

    outer = Lookahead(model.parameters())
    assert TorchOptimizerConfig(outer).optimizer is outer


REFUSED: dict[str, tuple[Callable[[nn.Module], Any], type[Exception], str]] = {
    "other parameters": (lambda m: torch.optim.Adam(MLP().parameters()), ValueError, "4 tensors that are not param"),
    "sparse": (lambda m: torch.optim.SparseAdam(m.parameters()), ValueError, "SparseAdam needs sparse gradients"),
    "the class": (lambda m: torch.optim.Adam, TypeError, "or an optimizer of torch.optim, but"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_optimizers(case: str) -> None:
    make, error, message = REFUSED[case]
    model = MLP()
    with pytest.raises(error, match=message):
        mlp_trainer(None, make(model), model)


def test_copies_can_not_be_stepped_by_an_optimizer_over_the_model() -> None:
    model = MLP()
    with pytest.raises(ValueError, match="utils.share_weights is False"):
        mlp_trainer({"utils": {"share_weights": False}}, torch.optim.Adam(model.parameters()), model)


def test_bfloat16_parameters_are_stepped_as_they_are() -> None:
    model = MLP().bfloat16()
    theirs = Reference(model, lr=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    trainer = mlp_trainer(None, optimizer, model)
    for number, (x, y) in enumerate(mlp_batches(20)):
        x = x.bfloat16()
        if number % 2:
            trainer.train_step(x, y)
        else:
            optimizer.zero_grad()
            trainer.forward_backward(x, y)
            optimizer.step()
        theirs.step(x, y)
    assert_same_parameters(model, theirs.model, 0.02)
    assert torch.equal(trainer.get_parameter("fc1.weight"), model.fc1.weight.detach().float())


def test_an_optimizer_that_raises_ends_the_window() -> None:
    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise FloatingPointError("not now")
            return super().step(closure)

    model = MLP()
    optimizer = Failing(model.parameters(), lr=0.1)
    trainer = mlp_trainer({"batch": {"gradient_accumulation_steps": 2}}, optimizer, model)
    batches = mlp_batches(4)
    trainer.train_step(*batches[0])
    with pytest.raises(FloatingPointError):
        trainer.train_step(*batches[1])
    Failing.fails = False
    theirs = Reference(model, lr=0.1)
    for batch in batches[2:]:
        trainer.train_step(*batch)
        theirs.backward(*batch)
    theirs.update()
    assert_same_parameters(model, theirs.model)


class Unusual(torch.optim.Optimizer):
    """Has no rate, a dtype among its hyper-parameters, a state of all parameters together, and one of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": None, "dtype": torch.float64})
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "count"})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        self.count += 1
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state["kept"]  # type: ignore[index]
                kept["sum"] = kept.get("sum", 0.0) + parameter.grad.abs().sum().to(group["dtype"])
                parameter -= (parameter.grad / (self.count * kept["sum"])).float()


def test_unusual_states_are_in_checkpoints() -> None:
    both = Both(Unusual)
    both.step(4)
    state = both.trainer.state_dict()
    other = Both(Unusual)
    other.trainer.load_state_dict(state)
    assert other.optimizer.state_dict()["count"] == 4 and both.trainer.train_step_info.learning_rate == 0.0
    for batch in mlp_batches(2, seed=9):
        assert torch.equal(both.trainer.train_step(*batch)[0], other.trainer.train_step(*batch)[0])
    both.optimizer.state[both.model.fc1.weight]["averages"] = {0.9: torch.ones(1)}
    with pytest.raises(
        TypeError, match=r"can't hold a dict with the keys \[0.9\].*save optimizer.state_dict\(\) yourself"
    ):
        both.trainer.state_dict()
    with pytest.raises(ValueError, match="lr_scheduler has no effect on Unusual, which computes its own rates"):
        Both(Unusual, options={"lr_scheduler": lambda step: 0.5})


def test_an_optimizer_around_another_is_refused() -> None:
    class Around(torch.optim.SGD):
        def state_dict(self) -> dict[str, Any]:
            return {"base": super().state_dict(), "slow": {}}

    with pytest.raises(ValueError, match=r"Around has \['base', 'slow'\].*give the optimizer inside"):
        Both(Around)


def test_what_an_update_can_not_do_is_told_before_it() -> None:
    batch = mlp_batches(1)[0]

    def made(make: Any, config: Any = lambda optimizer: optimizer, **options: Any) -> tuple[nn.Module, Any, ORTTrainer]:
        model = MLP()
        optimizer = make(model.parameters())
        return model, optimizer, mlp_trainer(options, config(optimizer), model)

    _, optimizer, trainer = made(OPTIMIZERS["SGD"], optim.from_torch)
    trainer.train_step(*batch)
    optimizer.param_groups[0].update(momentum=0.0, nesterov=False)
    with pytest.raises(RuntimeError, match="a parameter group of SGD has gained or lost its momentum"):
        trainer.train_step(*batch)
    assert trainer.train_step_info.step == 1
    _, _, trainer = made(torch.optim.LBFGS)
    trainer.forward_backward(*batch)
    with pytest.raises(RuntimeError, match=r"LBFGS computes the loss several times.*call optimizer.step\(closure\)"):
        trainer.optimizer_step()
    _, _, trainer = made(torch.optim.LBFGS, batch={"gradient_accumulation_steps": 2})
    with pytest.raises(RuntimeError, match="torch.optim.LBFGS computes the loss several times in an update"):
        trainer.train_step(*batch)
    model, _, trainer = made(OPTIMIZERS["SGD"])
    trainer.train_step(*batch)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    with pytest.raises(RuntimeError, match=r"parameters \['fc1.weight', .* create a new optimizer and a new"):
        trainer.train_step(*batch)


def test_one_function_is_a_schedule_of_two_trainers() -> None:
    def factor(step: int) -> float:
        return 0.5

    trainers = [mlp_trainer({"lr_scheduler": factor}, optim.SGDConfig(lr=0.1)) for _ in range(2)]
    for trainer in trainers:
        trainer.train_step(*mlp_batches(1)[0])
        assert trainer.train_step_info.learning_rate == 0.05


def test_one_optimizer_is_for_one_trainer() -> None:
    model = MLP()
    optimizer = torch.optim.Adam(model.parameters())
    trainer = mlp_trainer(None, optimizer, model)
    with pytest.raises(ValueError, match="optim_config: another trainer uses this Adam"):
        mlp_trainer(None, optimizer, model)
    assert trainer.optim_config.optimizer is optimizer


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.Adadelta(p), "there is none for Adadelta. Give the optimizer itself"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), "adds weight_decay to the gradients"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "it has amsgrad=True"),
        (lambda p: torch.optim.SGD(p, maximize=True), "it has maximize=True"),
        (lambda p: Twice(p), "there is none for Twice"),
    ],
)
def test_what_has_no_equivalent(make: Make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optim.from_torch(make(MLP().parameters()))
    with pytest.raises(TypeError, match="takes an optimizer of torch.optim"):
        optim.from_torch(torch.optim.Adam)


def test_schedules_that_do_not_fit() -> None:
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(ValueError, match="ReduceLROnPlateau needs a metric at each step: leave it out"):
        mlp_trainer({"lr_scheduler": plateau}, optimizer, model)
    step = lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(ValueError, match="StepLR changes the rates of its own AdamW, which the trainer does not use"):
        mlp_trainer({"lr_scheduler": step}, optim.AdamWConfig(), model)
    trainer = mlp_trainer({"lr_scheduler": lambda step: "fast"}, optim.AdamWConfig(), model)
    with pytest.raises(ValueError, match="a finite number, at least 0, but for update 0 it returned 'fast'"):
        trainer.train_step(*mlp_batches(1)[0])
    with pytest.raises(ValueError, match="lr_scheduler: must be a schedule of ort_trainer.optim"):
        ORTTrainerOptions({"lr_scheduler": lr_scheduler.StepLR})


def test_states_that_do_not_fit() -> None:
    both = Both(OPTIMIZERS["SGD"])
    both.step(2)
    state = both.trainer.state_dict()
    other = Both(OPTIMIZERS["Adam with L2"])
    with pytest.raises(ValueError, match=r"from torch.optim.SGD, but the trainer uses torch.optim.Adam"):
        other.trainer.load_state_dict(state)
    third = Both(OPTIMIZERS["SGD"], groups=groups)
    with pytest.raises(RuntimeError, match="has other parameter groups than the trainer's SGD"):
        third.trainer.load_state_dict(state)
    assert_same_parameters(third.model, third.theirs.model, 0.0)
    without = {key: value for key, value in state.items() if key != "torch_optimizer"}  # as of an export
    with pytest.warns(UserWarning, match="Missing key: torch_optimizer .* SGD keeps its current moments"):
        both.trainer.load_state_dict(without, strict=False)
    trainer = ORTTrainer(MLP(), MLP_DESC, optim.SGDConfig(), loss_fn=F.cross_entropy)
    trainer.load_state_dict({"model": state["model"], "train_step_info": state["train_step_info"]}, strict=False)


def test_a_step_that_the_user_calls_too_is_noticed() -> None:
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = mlp_trainer(None, optimizer, model)
    x, y = mlp_batches(1)[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.train_step(x, y)
        trainer.forward_backward(x, y)
        optimizer.step()
        optimizer.zero_grad()
    trainer.train_step(x, y)
    with pytest.warns(
        UserWarning, match=r"SGD.step\(\) was called after a step of the trainer.*leave it out"
    ) as caught:
        optimizer.step()
    assert caught[0].filename == __file__
