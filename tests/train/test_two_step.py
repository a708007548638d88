"""Separate passes and updates: trainer.optimizer_step, trainer.lazy_reset_grad, and the same with trainer.session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, ORTTrainerOptions, amp, optim
from tests.helpers import MLP, MLP_DESC, Reference, assert_close, assert_same_weights, mlp_batches, mlp_trainer

pytestmark = pytest.mark.engine


class ByPyTorch(Reference):
    """The same training in PyTorch, with a linear schedule of so many updates, or none."""

    def __init__(self, model: nn.Module, lr: float = 0.01, total: int = 0) -> None:
        super().__init__(model, torch.optim.AdamW, lr=lr)
        self.lr, self.total, self.updates = lr, total, 0

    def update(self, divisor: float | None = None) -> None:
        if self.total:
            self.optimizer.param_groups[0]["lr"] = self.lr * (self.total - self.updates) / self.total
        super().update(divisor)
        self.updates += 1


def pair(size: int, **options: Any) -> tuple[ORTTrainer, ByPyTorch]:
    """Returns a trainer with windows of this size and a linear schedule, and its counterpart in PyTorch."""
    model = MLP()
    given = {
        "batch": {"gradient_accumulation_steps": size},
        "lr_scheduler": optim.LinearWarmupLRScheduler(60, 0.0),
        **options,
    }
    return mlp_trainer(given, optim.AdamWConfig(lr=0.01), model), ByPyTorch(model, total=60)


def counted(trainer: ORTTrainer) -> tuple[int, int, int]:
    info = trainer.train_step_info
    return info.step, info.optimization_step, trainer.loop.window.micro_batches


@pytest.mark.parametrize("by_session", [False, True], ids=["trainer", "session"])
def test_a_window_is_given_up_or_ends_early(by_session: bool) -> None:
    """Of every five micro-batches two are dropped, two make a separate update, and one begins a window of three.

    That window is complete after two micro-batches of the next five, and so on.
    """
    trainer, theirs = pair(3)
    trainer.prepare(mlp_batches(1)[0])
    face: Any = trainer.session if by_session else trainer
    batches = iter(mlp_batches(100))

    def both() -> None:
        x, y = next(batches)
        assert_close(trainer.train_step(x, y)[0], theirs.backward(x, y), 1e-4, "loss")
        if theirs.count == 3:
            theirs.update()

    for round_ in range(20):
        for _ in range(2):
            both()
        face.lazy_reset_grad()
        theirs.reset()
        assert counted(trainer) == (5 * round_ + 2, 2 * round_, 0)
        assert trainer.get_gradient("fc1.weight") is None and not trainer.state_dict()["gradients"]
        assert not face.optimizer_step()  # there is nothing to update with
        for _ in range(2):
            both()
        assert face.optimizer_step() is True
        theirs.update()
        assert trainer.lr_scheduler.get_last_lr() == pytest.approx([theirs.optimizer.param_groups[0]["lr"]])
        both()
        face.optimizer_step()
        theirs.update()
        assert counted(trainer) == (5 * round_ + 5, 2 * round_ + 2, 0)
    assert_same_weights(trainer, theirs.model, 1e-4)


def test_the_three_calls_of_the_cpp_class() -> None:
    """train_step, optimizer_step and lazy_reset_grad as in C++, with steps of the trainer in between."""
    trainer, theirs = pair(2)
    assert trainer.session is None
    trainer.prepare(mlp_batches(1)[0])
    session: Any = trainer.session
    assert session.input_names(True) == session.input_names(False) == ["x", "label"]
    assert session.output_names(True) == session.output_names(False) == ["loss", "logits"]
    batches = iter(mlp_batches(100))
    for number in range(20):
        for _ in range(1 + number % 3):  # windows of one, two and three
            x, y = next(batches)
            loss, logits = session.train_step([x, y])
            assert_close(logits, theirs.model(x).detach(), 1e-4, "logits")
            assert_close(loss, theirs.backward(x, y), 1e-4, "loss")
        for name, parameter in theirs.model.named_parameters():
            assert_close(session.present_gradients()[name], parameter.grad, 1e-4, name)
            assert_close(trainer.get_gradient(name), parameter.grad / theirs.count, 1e-4, name)
        if number % 4 == 3:  # the trainer's own step ends a window that is full
            x, y = next(batches)
            trainer.train_step(x, y)
            theirs.backward(x, y)
        else:
            assert session.optimizer_step() is True
        theirs.update()
        assert trainer.train_step_info.optimization_step == theirs.updates == number + 1
        assert session.present_gradients() == {} and counted(trainer)[2] == 0
        assert session.get_learning_rate() == pytest.approx(theirs.optimizer.param_groups[0]["lr"])
        session.lazy_reset_grad()  # required in C++; here the update has already done it
    assert_same_weights(trainer, theirs.model, 1e-4)


@pytest.mark.parametrize("reduction", ["sum", "weighted"])
def test_reductions(reduction: str) -> None:
    model = MLP()
    theirs, weighted = Reference(model, lr=0.1), reduction == "weighted"
    trainer = mlp_trainer({"batch": {"gradient_reduction": reduction}}, optim.SGDConfig(lr=0.1), model)
    batches = mlp_batches(2)
    trainer.prepare(batches[0])
    session = trainer.session
    if weighted:
        with pytest.raises(TypeError, match="needs the weight of every micro-batch"):
            session.train_step([*batches[0]])
    for batch, weight in zip(batches, (3, 1), strict=True):
        session.train_step([*batch], gradient_weight=weight if weighted else None)
        theirs.backward(*batch, scale=weight if weighted else 1)
    session.optimizer_step()
    theirs.update(divisor=4 if weighted else 1)
    assert_same_weights(trainer, theirs.model, 1e-5)
    if not weighted:
        with pytest.raises(TypeError, match="gradient_weight was given, but batch.gradient_reduction is 'sum'"):
            session.train_step([*batches[0]], gradient_weight=2)


def test_gradients_in_the_model_are_dropped() -> None:
    model = MLP()
    trainer = mlp_trainer({"utils": {"frozen_weights": ["fc2.bias"]}}, optim.AdamWConfig(lr=0.01), model)
    theirs = ByPyTorch(model)
    theirs.model.fc2.bias.requires_grad_(False)
    model.fc2.bias.grad = torch.ones(3)  # not the trainer's: it does not train this parameter
    for batch in mlp_batches(20):
        trainer.forward_backward(*batch)
        theirs.step(*batch)
        assert trainer.optimizer_step()
        trainer.lazy_reset_grad()
        assert all(p.grad is None for p in (model.fc1.weight, model.fc1.bias, model.fc2.weight))
    assert torch.equal(model.fc2.bias.grad, torch.ones(3))
    assert_same_weights(trainer, theirs.model, 1e-4)
    trainer.forward_backward(*batch)
    trainer.lazy_reset_grad()
    assert not trainer.optimizer_step()


def test_evaluation_by_the_session() -> None:
    """Evaluation needs no earlier eval_step of the trainer, and changes nothing."""
    model = MLP(dropout=0.5)
    trainer = ORTTrainer(model, "auto", optim.SGDConfig(lr=0.1), loss_fn=F.cross_entropy)
    x, y = mlp_batches(1)[0]
    trainer.train_step(x, y)
    before = trainer.state_dict()
    loss, logits = trainer.session.eval_step([x, y])
    model.eval()
    assert_close(logits, model(x).detach(), 1e-5, "logits")
    assert_close(loss, F.cross_entropy(model(x), y).detach(), 1e-5, "loss")
    model.train()
    (name,) = trainer.session.output_names()[1:]
    (alone,) = trainer.session.eval_step([x, None], names=[name])
    assert torch.equal(alone, logits)
    assert torch.equal(trainer.session.eval_step([x.numpy(), y.numpy()])[1], logits)
    after = trainer.state_dict()
    assert after["train_step_info"] == before["train_step_info"] and (after["random"] == before["random"]).all()
    with pytest.raises(TypeError, match=r"inputs \['label'\] are missing"):
        trainer.session.eval_step([x, None])
    with pytest.raises(RuntimeError, match="invalid output names"):
        trainer.session.eval_step([x, y], names=["nothing"])


def test_wrong_calls_change_nothing() -> None:
    trainer, _ = pair(2)
    x, y = mlp_batches(1)[0]
    trainer.train_step(x, y)
    before = trainer.state_dict()
    session = trainer.session
    with pytest.raises(TypeError, match=r"1 inputs were given, but a step takes 2: \['x', 'label'\]"):
        session.train_step([x])
    with pytest.raises(TypeError, match=r"inputs must be a list of tensors in the order \['x', 'label'\], but Tensor"):
        session.train_step(x)
    with pytest.raises(ValueError, match="input 'x' has size 7 in dimension 1"):
        session.train_step([x[:, :7], y])
    with pytest.raises(TypeError, match=r"inputs \['label'\] are missing"):
        session.train_step([x, None])
    with pytest.raises(RuntimeError, match="invalid output names"):
        session.train_step([x, y], names=["nothing"])
    for step in (session.train_step, session.eval_step):
        with pytest.raises(TypeError, match="names must be a list of names, but 'loss' was given"):
            step([x, y], names="loss")
    with pytest.raises(RuntimeError, match="the option lr_scheduler is .*LinearWarmup.*, which sets the learning rate"):
        session.set_learning_rate(0.1)
    after = trainer.state_dict()
    assert after["window"] == before["window"] and after["train_step_info"] == before["train_step_info"]
    assert all((after["gradients"][name] == value).all() for name, value in before["gradients"].items())


def test_learning_rates() -> None:
    def groups(m: Any) -> torch.optim.Optimizer:
        others = [p for p in m.parameters() if p is not m.fc1.weight]
        return torch.optim.SGD([{"params": [m.fc1.weight]}, {"params": others}], lr=0.1)

    model = MLP()
    theirs = Reference(model, groups)
    trainer = mlp_trainer(None, optim.SGDConfig([{"params": ["fc1.weight"], "lr": 0.3}], lr=0.1), model)
    batch = mlp_batches(1)[0]
    trainer.prepare(batch)
    session = trainer.session
    assert session.get_learning_rate() == 0.1
    for rates in ((0.3, 0.1), (0.2, 0.05), (0.4,)):
        if rates != (0.3, 0.1):
            session.set_learning_rate(*rates)
        assert session.get_learning_rate() == rates[-1]
        for group, rate in zip(theirs.optimizer.param_groups, (rates[0], rates[-1]), strict=True):
            group["lr"] = rate
        session.train_step([*batch])
        session.optimizer_step()
        theirs.step(*batch)
    assert_same_weights(trainer, theirs.model, 1e-5)
    with pytest.raises(ValueError, match="'lr' must be at least 0"):
        session.set_learning_rate(-1.0)
    with pytest.raises(ValueError, match="'learning_rates' must have 2 values"):
        session.set_learning_rate(0.1, 0.1, 0.1)


def test_the_learning_rate_of_a_schedule_can_be_asked_for() -> None:
    """Works before the first update, and after loading, when the session has run none."""
    x, y = mlp_batches(1)[0]
    factors = [0.0, 0.25, 0.5, 0.75, 1.0]
    # The class returns the rate of the last update; a function and PyTorch's schedules return the coming one's.
    for kind, seen in (("class", [0.0, *factors]), ("function", factors), ("torch", factors)):

        def make(kind: str = kind) -> ORTTrainer:
            model = MLP()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            schedule: Any = {
                "class": lambda: optim.ConstantWarmupLRScheduler(8, 0.5),
                "function": lambda: lambda count: factors[count],
                "torch": lambda: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: factors[count]),
            }[kind]()
            trainer = mlp_trainer(
                {"lr_scheduler": schedule}, optimizer if kind == "torch" else optim.SGDConfig(lr=0.1), model
            )
            trainer.prepare((x, y))
            return trainer

        trainer = make()
        for factor in seen[:4]:
            assert trainer.session.get_learning_rate() == pytest.approx(0.1 * factor), kind
            trainer.train_step(x, y)
        other = make()
        other.load_state_dict(trainer.state_dict())
        assert other.session.get_learning_rate() == pytest.approx(0.1 * seen[4]), kind


def test_a_window_that_was_loaded_can_be_dropped_before_training() -> None:
    options = {"batch": {"gradient_accumulation_steps": 2}}
    model = MLP()
    first, theirs = mlp_trainer(options, optim.AdamWConfig(lr=0.01), model), ByPyTorch(model)
    batches = mlp_batches(3)
    first.train_step(*batches[0])
    state = first.state_dict()
    other = mlp_trainer(options, optim.AdamWConfig(lr=0.01))
    other.load_state_dict(state)
    other.lazy_reset_grad()
    waiting = other.state_dict()
    assert waiting["gradients"] == {} and waiting["window"]["micro_batches"] == 0 and len(state["gradients"]) == 4
    for x, y in batches[1:]:
        other.train_step(x, y)
        theirs.backward(x, y)
    theirs.update()
    assert_same_weights(other, theirs.model, 1e-4)
    assert counted(other) == (3, 1, 0)

    untouched = mlp_trainer()
    untouched.lazy_reset_grad()  # before anything, it does nothing
    assert untouched.session is None and not untouched.optimizer_step()


def test_an_overflow_is_seen_by_the_session() -> None:
    scaler = amp.DynamicLossScaler(loss_scale=8.0)
    model = MLP()
    trainer = mlp_trainer({"mixed_precision": {"enabled": True, "loss_scaler": scaler}}, optim.SGDConfig(lr=0.1), model)
    theirs, (x, y) = Reference(model, lr=0.1), mlp_batches(1)[0]
    trainer.prepare((x, y))
    session = trainer.session
    session.train_step([x * torch.inf, y])
    assert session.optimizer_step() is False and scaler.loss_scale == 4.0
    assert_same_weights(trainer, theirs.model, 0.0)
    session.train_step([x * torch.inf, y])
    session.lazy_reset_grad()  # dropped gradients are not checked for being finite
    session.train_step([x, y])
    assert session.optimizer_step() is True and scaler.loss_scale == 4.0
    assert trainer.train_step_info.optimization_step == 1 and trainer.train_step_info.step == 3
    theirs.step(x, y)
    assert_same_weights(trainer, theirs.model, 1e-2)


def test_onnx_models(tmp_path: Path) -> None:
    model = MLP()
    source = mlp_trainer(model=model)
    source.prepare(mlp_batches(1)[0])
    source.save_as_onnx(tmp_path / "m.onnx")
    options = ORTTrainerOptions({"batch": {"gradient_accumulation_steps": 2}})
    trainer = ORTTrainer(str(tmp_path / "m.onnx"), MLP_DESC, optim.AdamWConfig(lr=0.01), options=options)
    theirs = ByPyTorch(model)
    (x, y), (x2, y2), (x3, y3) = mlp_batches(3)
    assert_close(trainer.session.eval_step([x, y])[0], F.cross_entropy(model(x), y).detach(), 1e-5, "loss")
    trainer.train_step(x, y)
    trainer.lazy_reset_grad()
    for batch in ((x2, y2), (x3, y3)):
        trainer.train_step(*batch)
        theirs.backward(*batch)
    theirs.update()
    trainer.session.train_step([x, y])
    trainer.session.optimizer_step()
    theirs.backward(x, y)
    theirs.update()
    assert_same_weights(trainer, theirs.model, 1e-4)


@pytest.mark.parametrize("kind", ["config", "torch"])
def test_an_incomplete_window_updates_a_weight_that_was_replaced_in_it(kind: str) -> None:
    model = MLP()
    theirs = ByPyTorch(model)
    config = torch.optim.AdamW(model.parameters(), lr=0.01) if kind == "torch" else optim.AdamWConfig(lr=0.01)
    trainer = mlp_trainer({"batch": {"gradient_accumulation_steps": 3}}, config, model)
    for x, y in mlp_batches(2):
        trainer.train_step(x, y)
        theirs.backward(x, y)
    for each in (model, theirs.model):
        each.fc1.weight.data = each.fc1.weight.data * 1.5
    assert trainer.optimizer_step()
    theirs.update()
    assert_same_weights(trainer, theirs.model, 1e-5)
