"""Steps that fail, at every stage: they change nothing, and training continues as if they had not run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.amp import DynamicLossScaler
from ort_trainer.engine.runner import GraphRunner
from ort_trainer.export.builder import GraphBuilder

from ..fidelity.layer_cases import Apply
from ..helpers import Reference, assert_same_state, mlp_batches, mlp_trainer, train_both
from ..zoo import Normed

STEPS = 6


class Failing:
    """Fails at a chosen call."""

    fails = False

    def __call__(self, *_: Any) -> Any:
        if self.fails:
            self.fails = False
            raise MemoryError("injected")
        return 1.0


def trained(
    make: Callable[[], ORTTrainer], disturb: Callable[[ORTTrainer, torch.Tensor, torch.Tensor], None] | None
) -> ORTTrainer:
    torch.manual_seed(0)
    trainer = make()
    for x, label in mlp_batches(STEPS):
        if disturb is not None and trainer.train_step_info.step >= 1:
            disturb(trainer, x, label)
        trainer.train_step(x, label)
    return trainer


def make(kernels: str = "auto", accumulation: int = 1, config: Any = None, **others: Any) -> ORTTrainer:
    options = {
        "batch": {"gradient_accumulation_steps": accumulation},
        "utils": {"kernels": kernels},
        "debug": {"check_indices": False},
        **others,
    }
    return mlp_trainer(options, config, Normed(0.5))


@contextmanager
def replaced(holder: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(holder, name, wrap(getattr(holder, name)))
        yield


def refuse(*_: Any) -> None:
    raise MemoryError("injected")


def failing_after(original: Any) -> Any:
    """Wraps a function so that it fails at its end: its results are written, but not used."""

    def function(*args: Any, **kwargs: Any) -> Any:
        original(*args, **kwargs)
        raise MemoryError("injected")

    return function


@pytest.mark.engine
@pytest.mark.parametrize(
    ("kernels", "accumulation"), [("auto", 1), ("auto", 3), ("onnxruntime", 1), ("onnxruntime", 3)]
)
def test_a_run_that_fails_has_changed_nothing(accumulation: int, kernels: str) -> None:
    """A bad batch, an index that a kernel rejects in the middle of the run, and a lack of memory after it."""

    def disturb(trainer: ORTTrainer, x: torch.Tensor, label: torch.Tensor) -> None:
        before = trainer.state_dict()
        with pytest.raises(ValueError, match="'x' has size 7"):
            trainer.train_step(x[:, :7], label)
        for step in (trainer.train_step, trainer.forward_backward, trainer.forward):
            if step == trainer.forward_backward and before["window"]["micro_batches"]:
                continue
            with pytest.raises((IndexError, RuntimeError), match=r"[Oo]ut of|'label' has .* debug\.check_indices"):
                step(x, label + 3)
        runner = type(trainer._loop.executor._runners_for(True)[0])
        with replaced(runner, "run", failing_after), pytest.raises(MemoryError):
            trainer.train_step(x, label)
        assert_same_state(trainer.state_dict(), before)

    one, other = (trained(lambda: make(kernels, accumulation), given) for given in (disturb, None))
    assert_same_state(one.state_dict(), other.state_dict())
    assert issubclass(type(one._loop.executor._runners_for(True)[0]), GraphRunner)


def test_a_schedule_that_fails_has_stopped_the_step_before_it_began() -> None:
    schedule = Failing()

    def disturb(trainer: ORTTrainer, x: torch.Tensor, label: torch.Tensor) -> None:
        before, schedule.fails = trainer.state_dict(), True
        with pytest.raises(MemoryError):
            trainer.train_step(x, label)
        assert_same_state(trainer.state_dict(), before)

    one, other = (trained(lambda: make(lr_scheduler=schedule), given) for given in (disturb, None))
    assert_same_state(one.state_dict(), other.state_dict())


def torch_config(failing: Failing) -> Callable[[], ORTTrainer]:
    """Returns a factory of trainers with a PyTorch optimizer whose step fails."""

    def made() -> ORTTrainer:
        model = Normed(0.5)
        optimizer = torch.optim.Adam(model.parameters())
        optimizer.register_step_pre_hook(failing)
        options = {"utils": {"kernels": "onnxruntime"}}
        return mlp_trainer(options, optimizer, model)

    return made


def test_an_update_that_fails_has_taken_the_step_back() -> None:
    hook = Failing()
    hook_returns_nothing: Any = lambda *args: hook(*args) and None  # noqa: E731 - a hook's result would count

    def disturb(trainer: ORTTrainer, x: torch.Tensor, label: torch.Tensor) -> None:
        before, hook.fails = trainer.state_dict(), True
        with pytest.raises(MemoryError):
            trainer.train_step(x, label)
        assert_same_state(trainer.state_dict(), before)

    one, other = (trained(torch_config(hook_returns_nothing), given) for given in (disturb, None))
    assert_same_state(one.state_dict(), other.state_dict())

    def disturb_rule(trainer: ORTTrainer, x: torch.Tensor, label: torch.Tensor) -> None:
        before = trainer.state_dict()
        rule = type(trainer._loop.optimizer.rule)
        with replaced(rule, "update", lambda _: refuse), pytest.raises(MemoryError):
            trainer.train_step(x, label)
        assert_same_state(trainer.state_dict(), before)

    one, other = (trained(make, given) for given in (disturb_rule, None))
    assert_same_state(one.state_dict(), other.state_dict())


class FailingScaler(DynamicLossScaler):
    """Fails when it computes the scale after an update."""

    fails = False

    def update(self, info: Any) -> float:
        if self.fails:
            self.fails = False
            raise MemoryError("injected")
        return super().update(info)


def test_what_fails_after_an_update_leaves_the_step_done() -> None:
    scalers = []

    def made() -> ORTTrainer:
        scalers.append(FailingScaler(loss_scale=128.0))
        return make("onnxruntime", mixed_precision={"enabled": True, "loss_scaler": scalers[-1]})

    torch.manual_seed(0)
    one = made()
    torch.manual_seed(0)
    other = made()
    for number, (x, label) in enumerate(mlp_batches(STEPS)):
        if number % 2:
            scalers[0].fails = True
            with pytest.raises(MemoryError):
                one.train_step(x, label)
            scalers[0]._stable_steps_count += 1
        else:
            one.train_step(x, label)
        other.train_step(x, label)
    assert one.train_step_info.optimization_step == STEPS
    assert_same_state(one.state_dict(), other.state_dict())


def only_trains(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Stands for detectors, which compute something else in evaluation mode."""
    if not layer.training:
        raise RuntimeError("there are no targets")
    return layer(x).mean(-1)


