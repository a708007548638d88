from __future__ import annotations

import copy

import numpy as np
import pytest

from ort_trainer.optim import AdamConfig, AdamWConfig, LambConfig, LionConfig, SGDConfig, _OptimizerConfig
from ort_trainer.optim.rule import RULES


def test_defaults() -> None:
    settings = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}
    assert SGDConfig().defaults == {"lr": 0.001, **settings}
    assert LionConfig().defaults == {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}
    assert AdamConfig().defaults == {
        "lr": 0.001,
        "alpha": 0.9,
        "beta": 0.999,
        "lambda_coef": 0.0,
        "epsilon": 1e-8,
        "max_norm_clip": 1.0,
        "do_bias_correction": True,
        "weight_decay_mode": AdamConfig.DecayMode.BEFORE_WEIGHT_UPDATE,
    }
    assert LambConfig().defaults == {
        "lr": 0.001,
        "alpha": 0.9,
        "beta": 0.999,
        "lambda_coef": 0.0,
        "ratio_min": float("-inf"),
        "ratio_max": float("inf"),
        "epsilon": 1e-6,
        "max_norm_clip": 1.0,
        "do_bias_correction": False,
    }
    names = [config.name for config in (AdamConfig(), LambConfig(), SGDConfig())]
    assert names == ["AdamOptimizer", "LambOptimizer", "SGDOptimizer"] and set(names) < RULES.keys()


def test_groups_are_completed_and_the_callers_are_not_touched() -> None:
    groups = [{"params": ["a", "b"], "alpha": 0.5, "lambda_coef": 0.1}, {"params": ["c"], "weight_decay_mode": 1}]
    before = copy.deepcopy(groups)
    for _ in range(2):  # the same list again: the legacy class failed here
        config = AdamConfig(groups, lr=0.1, epsilon=1e-6)
        assert groups == before
    assert config.params[0]["params"] == ["a", "b"] and config.params[0]["epsilon"] == 1e-6
    assert config.params[0]["lr"] == config.lr
    assert config.hyper_parameters(config.group_of("b"))["alpha"] == 0.5
    assert config.hyper_parameters(1)["weight_decay_mode"] is AdamConfig.DecayMode.AFTER_WEIGHT_UPDATE
    assert config.hyper_parameters(config.group_of("d")) == {k: v for k, v in config.defaults.items() if k != "lr"}
    assert config.group_of("other", "a") == 0 and config.hyper_parameters(0)["lambda_coef"] == 0.1
    assert AdamConfig([{"params": ["a"], "lambda": 0.2}]).hyper_parameters(0)["lambda_coef"] == 0.2


