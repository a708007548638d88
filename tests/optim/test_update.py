"""The update rules against torch.optim, and LAMB against its paper in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from ort_trainer.optim import AdamConfig, LambConfig, LionConfig, SGDConfig
from ort_trainer.optim.parts import global_norm
from ort_trainer.optim.update import OptimizerUpdate

from ..helpers import assert_same_edges

SHAPES = {"a": (5, 7), "b": (3,), "c": (), "d": (1, 1)}


def tensors(seed: int, scale: float = 1.0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def make(config, weights: dict[str, torch.Tensor], clip: bool) -> OptimizerUpdate:
    return OptimizerUpdate(config, weights, {name: config.group_of(name) for name in weights}, clip=clip)


def run_both(config, optimizer_of, clip: float | None, divisor: float = 1.0) -> None:
    weights = tensors(0)
    update = make(config, weights, clip is not None)
    reference = {name: torch.nn.Parameter(value.clone()) for name, value in weights.items()}
    optimizer = optimizer_of(reference)
    for step in range(20):
        gradients = tensors(100 + step, scale=0.1 if step % 2 else 2.0)
        for name, parameter in reference.items():
            parameter.grad = gradients[name].clone()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(reference.values(), clip)
        optimizer.step()
        assert update.step({name: g * divisor for name, g in gradients.items()}, [config.lr], divisor)
    for name, value in weights.items():
        torch.testing.assert_close(value, reference[name].detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("divisor", [1.0, 1024.0])
def test_sgd(divisor: float) -> None:
    config = SGDConfig(lr=0.1)
    run_both(config, lambda p: torch.optim.SGD(p.values(), lr=0.1), None, divisor)


SGD = [
    {"momentum": 0.9},
    {"momentum": 0.9, "nesterov": True},
    {"momentum": 0.8, "dampening": 0.3},
    {"weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.05},
]


@pytest.mark.parametrize("divisor", [1.0, 1024.0])
@pytest.mark.parametrize("settings", SGD, ids=lambda s: "-".join(s))
def test_sgd_with_momentum(settings: dict[str, Any], divisor: float) -> None:
    run_both(SGDConfig(lr=0.05, **settings), lambda p: torch.optim.SGD(p.values(), lr=0.05, **settings), None, divisor)


@pytest.mark.parametrize("config", [SGDConfig(lr=0.05, momentum=0.9), AdamConfig(lr=0.01)], ids=["sgd", "adam"])
def test_the_divisor_of_doubles_is_not_rounded(config: Any) -> None:
    """PyTorch's fused kernels take it as fp32; beside weights of other dtypes, too."""
    ours = {name: value.double() if name != "c" else value for name, value in tensors(0).items()}
    theirs = {name: value.clone() for name, value in ours.items()}
    divided, plain = make(config, ours, False), make(config, theirs, False)
    for step in range(3):
        gradients = {name: value.to(ours[name].dtype) for name, value in tensors(100 + step).items()}
        divided.step({name: value * (10 / 3) for name, value in gradients.items()}, [config.lr], 10 / 3)
        plain.step({name: value.clone() for name, value in gradients.items()}, [config.lr])
    for name, value in ours.items():
        tolerance = 1e-14 if value.dtype == torch.float64 else 1e-6
        torch.testing.assert_close(value, theirs[name], rtol=tolerance, atol=tolerance)


