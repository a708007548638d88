from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ort_trainer import TrainStepInfo, optim
from ort_trainer.amp import DynamicLossScaler, LossScaler


def info(finite: bool) -> TrainStepInfo:
    return TrainStepInfo(optim.SGDConfig(), all_finite=finite)


def test_dynamic_rule() -> None:
    scaler = DynamicLossScaler(loss_scale=8.0, up_scale_window=2, min_loss_scale=1.0, max_loss_scale=16.0)
    assert [scaler.update(info(finite)) for finite in (True, True, True, True, True, True)] == [8, 16, 16, 16, 16, 16]
    assert [scaler.update(info(False)) for _ in range(6)] == [8, 4, 2, 1, 1, 1]
    assert [scaler.update(info(finite)) for finite in (True, False, True, True)] == [1, 1, 1, 2]


def test_defaults_reset_and_state() -> None:
    scaler = DynamicLossScaler()
    assert (scaler.loss_scale, scaler.up_scale_window) == (65536.0, 2000)
    assert (scaler.min_loss_scale, scaler.max_loss_scale) == (1.0, 2.0**24)
    scaler.update(info(False))
    scaler.update(info(True))
    other = DynamicLossScaler()
    other.load_state_dict(scaler.state_dict())
    assert other.loss_scale == 32768.0 and other.state_dict() == scaler.state_dict()
    scaler.reset()
    assert scaler.loss_scale == 65536.0 and scaler.state_dict()["stable_steps_count"] == 0


@pytest.mark.parametrize("finite", [True, False])
def test_the_base_class_is_a_constant_scale(finite: bool) -> None:
    scaler = LossScaler(loss_scale=float(1 << 16))
    assert scaler.update(info(finite)) == scaler.loss_scale == 65536.0


def test_limits_act_only_on_a_change() -> None:
    scaler = DynamicLossScaler(loss_scale=3.0, up_scale_window=1, min_loss_scale=5.0, max_loss_scale=10.0)
    assert scaler.loss_scale == 3.0
    assert scaler.update(info(True)) == 6.0
    assert DynamicLossScaler(automatic_update=False, loss_scale=3.0).update(info(False)) == 3.0


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: LossScaler(0), ValueError, "loss_scale must be positive and finite, but 0"),
        (lambda: LossScaler(float("inf")), ValueError, "loss_scale must be positive and finite"),
        (lambda: LossScaler("a"), TypeError, "loss_scale must be an int or float"),
        (lambda: LossScaler(True), TypeError, "loss_scale must be an int or float"),
        (lambda: setattr(LossScaler(1.0), "loss_scale", -1), ValueError, "loss_scale must be positive"),
        (lambda: setattr(LossScaler(1.0), "input_name", ""), ValueError, "input_name must not be empty"),
        (lambda: setattr(LossScaler(1.0), "input_name", 3), TypeError, "input_name must be a str"),
        (lambda: DynamicLossScaler(automatic_update=1), TypeError, "automatic_update must be a bool"),
        (lambda: DynamicLossScaler(up_scale_window=0), ValueError, "up_scale_window must be at least 1"),
        (lambda: DynamicLossScaler(up_scale_window=1.5), TypeError, "up_scale_window must be an int"),
        (lambda: DynamicLossScaler(min_loss_scale=4, max_loss_scale=2), ValueError, "min_loss_scale 4 is above"),
    ],
)
def test_errors(make, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("value", [np.float32(4.0), np.array(4), torch.tensor(4.0)])
def test_scalars_of_numpy_and_torch_are_numbers(value: Any) -> None:
    scaler = LossScaler(1.0)
    scaler.loss_scale = value
    assert scaler.loss_scale == 4.0 and type(scaler.loss_scale) is float
