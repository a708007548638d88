"""Optimizer configs as old scripts write them, and the errors that those scripts catch."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ort_trainer import TrainStepInfo, amp, compat
from ort_trainer.compat.options import AdamConfig, LambConfig, SGDConfig, _OptimizerConfig, raising
from ort_trainer.compat.trainer import ORTTrainer
from ort_trainer.optim import LinearWarmupLRScheduler

from ..helpers import MLP, MLP_DESC, mlp_batches

GROUPS = [{"params": ["fc1.weight"], "alpha": 0.8, "beta": 0.7}, {"params": ["fc2.weight", "fc2.bias"], "alpha": 0}]


@pytest.mark.parametrize("config", [AdamConfig, LambConfig])
def test_parameter_groups_have_two_names(config: type[AdamConfig | LambConfig]) -> None:
    """``param_groups`` is in the example of the documentation of ORTTrainer, ``params`` in the code."""
    documented = config(param_groups=GROUPS, alpha=0.9, beta=0.999)
    for made in (documented, config(GROUPS, alpha=0.9, beta=0.999), config(params=GROUPS)):
        assert [made.hyper_parameters(group)["alpha"] for group in range(3)] == [0.8, 0.0, 0.9]
        assert [group["beta"] for group in made.params] == [0.7, 0.999] and isinstance(made, _OptimizerConfig)
    assert "lr" not in GROUPS[0]
    with pytest.raises(TypeError, match="'params' and 'param_groups' mean the same"):
        config(params=GROUPS, param_groups=GROUPS)


INVALID: list[tuple[Callable[[], Any], str]] = [
    (lambda: AdamConfig([{"params": ["a"], "lr": 0.1}]), "'lr' is not supported inside params"),
    (lambda: LambConfig([{"params": ["a"], "lr": 0.1}]), "'lr' is not supported inside params"),
    (lambda: SGDConfig([{"params": ["a"], "lr": 0.1}]), "'params' must be an empty list for SGD optimizer"),
    (lambda: _OptimizerConfig("FooOptimizer", [], {"lr": 0.1}), "name must be one of"),
    (lambda: _OptimizerConfig("AdamOptimizer", [{"alpha": 1}], {"lr": 0.1, "alpha": 2}), "must be a dict with a 'para"),
    (lambda: _OptimizerConfig("AdamOptimizer", [{"params": ["a"], "alpha": 1}], {"lr": 0.1}), "sets 'alpha', which"),
    (lambda: TrainStepInfo(SGDConfig(), step=-1), "step must be at least 0"),
    (lambda: LinearWarmupLRScheduler(-1), "'total_steps' must be at least 1"),
    (lambda: amp.DynamicLossScaler(loss_scale="a"), "loss_scale must be an int or float"),
    (lambda: ORTTrainer(None, MLP_DESC, SGDConfig()), "model must be a torch.nn.Module"),
]


def test_wrong_arguments_are_assertion_errors_as_well() -> None:
    compat.install()
    try:
        for make, message in INVALID:
            with pytest.raises(AssertionError, match=message) as caught:
                make()
            assert isinstance(caught.value, (TypeError, ValueError)) and caught.value.__cause__ is None
    finally:
        compat.uninstall()
    with pytest.raises(ValueError, match="loss_scale must be positive") as caught:
        amp.LossScaler(0)
    assert not isinstance(caught.value, AssertionError)


def test_a_model_that_can_not_be_saved_is_an_error_of_the_documented_class(tmp_path: Path) -> None:
    trainer = ORTTrainer(MLP(), MLP_DESC, SGDConfig(), loss_fn="cross_entropy")
    with pytest.raises(RuntimeWarning, match="before the first batch: call prepare") as caught:
        trainer.save_as_onnx(tmp_path / "model.onnx")
    assert isinstance(caught.value, RuntimeError)
    trainer.prepare(mlp_batches(1)[0])
    with pytest.raises(ValueError, match="nowhere"):
        trainer.save_as_onnx(tmp_path / "nowhere" / "model.onnx")


class CodeError(RuntimeError):
    def __init__(self, code: int, *, reason: str) -> None:
        super().__init__(f"{code}: {reason}")


def test_an_error_of_two_classes_keeps_what_it_says() -> None:
    with pytest.raises(ValueError, match="No such file") as caught, raising((OSError, ValueError)):
        Path("/nowhere/at/all").read_bytes()
    error = caught.value
    assert isinstance(error, FileNotFoundError) and error.filename == "/nowhere/at/all"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is FileNotFoundError and again.args == error.args and again.filename == error.filename
    for kept in (KeyError("x"), CodeError(3, reason="y")):
        with pytest.raises(type(kept)) as other, raising((OSError, ValueError), (RuntimeError, ValueError)):
            raise kept
        assert other.value is kept