def test_sgd_in_groups_some_without_momentum() -> None:
    config = SGDConfig([{"params": ["a", "c"], "momentum": 0.0, "lr": 0.1}], lr=0.1, momentum=0.9)
    assert config.rule.slots_for(config.hyper_parameters(0)) == ()

    def optimizer(p: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
        plain = {"params": [p["a"], p["c"]], "momentum": 0.0}
        return torch.optim.SGD([plain, {"params": [p["b"], p["d"]]}], lr=0.1, momentum=0.9)

    run_both(config, optimizer, None)


def test_a_first_gradient_that_comes_late_is_a_first_one() -> None:
    config = SGDConfig(lr=0.1, momentum=0.9, dampening=0.5)
    weights = tensors(0)
    reference = {name: torch.nn.Parameter(value.clone()) for name, value in weights.items()}
    update, optimizer = make(config, weights, clip=False), torch.optim.SGD(reference.values(), 0.1, 0.9, 0.5)
    for step in range(4):
        gradients = {name: g for name, g in tensors(step).items() if step > 1 or name != "b"}
        for name, parameter in reference.items():
            parameter.grad = gradients[name].clone() if name in gradients else None
        optimizer.step()
        update.step(gradients, [0.1])
    for name, value in weights.items():
        torch.testing.assert_close(value, reference[name].detach())


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lion_against_the_algorithm_of_its_paper(decay: float) -> None:
    config = LionConfig(lr=0.01, betas=(0.8, 0.95), weight_decay=decay)
    weights = tensors(0)
    update = make(config, weights, clip=False)
    expected = {name: value.numpy().astype(np.float64) for name, value in weights.items()}
    moments = {name: np.zeros_like(value) for name, value in expected.items()}
    for step in range(20):
        gradients = tensors(100 + step)
        for name, gradient in gradients.items():
            g = gradient.numpy().astype(np.float64)
            direction = np.sign(0.8 * moments[name] + 0.2 * g)
            expected[name] = expected[name] - 0.01 * (direction + decay * expected[name])
            moments[name] = 0.95 * moments[name] + 0.05 * g
        update.step({name: g * 8 for name, g in gradients.items()}, [0.01], divisor=8.0)
    for name, value in weights.items():
        np.testing.assert_allclose(value.numpy(), expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("divisor", [1.0, 1024.0])
@pytest.mark.parametrize("clip", [None, 0.7])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam(clip: float | None, decay: float, divisor: float) -> None:
    config = AdamConfig(lr=0.05, alpha=0.8, beta=0.95, epsilon=1e-6, lambda_coef=decay, max_norm_clip=clip or 1.0)
    run_both(
        config,
        lambda p: torch.optim.AdamW(p.values(), lr=0.05, betas=(0.8, 0.95), eps=1e-6, weight_decay=decay),
        clip,
        divisor,
    )


@pytest.mark.parametrize("clip", [None, 0.7])
def test_adam_groups_with_every_hyper_parameter(clip: float | None) -> None:
    group = {"alpha": 0.5, "beta": 0.9, "lambda_coef": 0.3, "epsilon": 1e-3}
    config = AdamConfig([{"params": ["a", "c"], **group}], lr=0.05, max_norm_clip=clip or 1.0)

    def optimizer(p: dict[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
        first = {"params": [p["a"], p["c"]], "betas": (0.5, 0.9), "weight_decay": 0.3, "eps": 1e-3}
        second = {"params": [p["b"], p["d"]], "betas": (0.9, 0.999), "weight_decay": 0.0, "eps": 1e-8}
        return torch.optim.AdamW([first, second], lr=0.05)

    run_both(config, optimizer, clip)


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("mode", list(AdamConfig.DecayMode))
def test_adam_modes_against_the_formulas(corrected: bool, mode: AdamConfig.DecayMode) -> None:
    config = AdamConfig(lr=0.05, lambda_coef=0.1, epsilon=1e-2, do_bias_correction=corrected, weight_decay_mode=mode)
    weights = tensors(0)
    update = make(config, weights, clip=False)
    expected = {name: value.double().numpy() for name, value in weights.items()}
    expected = {name: value.copy() for name, value in expected.items()}
    m = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    v = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    for t in range(1, 21):
        gradients = tensors(t)
        c1, c2 = (1 - 0.9**t, 1 - 0.999**t) if corrected else (1.0, 1.0)
        for name, w in expected.items():
            g = gradients[name].double().numpy()
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g * g
            if mode == AdamConfig.DecayMode.BEFORE_WEIGHT_UPDATE:
                expected[name] = w - 0.05 * (m[name] / c1 / (np.sqrt(v[name] / c2) + 1e-2) + 0.1 * w)
            else:
                z = w - 0.05 * math.sqrt(c2) / c1 * m[name] / (np.sqrt(v[name]) + 1e-2)
                expected[name] = z - 0.05 * 0.1 * z
        update.step(gradients, [0.05])
    for name, value in weights.items():
        np.testing.assert_allclose(value.numpy(), expected[name], rtol=1e-5, atol=1e-6)
        assert float(update.counts[name]) == 20


@pytest.mark.parametrize("clip", [None, 0.7])
@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("ratios", [(-math.inf, math.inf), (0.5, 2.0)])
def test_lamb_against_the_paper(clip: float | None, corrected: bool, ratios: tuple[float, float]) -> None:
    config = LambConfig(
        [{"params": ["b"], "lambda_coef": 0.3}],
        lr=0.05,
        lambda_coef=0.1,
        ratio_min=ratios[0],
        ratio_max=ratios[1],
        max_norm_clip=clip or 1.0,
        do_bias_correction=corrected,
    )
    weights = {**tensors(0), "zero": torch.zeros(4)}
    update = make(config, weights, clip is not None)
    expected = {name: value.double().numpy().copy() for name, value in weights.items()}
    m = {name: np.zeros_like(value) for name, value in expected.items()}
    v = {name: np.zeros_like(value) for name, value in expected.items()}
    for t in range(1, 21):
        gradients = {**tensors(t), "zero": torch.full((4,), 0.25)}
        norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients.values()))
        factor = clip / norm if clip is not None and norm > clip else 1.0
        c1, c2 = (1 - 0.9**t, 1 - 0.999**t) if corrected else (1.0, 1.0)
        for name, w in expected.items():
            g = gradients[name].double().numpy() * factor
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g * g
            d = m[name] / c1 / (np.sqrt(v[name] / c2) + 1e-6) + (0.3 if name == "b" else 0.1) * w
            norms = np.linalg.norm(w), np.linalg.norm(d)
            r = min(max(norms[0] / norms[1], ratios[0]), ratios[1]) if all(norms) else 1.0
            expected[name] = w - 0.05 * r * d
        update.step({name: g * 8 for name, g in gradients.items()}, [0.05], divisor=8.0)
    for name, value in weights.items():
        np.testing.assert_allclose(value.numpy(), expected[name], rtol=2e-5, atol=2e-6)


def test_clipping_limits_differ_per_group() -> None:
    config = LambConfig([{"params": ["a"], "max_norm_clip": 0.1}], max_norm_clip=1000.0)
    weights = tensors(0)
    update = make(config, weights, clip=True)
    gradients = tensors(1)
    norm = float(global_norm(gradients.values()))
    before = {name: g.clone() for name, g in gradients.items()}
    update.step(gradients, [0.0])
    first = {name: update.slots[name]["Moment_1"] for name in weights}
    torch.testing.assert_close(first["a"], 0.1 * before["a"] * 0.1 / norm)
    torch.testing.assert_close(first["b"], 0.1 * before["b"])


@pytest.mark.parametrize("config", [SGDConfig(), AdamConfig(), LambConfig()], ids=lambda c: c.name)
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_step_that_is_not_finite_changes_nothing(config, bad: float) -> None:
    weights = tensors(0)
    update = make(config, weights, clip=True)
    update.step(tensors(1), [0.1], check_finite=True)
    before = {name: value.clone() for name, value in weights.items()}
    moments = {name: {k: m.clone() for k, m in entry.items()} for name, entry in update.slots.items()}
    counts = {name: float(count) for name, count in update.counts.items()}
    gradients = tensors(2)
    gradients["a"][2, 3] = bad
    assert update.step(gradients, [0.1], check_finite=True) is False
    assert all(torch.equal(weights[name], value) for name, value in before.items())
    assert all(torch.equal(update.slots[n][k], m) for n, entry in moments.items() for k, m in entry.items())
    assert {name: float(count) for name, count in update.counts.items()} == counts
    assert update.step(tensors(2), [0.1], check_finite=True) is True


@pytest.mark.parametrize("config", [SGDConfig(), AdamConfig(lambda_coef=0.1), LambConfig()], ids=lambda c: c.name)
def test_a_parameter_without_gradient_is_left_alone(config) -> None:
    weights = tensors(0)
    before = weights["b"].clone()
    update = make(config, weights, clip=True)
    update.step({name: g for name, g in tensors(1).items() if name != "b"}, [0.1])
    assert torch.equal(weights["b"], before)
    assert not update.counts or float(update.counts["b"]) == 0


def test_double_precision() -> None:
    config = AdamConfig(lr=0.1)
    weights = {"a": torch.ones(3, dtype=torch.float64)}
    reference = torch.nn.Parameter(weights["a"].clone())
    optimizer = torch.optim.AdamW([reference], lr=0.1, weight_decay=0.0)
    update = make(config, weights, clip=False)
    for step in range(5):
        gradient = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) * (step + 1)
        reference.grad = gradient.clone()
        optimizer.step()
        update.step({"a": gradient}, [0.1])
    torch.testing.assert_close(weights["a"], reference.detach(), rtol=1e-12, atol=0)


EDGES = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 0.0, 1.0, -1.0, 1e30, 1e-30])
RULES: dict[str, Any] = {
    "sgd": (SGDConfig(), torch.optim.SGD, {}),
    "sgd, decay": (SGDConfig(weight_decay=0.1), torch.optim.SGD, {"weight_decay": 0.1}),
    "momentum": (SGDConfig(momentum=0.9, nesterov=True), torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adam": (AdamConfig(), torch.optim.Adam, {"betas": (0.9, 0.999), "eps": 1e-8}),
    "adamw": (
        AdamConfig(lambda_coef=0.1, weight_decay_mode=AdamConfig.DecayMode.BEFORE_WEIGHT_UPDATE),
        torch.optim.AdamW,
        {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1},
    ),
}


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("name", RULES)
def test_edge_values_are_used_as_in_pytorch(name: str, clip: float | None) -> None:
    """Every pair of a gradient and a weight, and then updates with finite gradients."""
    config, kind, settings = RULES[name]
    pairs = torch.cartesian_prod(EDGES, EDGES[EDGES != 0])
    weights = {"w": pairs[:, 1].clone()}
    parameter = torch.nn.Parameter(weights["w"].clone())
    optimizer = kind([parameter], lr=0.1, fused=True, **settings)
    update = OptimizerUpdate(config, weights, {"w": 0}, clip=clip is not None, max_norm=clip)
    for gradient in (pairs[:, 0], torch.full((len(pairs),), 0.5), torch.full((len(pairs),), -0.5)):
        parameter.grad = gradient.clone()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_([parameter], clip)
        optimizer.step()
        update.step({"w": gradient.clone()}, [0.1])
        assert_same_edges(weights["w"], parameter.detach(), 1e-5, "weights")


def test_a_group_may_lose_its_gradients_with_its_tensors() -> None:
    weights, config = tensors(0), AdamConfig([{"params": ["a", "b"], "lr": 0.1}], lr=0.2)
    update = make(config, weights, clip=False)
    update.step(tensors(1), [0.1, 0.2])
    replaced = tensors(2)
    update.rebind(replaced)
    before = {name: value.clone() for name, value in replaced.items()}
    update.step({name: value for name, value in tensors(3).items() if name in ("c", "d")}, [0.1, 0.2])
    assert [name for name, value in replaced.items() if not torch.equal(value, before[name])] == ["c", "d"]
