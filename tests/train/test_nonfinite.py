"""Losses and gradients that are not finite: the results are PyTorch's, the counters torch.amp.GradScaler's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ort_trainer import ORTTrainer, amp, optim
from tests.helpers import MLP, Reference, assert_same_state, mlp_batches, mlp_trainer

FP16 = {"enabled": True, "dtype": "float16"}
BF16 = {"enabled": True, "dtype": "bfloat16"}


def spoilt(x: torch.Tensor, value: float) -> torch.Tensor:
    x = x.clone()
    x[0, 0] = value
    return x


@pytest.mark.engine
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("precision", [None, BF16])
def test_without_a_scaler_weights_become_nan_as_in_pytorch(precision: Any, value: float) -> None:
    torch.manual_seed(0)
    model = MLP()
    reference = Reference(model, dtype=torch.bfloat16 if precision else None, lr=0.1)
    trainer = mlp_trainer({"mixed_precision": precision} if precision else None, optim.SGDConfig(lr=0.1), model)
    (first, label), (second, _) = mlp_batches(2)
    for x in (first, spoilt(second, value), first):
        loss, _ = trainer.train_step(x, label)
        assert math.isfinite(loss.item()) == math.isfinite(reference.step(x, label).item())
    assert (trainer.train_step_info.step, trainer.train_step_info.optimization_step) == (3, 3)
    for name, weight in reference.model.state_dict().items():
        assert torch.equal(trainer.get_parameter(name).isnan(), weight.isnan()), name


def test_overflows_are_counted_as_by_grad_scaler() -> None:
    """Runs 30 updates that overflow, then good ones, beside PyTorch's own scaler with the same settings."""
    torch.manual_seed(0)
    model = MLP()
    reference = Reference(model, dtype=torch.float16, lr=0.01)
    ours = amp.DynamicLossScaler(loss_scale=2.0**16, up_scale_window=3)
    options = {"mixed_precision": {**FP16, "loss_scaler": ours}}
    trainer = mlp_trainer(options, optim.SGDConfig(lr=0.01), model)
    trainer.prepare(mlp_batches(1)[0])
    theirs = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    updates = 0
    for number, (x, label) in enumerate(mlp_batches(40)):
        x = spoilt(x, math.inf) if number < 30 else x
        before = trainer.get_parameter("fc1.weight")
        loss = trainer.train_step(x, label)[0]
        reference.reset()
        theirs.scale(reference.loss(x, label)).backward()
        theirs.step(reference.optimizer)
        theirs.update()
        if number < 30:
            assert torch.equal(trainer.get_parameter("fc1.weight"), before)
            # PyTorch's goes on below 1, down to 0 in the end; ours has a floor.
            assert ours.loss_scale == max(theirs.get_scale(), ours.min_loss_scale)
        else:
            updates += 1
            assert loss.isfinite()
        if number == 29:
            assert ours.loss_scale == 1.0 and theirs.get_scale() < 1e-4
            theirs = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=3)
            theirs.scale(torch.zeros(1))
        info = trainer.train_step_info
        assert (info.step, info.optimization_step, info.all_finite) == (number + 1, updates, number >= 30)
        assert ours.loss_scale == max(theirs.get_scale(), 1.0)
    assert trainer.loss_scaler is ours
    for name, weight in reference.model.state_dict().items():
        torch.testing.assert_close(trainer.get_parameter(name), weight, rtol=2e-3, atol=1e-4)


def test_an_overflow_in_a_window_skips_the_whole_window() -> None:
    trainer = mlp_trainer({"mixed_precision": FP16, "batch": {"gradient_accumulation_steps": 2}})
    (first, label), (second, _) = mlp_batches(2)
    trainer.train_step(first, label)
    trainer.train_step(spoilt(second, math.nan), label)
    info = trainer.train_step_info
    assert (info.step, info.optimization_step, info.all_finite) == (2, 0, False)
    trainer.train_step(first, label)
    trainer.train_step(second, label)
    assert (info.step, info.optimization_step, info.all_finite) == (4, 1, True)
    assert trainer.get_parameter("fc1.weight").isfinite().all()


def limited(limit: int | None, **others: Any) -> ORTTrainer:
    torch.manual_seed(0)
    return mlp_trainer({"debug": {"max_nonfinite_losses": limit}, **others}, model=MLP(dropout=0.5))


@pytest.mark.engine
@pytest.mark.parametrize("kernels", ["auto", "onnxruntime"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_with_a_limit_of_one_no_bad_loss_is_trained_on(accumulation: int, kernels: str) -> None:
    options = {"utils": {"kernels": kernels}, "batch": {"gradient_accumulation_steps": accumulation}}
    watched, other = limited(1, **options), limited(None, **options)
    for x, label in mlp_batches(5):
        for trainer in (watched, other):
            trainer.train_step(x, label)
        before = watched.state_dict()
        with pytest.raises(FloatingPointError, match="the loss is nan: debug.max_nonfinite_losses is 1. This step was"):
            watched.train_step(spoilt(x, math.nan), label)
        assert_same_state(watched.state_dict(), before)
        if not before["window"]["micro_batches"]:
            with pytest.raises(FloatingPointError):
                watched.forward_backward(spoilt(x, math.nan), label)
    assert_same_state(watched.state_dict(), other.state_dict())


def test_the_last_of_so_many_in_a_row_is_not_taken() -> None:
    trainer = limited(3, mixed_precision=FP16)
    ((x, label),) = mlp_batches(1)
    bad = spoilt(x, math.nan)
    for batch in (bad, bad, x, bad, bad):
        trainer.train_step(batch, label)
    for _ in range(2):
        with pytest.raises(FloatingPointError, match="as were the 2 before it: debug.max_nonfinite_losses is 3"):
            trainer.train_step(bad, label)
    assert (trainer.train_step_info.step, trainer.train_step_info.optimization_step) == (5, 1)
    again = limited(3, mixed_precision=FP16)
    again.load_state_dict(trainer.state_dict())
    with pytest.raises(FloatingPointError, match="as were the 2 before it"):
        again.train_step(bad, label)
    trainer.train_step(x, label)
    again.load_state_dict(trainer.state_dict())
    again.train_step(bad, label)
    trainer.train_step_info.fetches = ["logits"]
    with pytest.raises(ValueError, match="do not include the loss: add 'loss' to train_step_info.fetches"):
        trainer.train_step(x, label)
