"""Messages: short and in one line for any value."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from ort_trainer import ORTTrainerOptions, amp, optim
from ort_trainer.core.errors import shown

from ..helpers import mlp_batches, mlp_trainer


def test_values_as_messages_show_them() -> None:
    assert shown(3) == "3" and shown("text") == "'text'" and shown(np.float32) == "<class 'numpy.float32'>"
    assert shown(torch.tensor(2.5)) == "tensor(2.5000)"
    assert shown([torch.zeros(2, 3), None]) == "[Tensor(shape=[2, 3], dtype=torch.float32), None]"
    assert shown({"a": np.zeros(4)}) == "{'a': ndarray(shape=[4], dtype=float64)}"
    assert shown(nn.Parameter(torch.zeros(1))) == "Parameter(shape=[1], dtype=torch.float32)"
    for large in ("x" * 1000, [torch.zeros(9)] * 1000, nn.Sequential(*(nn.Linear(2, 2) for _ in range(100)))):
        assert len(shown(large)) < 500 and "\n" not in shown(large)


LARGE = torch.zeros(100, 100)


@pytest.mark.parametrize(
    "call",
    [
        lambda: mlp_trainer(config=LARGE),
        lambda: ORTTrainerOptions(LARGE),
        lambda: ORTTrainerOptions({"batch": {"gradient_accumulation_steps": LARGE}}),
        lambda: optim.AdamConfig(lr=LARGE),
        lambda: optim.AdamConfig(params=LARGE),
        lambda: amp.DynamicLossScaler(loss_scale=LARGE),
        lambda: setattr(mlp_trainer(), "gradient_accumulation_steps", LARGE),
        lambda: setattr(mlp_trainer().train_step_info, "fetches", LARGE),
        lambda: mlp_trainer().train_step(*mlp_batches(1)[0], LARGE),
        lambda: mlp_trainer().train_step([[LARGE], LARGE]),
        lambda: mlp_trainer().get_parameter(LARGE),
        lambda: mlp_trainer().load_state_dict({"train_step_info": {"step": LARGE, "optimization_step": 0}}),
    ],
)
def test_no_error_shows_a_whole_tensor(call) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        call()
    assert len(str(caught.value)) < 600 and "[0., 0." not in str(caught.value) and "\n" not in str(caught.value)
