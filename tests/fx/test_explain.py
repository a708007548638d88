"""Whose code a line is: the user's, or this package's, whose files may move."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ort_trainer
from ort_trainer import ExportError, ORTTrainer, optim
from ort_trainer.capture import branches, capture, step_module
from ort_trainer.export import builder
from ort_trainer.fx import explain, symbols
from ort_trainer.graph import random_inputs


def test_lines_of_this_package_are_not_the_users() -> None:
    for module in (builder, branches, capture, step_module):
        assert str(module.__file__).startswith(explain.LIBRARIES), module
    assert step_module.__file__ == symbols._CALLS_MODEL
    assert Path(capture._OURS) == Path(ort_trainer.__file__).parent


def test_an_error_that_no_station_explains_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(graph: torch.fx.Graph, *_: Any) -> Any:
        node = graph.find_nodes(op="call_function", target=torch.ops.aten.tanh.default)[0]
        return {}[node.name]

    monkeypatch.setattr(random_inputs, "lift_random_numbers", broken)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Tanh())
    trainer = ORTTrainer(model, "auto", optim.SGDConfig(lr=0.1), loss_fn=torch.nn.MSELoss())
    with pytest.raises(
        ExportError, match=r"Sequential failed at aten.tanh.default.*KeyError: 'tanh'.*ORTModule"
    ) as info:
        trainer.train_step(torch.ones(2, 3), torch.ones(2, 2))
    assert "\n" not in str(info.value)