def test_numbers_of_all_kinds_are_welcome() -> None:
    config = LambConfig(
        [{"params": ["a"], "alpha": np.float32(0.5)}], lr=np.float64(0.5), lambda_coef=1, ratio_min=np.array(0)
    )
    assert config.lr == 0.5 and config.lambda_coef == 1.0 and isinstance(config.lambda_coef, float)
    config.lr = 1
    assert config.lr == 1.0 and config.defaults["lr"] == 1.0


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: SGDConfig([{"params": ["a"], "alpha": 1.0}]),
            ValueError,
            r"sets 'alpha', which SGDConfig .*\['dampening', 'lr', 'momentum'",
        ),
        (lambda: AdamConfig(lr=-1), ValueError, "'lr' must be at least 0, but -1"),
        (lambda: AdamConfig(lr="a"), TypeError, "'lr' must be a number, but 'a'"),
        (lambda: AdamConfig(lr=True), TypeError, "'lr' must be a number"),
        (lambda: AdamConfig(lr=float("nan")), ValueError, "'lr' must be at least 0"),
        (lambda: AdamConfig(alpha=1.0), ValueError, "'alpha' must be at least 0 and below 1"),
        (lambda: AdamConfig(beta=2), ValueError, "'beta' must be at least 0 and below 1"),
        (lambda: AdamConfig(lambda_coef=-0.1), ValueError, "'lambda_coef' must be at least 0"),
        (lambda: AdamConfig(epsilon=-1), ValueError, "'epsilon' must be at least 0"),
        (lambda: AdamConfig(max_norm_clip=0), ValueError, "'max_norm_clip' must not be 0"),
        (lambda: AdamConfig(max_norm_clip=-1), ValueError, "'max_norm_clip' must be at least 0"),
        (lambda: AdamConfig(do_bias_correction=1), TypeError, "'do_bias_correction' must be a bool"),
        (lambda: AdamConfig(weight_decay_mode=2), ValueError, "'weight_decay_mode' must be an AdamConfig.DecayMode"),
        (lambda: LambConfig(ratio_min="a"), TypeError, "'ratio_min' must be a number"),
        (lambda: LambConfig(ratio_min=2.0, ratio_max=1.0), ValueError, "'ratio_min' 2.0 is above 'ratio_max' 1.0"),
        (lambda: AdamConfig("weight"), TypeError, "'params' must be a list of parameter groups"),
        (lambda: AdamConfig(1e-3), TypeError, r"leave it out to train all parameters, as in AdamConfig\(lr=1e-3\)"),
        (lambda: AdamConfig({"params": ["a"]}), TypeError, "'params' must be a list of parameter groups"),
        (lambda: AdamConfig(["a"]), TypeError, "parameter group 0 must be a dict with a 'params' key"),
        (lambda: AdamConfig([{"params": "abc", "alpha": 0.1}]), TypeError, "'params' of group 0 must be a list"),
        (lambda: AdamConfig([{"params": [3], "alpha": 0.1}]), TypeError, "must hold parameter names"),
        (lambda: AdamConfig([{"params": ["a"]}]), ValueError, "parameter group 0 must set at least one of"),
        (lambda: AdamConfig([{"params": ["a"], "lr": -1.0}]), ValueError, "'lr' must be at least 0, but -1.0"),
        (lambda: AdamWConfig(betas=0.9), TypeError, "'betas' must be two numbers, but 0.9"),
        (lambda: AdamWConfig(betas=(0.9, 1.0)), ValueError, "'betas' must be at least 0 and below 1"),
        (lambda: AdamWConfig(eps=-1), ValueError, "'eps' must be at least 0"),
        (lambda: AdamWConfig(weight_decay="a"), TypeError, "'weight_decay' must be a number"),
        (lambda: AdamWConfig([{"params": ["a"], "alpha": 0.1}]), ValueError, "AdamWConfig does not have 'alpha'"),
        (lambda: AdamConfig([{"params": ["a"], "ratio_min": 1.0}]), ValueError, "sets 'ratio_min', which AdamConfig"),
        (
            lambda: AdamConfig([{"params": ["a"], "alpha": 0.1}, {"params": ["a"], "alpha": 0.2}]),
            ValueError,
            "parameter 'a' is in groups 0 and 1",
        ),
        (lambda: SGDConfig(momentum=-0.1), ValueError, "'momentum' must be at least 0"),
        (lambda: SGDConfig(nesterov=1), TypeError, "'nesterov' must be a bool"),
        (lambda: SGDConfig(nesterov=True), ValueError, "'nesterov' needs a momentum above 0 and no dampening"),
        (
            lambda: SGDConfig([{"params": ["a"], "dampening": 0.5}], momentum=0.9, nesterov=True),
            ValueError,
            "dampening",
        ),
        (lambda: LionConfig(betas=(0.9, 1.0)), ValueError, "'betas' must be at least 0 and below 1"),
        (lambda: LionConfig(betas=0.9), TypeError, "'betas' must be two numbers"),
        (lambda: _OptimizerConfig("Other", [], {"lr": 1}), ValueError, "name must be one of"),
        (lambda: _OptimizerConfig("SGDOptimizer", [], {}), ValueError, "defaults must be a dict with an 'lr'"),
    ],
)
def test_errors(make, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_learning_rate_is_checked_when_assigned() -> None:
    config = SGDConfig()
    with pytest.raises(ValueError, match="'lr' must be at least 0"):
        config.lr = -1
    with pytest.raises(AttributeError, match="SGDConfig has no attribute 'alpha'"):
        config.alpha  # noqa: B018


def test_adamw_shows_its_own_names() -> None:
    config = AdamWConfig([{"params": ["a"], "weight_decay": 0.0, "betas": (0.8, 0.9)}], lr=0.1, eps=1e-6)
    text = (
        "AdamWConfig(params=[{'params': ('a',), 'betas': (0.8, 0.9), 'weight_decay': 0.0}], lr=0.1, betas=(0.9, 0.999),"
        " eps=1e-06, weight_decay=0.01, max_norm_clip=inf)"
    )
    assert repr(config) == text
    again = eval(text, {"AdamWConfig": AdamWConfig, "inf": float("inf")})
    assert (again.defaults, again.params) == (config.defaults, config.params)


def test_lambda_under_both_names_is_refused() -> None:
    with pytest.raises(ValueError, match="group 0 sets both 'lambda' and 'lambda_coef', which are the same"):
        AdamConfig([{"params": ["a"], "lambda": 0.1, "lambda_coef": 0.2}])
