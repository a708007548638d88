"""The loop's seams: backward and optimizer_step on their own keep every counter right."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from ort_trainer import ORTTrainer, amp, optim
from ort_trainer.train.loop import TrainingLoop
from ort_trainer.train.strategy import Strategy

from ..helpers import MLP, assert_same_weights, mlp_batches, mlp_trainer


def backward(loop: TrainingLoop, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return loop.backward(*loop.bind(batch, {}))[0]


def test_backward_and_optimizer_step_are_a_step() -> None:
    """Runs both by hand, with a window that ends early, like PyTorch."""
    model = MLP()
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.01)
    schedule = optim.LinearWarmupLRScheduler(10, 0.0)
    given: dict[str, Any] = {
        "batch": {"gradient_accumulation_steps": 3},
        "utils": {"grad_norm_clip": False},
        "lr_scheduler": schedule,
    }
    trainer = mlp_trainer(given, optim.AdamWConfig(lr=0.01), model)
    loop = trainer.loop
    batches = mlp_batches(5)
    for end, window in enumerate((batches[:3], batches[3:])):
        for batch in window:
            backward(loop, batch)
            (F.cross_entropy(reference(batch[0]), batch[1]) / len(window)).backward()
        assert loop.window.micro_batches == len(window)
        optimizer.param_groups[0]["lr"] = 0.01 * (10 - end) / 10
        assert loop.end_window() is True
        optimizer.step()
        optimizer.zero_grad()
        assert schedule.get_last_lr() == pytest.approx([0.01 * (10 - end) / 10])
        assert (trainer.train_step_info.step, trainer.train_step_info.optimization_step) == ((3, 1), (5, 2))[end]
        assert loop.window.micro_batches == 0 and trainer.state_dict()["gradients"] == {}
    assert_same_weights(trainer, reference, 1e-5)


def test_an_update_needs_gradients() -> None:
    trainer = mlp_trainer()
    with pytest.raises(RuntimeError, match="there are no gradients"):
        trainer.loop.end_window()
    x, y = mlp_batches(1)[0]
    trainer.train_step(x, y)
    with pytest.raises(RuntimeError, match="there are no gradients"):
        trainer.loop.end_window()
    backward(trainer.loop, (x, y))
    trainer.loop.discard_gradients()
    with pytest.raises(RuntimeError, match="there are no gradients"):
        trainer.loop.end_window()
    assert trainer.train_step_info.optimization_step == 1


def test_an_update_in_the_middle_of_a_window_uses_the_scaler_once() -> None:
    scaler = amp.DynamicLossScaler(loss_scale=8.0, up_scale_window=1)
    precision = {"enabled": True, "loss_scaler": scaler}
    trainer = mlp_trainer({"mixed_precision": precision, "batch": {"gradient_accumulation_steps": 4}})
    for batch in mlp_batches(2):
        backward(trainer.loop, batch)
    assert scaler.loss_scale == 8.0
    assert trainer.loop.end_window([0.1])
    assert scaler.loss_scale == 16.0 and trainer.train_step_info.optimization_step == 1


def test_a_strategy_stands_between_the_gradients_and_the_update() -> None:
    """A strategy sees and may change gradients: the sum of two equal processes is twice the gradient."""

    class Doubling(Strategy):
        seen = 0

        def reduce(self, meeting: Any) -> Any:
            Doubling.seen += 1
            torch._foreach_mul_(list(meeting.own.gradients.values()), 2)
            return super().reduce(meeting)

    model = MLP()
    reference = copy.deepcopy(model)
    trainer = mlp_trainer({"utils": {"grad_norm_clip": False}}, optim.SGDConfig(lr=0.1), model)
    trainer.loop.strategy = Doubling()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for x, y in mlp_batches(3):
        trainer.train_step(x, y)
        (2 * F.cross_entropy(reference(x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert Doubling.seen == 3
    assert_same_weights(trainer, reference, 1e-5)


def test_a_schedule_that_refuses_changes_nothing() -> None:
    class Wrong(optim.LRScheduler):
        def get_lr(self, train_step_info: Any) -> Any:
            return "no"

    trainer: ORTTrainer = mlp_trainer({"lr_scheduler": Wrong()})
    with pytest.raises(TypeError, match=r"get_lr\(\) of Wrong must return a list of numbers"):
        trainer.train_step(*mlp_batches(1)[0])
    assert trainer.train_step_info.step == 0 and trainer.loop.window.micro_batches == 0


def test_a_window_that_went_on_beyond_its_size_is_saved_and_resumed() -> None:
    """Backward passes alone never end a window, so it may have more micro-batches than the option says."""
    model = MLP()
    batches = mlp_batches(4)

    def make() -> ORTTrainer:
        return mlp_trainer({"utils": {"grad_norm_clip": False}}, optim.SGDConfig(lr=0.1), model)

    first, second = make(), make()
    for batch in batches[:3]:
        backward(first.loop, batch)
    second.load_state_dict(first.state_dict())
    assert second.loop.window.micro_batches == 3
    reference = copy.deepcopy(model)
    torch.stack([F.cross_entropy(reference(x), y) for x, y in batches]).mean().backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    second.train_step(*batches[3])  # ends the window
    assert second.loop.window.micro_batches == 0 and second.train_step_info.optimization_step == 1
    assert_same_weights(second, reference, 1e-5)