def test_other_sizes_of_a_model_that_evaluates_otherwise() -> None:
    model = Apply(nn.Conv1d(1, 3, 3), only_trains)
    reference = Reference(model, lr=0.1)
    trainer = ORTTrainer(model, "auto", optim.SGDConfig(lr=0.1), loss_fn=F.cross_entropy)
    train_both(trainer, reference, [(torch.randn(4, 1, size), torch.tensor([0, 1, 2, 0])) for size in (8, 8, 12)])


def test_a_batch_of_impossible_sizes_draws_nothing_and_is_not_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    exports = []
    build = GraphBuilder.build
    monkeypatch.setattr(GraphBuilder, "build", lambda *args, **given: exports.append(1) or build(*args, **given))
    noisy = Apply(nn.Linear(8, 3), lambda layer, x: layer(x * torch.rand(x.shape[0], 1)))  # in evaluation mode, too
    options = ORTTrainerOptions({"utils": {"random_numbers": "pytorch_global"}})
    trainer = ORTTrainer(noisy, "auto", optim.SGDConfig(lr=0.1), loss_fn=F.cross_entropy, options=options)
    for x, label in mlp_batches(2):
        trainer.train_step(x, label)
        before = torch.get_rng_state()
        with pytest.raises(ValueError, match="Apply does not take a batch of these sizes"):
            trainer.train_step(torch.cat([x, x], 1), label)
        assert torch.equal(torch.get_rng_state(), before) and len(exports) == 1
