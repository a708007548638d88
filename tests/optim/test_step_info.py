from __future__ import annotations

import pytest

from ort_trainer import TrainStepInfo, optim


def test_defaults_are_not_shared() -> None:
    config = optim.SGDConfig()
    first, second = TrainStepInfo(config), TrainStepInfo(config)
    first.fetches.append("loss")
    assert second.fetches == []
    assert (first.all_finite, first.optimization_step, first.step) == (True, 0, 0)
    assert first.optimizer_config is config


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"optimizer_config": 3}, TypeError, "optimizer_config must be an optimizer config"),
        ({"all_finite": 1}, TypeError, "all_finite must be a bool"),
        ({"fetches": "loss"}, TypeError, "fetches must be a list of output names"),
        ({"fetches": [3]}, TypeError, "fetches must be a list of output names"),
        ({"step": -1}, ValueError, "step must be at least 0"),
        ({"optimization_step": 1.0}, TypeError, "optimization_step must be an int"),
    ],
)
def test_errors(arguments: dict, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TrainStepInfo(**{"optimizer_config": optim.SGDConfig(), **arguments})


@pytest.mark.parametrize("value", [5, "loss", [3]])
def test_assigned_fetches_are_checked(value: object) -> None:
    info = TrainStepInfo(optim.SGDConfig(), fetches=["loss"])
    with pytest.raises(TypeError, match="fetches must be a list of output names, but .* was given"):
        info.fetches = value
    assert info.fetches == ["loss"]
    info.fetches = None
    assert info.fetches == []
    with pytest.raises(AttributeError, match="fetchs"):
        info.fetchs = ["loss"]  # type: ignore[attr-defined]
