"""The loop's seams: backward and optimizer_step on their own keep every counter right."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from ort_trainer import amp, optim
from ort_trainer.train.loop import TrainingLoop
from ort_trainer.train.strategy import Strategy

from ..helpers import MLP, Reference, assert_same_weights, mlp_batches, mlp_trainer, train_both


def backward(loop: TrainingLoop, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return loop.backward(loop.bind(batch, {}))[0]


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
    theirs = Reference(model, lr=0.2)
    trainer = mlp_trainer({"utils": {"grad_norm_clip": False}}, optim.SGDConfig(lr=0.1), model)
    trainer.loop.strategy = Doubling()
    train_both(trainer, theirs, mlp_batches(3))
    assert Doubling.seen == 3


def test_a_window_that_went_on_beyond_its_size_is_saved_and_resumed() -> None:
    """Backward passes alone never end a window, so it may have more micro-batches than the option says."""
    model = MLP()
    theirs, batches = Reference(model, lr=0.1), mlp_batches(4)
    first, second = (
        mlp_trainer({"utils": {"grad_norm_clip": False}}, optim.SGDConfig(lr=0.1), copy.deepcopy(model))
        for _ in range(2)
    )
    for batch in batches[:3]:
        backward(first.loop, batch)
    second.load_state_dict(first.state_dict())
    assert second.loop.window.micro_batches == 3
    for batch in batches:
        theirs.backward(*batch)
    theirs.update()
    second.train_step(*batches[3])  # ends the window
    assert second.loop.window.micro_batches == 0 and second.train_step_info.optimization_step == 1
    assert_same_weights(second, theirs.model, 1e-5)
