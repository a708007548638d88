"""The trainer uses the user's own scaler and schedule objects, which serve one trainer at a time."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from ort_trainer import ORTTrainer, amp, optim

from ..helpers import mlp_batches, mlp_trainer


def options(scaler: Any, schedule: Any) -> dict[str, Any]:
    return {"mixed_precision": {"enabled": True, "loss_scaler": scaler}, "lr_scheduler": schedule}


@pytest.mark.parametrize(
    ("again", "message"),
    [
        ((0, None), "mixed_precision.loss_scaler: another trainer uses this DynamicLossScaler"),
        ((None, 1), "lr_scheduler: another trainer uses this LinearWarmupLRScheduler"),
    ],
)
def test_an_object_serves_one_living_trainer(again: tuple[int | None, int | None], message: str) -> None:
    given = (amp.DynamicLossScaler(), optim.LinearWarmupLRScheduler(10))
    first = mlp_trainer(options(*given))
    second = options(*(None if index is None else given[index] for index in again))
    with pytest.raises(ValueError, match=message):
        mlp_trainer(second)
    first.train_step(*mlp_batches(1)[0])
    del first
    gc.collect()
    mlp_trainer(second)


def test_a_trainer_in_a_cycle_is_gone_and_one_that_failed_used_nothing() -> None:
    schedule = optim.LinearWarmupLRScheduler(10)
    with pytest.raises(ValueError, match="unknown parameters .* in utils.frozen_weights"):
        mlp_trainer({"lr_scheduler": schedule, "utils": {"frozen_weights": ["none"]}})
    holder: dict[str, Any] = {}
    holder["trainer"], holder["self"] = mlp_trainer({"lr_scheduler": schedule}), holder
    del holder
    trainer = mlp_trainer({"lr_scheduler": schedule})
    assert trainer.lr_scheduler is schedule


def test_a_state_that_is_refused_changes_neither_object() -> None:
    class Broken(optim.LRScheduler):
        def get_lr(self, train_step_info: Any) -> list[float]:
            return [0.1]

        def load_state_dict(self, state_dict: Any) -> None:
            if state_dict["last_lr"] == [0.5]:
                raise KeyError("0.5")
            super().load_state_dict(state_dict)

    def make(schedule: optim.LRScheduler) -> ORTTrainer:
        return mlp_trainer(options(amp.DynamicLossScaler(loss_scale=8.0, up_scale_window=1), schedule))

    first = make(Broken())
    first.train_step(*mlp_batches(1)[0])
    state = first.state_dict()
    assert state["loss_scaler"]["loss_scale"] == 16.0
    state["lr_scheduler"]["last_lr"] = [0.5]
    second = make(Broken())
    second.prepare(mlp_batches(1)[0])
    with pytest.raises(ValueError, match=r"state_dict\[lr_scheduler\] is invalid for Broken: KeyError"):
        second.load_state_dict(state)
    assert second.loss_scaler is not None and second.loss_scaler.loss_scale == 8.0
    assert second.lr_scheduler is not None and second.lr_scheduler.state_dict() == {"last_lr": []}
    assert second.train_step_info.step == 0
