"""LAMB."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..config import ParameterGroups, number
from ..rule import NodeWriter, ParameterBatch, ParameterNodes, Rule
from ._moments import MOMENT_1, MOMENT_2, AdaptiveConfig, adaptive_step

__all__ = ["LambConfig"]


class LambConfig(AdaptiveConfig):
    """LAMB (You et al., "Large Batch Optimization for Deep Learning", ICLR 2020, algorithm 2).

    With Adam's moments: ``d = m / c1 / (sqrt(v / c2) + epsilon) + lambda w``,
    ``r = clamp(norm(w) / norm(d), ratio_min, ratio_max)`` (1 where either norm is 0), ``w -= lr r d``, per tensor.

    Args:
        params: Parameter groups by name, each with any of the hyper-parameters below.
        lr: Learning rate, at least 0.
        alpha: Decay of the first moment, in [0, 1).
        beta: Decay of the second moment, in [0, 1).
        lambda_coef: Weight decay, at least 0.
        ratio_min: Lower limit of the trust ratio.
        ratio_max: Upper limit of the trust ratio.
        epsilon: Added to the denominator, at least 0.
        max_norm_clip: Limit of the global gradient norm, above 0; used while ``utils.grad_norm_clip`` is on.
        do_bias_correction: Whether c1 and c2 are used.
    """

    def __init__(
        self,
        params: ParameterGroups = (),
        lr: float = 0.001,
        alpha: float = 0.9,
        beta: float = 0.999,
        lambda_coef: float = 0.0,
        ratio_min: float = -math.inf,
        ratio_max: float = math.inf,
        epsilon: float = 1e-6,
        max_norm_clip: float = 1.0,
        do_bias_correction: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "alpha": alpha,
            "beta": beta,
            "lambda_coef": lambda_coef,
            "ratio_min": ratio_min,
            "ratio_max": ratio_max,
            "epsilon": epsilon,
            "max_norm_clip": max_norm_clip,
            "do_bias_correction": do_bias_correction,
        }
        super().__init__("LambOptimizer", params, defaults)

    def _checked(self, key: str, value: Any) -> Any:
        if key in ("ratio_min", "ratio_max"):
            return number(key, value, minimum=-math.inf, finite=False)
        return super()._checked(key, value)

    def _check_values(self, values: Mapping[str, Any]) -> None:
        if values["ratio_min"] > values["ratio_max"]:
            raise ValueError(f"'ratio_min' {values['ratio_min']} is above 'ratio_max' {values['ratio_max']}")


class _Lamb(Rule):
    """LAMB, tensor by tensor, because each has its own trust ratio."""

    name = "LambOptimizer"
    slots = (MOMENT_1, MOMENT_2)
    shares_count = True
    by_element = False

    def update(self, batch: ParameterBatch) -> None:
        batch.divide()
        everything = range(len(batch.weights))
        # One tensor at a time stays in the cache; processes that share the tensors exchange all norms at once.
        for indices in [everything] if batch.parts.are_shared else zip(everything, strict=True):
            self._update([(batch.weights[index], self._direction(batch, index)) for index in indices], batch)

    def _update(self, steps: list[tuple[torch.Tensor, torch.Tensor]], batch: ParameterBatch) -> None:
        norms = iter(batch.parts.norms([tensor for pair in steps for tensor in pair]))
        limits = batch.hyper["ratio_min"], batch.hyper["ratio_max"]
        for weight, direction in steps:
            ratio = next(norms) / next(norms)
            usable = torch.isfinite(ratio) & (ratio > 0)  # neither norm is 0
            ratio = torch.where(usable, ratio.clamp(*limits), 1.0)
            weight.sub_(direction.mul_(ratio), alpha=batch.lr)

    def _direction(self, batch: ParameterBatch, index: int) -> torch.Tensor:
        """Updates the moments with a gradient; returns the step without the trust ratio."""
        hyper, slots, count = batch.hyper, batch.slots[index], batch.counts[index]
        weight, gradient = batch.weights[index], batch.gradients[index]
        assert count is not None
        updates = float(count.add_(1))
        first = slots[MOMENT_1].lerp_(gradient, 1.0 - hyper["alpha"])
        second = slots[MOMENT_2].mul_(hyper["beta"]).addcmul_(gradient, gradient, value=1.0 - hyper["beta"])
        is_corrected = hyper["do_bias_correction"]
        correction_1 = 1.0 - hyper["alpha"] ** updates if is_corrected else 1.0
        correction_2 = 1.0 - hyper["beta"] ** updates if is_corrected else 1.0
        denominator = torch.div(second, correction_2).sqrt_().add_(hyper["epsilon"])
        direction = torch.div(first, denominator, out=denominator).div_(correction_1)
        return direction.add_(weight, alpha=hyper["lambda_coef"])

    def nodes(self, nodes: NodeWriter, parameter: ParameterNodes) -> tuple[Any, Mapping[str, Any]]:
        weight, rate, hyper = parameter.weight, parameter.rate, parameter.hyper
        moments, direction, factor = adaptive_step(nodes, parameter)
        direction = direction if factor is None else nodes.op("Mul", direction, factor)
        if hyper["lambda_coef"]:
            decay = nodes.op("Mul", weight, nodes.number(hyper["lambda_coef"], weight))
            direction = nodes.op("Add", direction, decay)
        norms = [nodes.op("Sqrt", nodes.op("ReduceSumSquare", value, keepdims=0)) for value in (weight, direction)]
        ratio = nodes.op("Div", *norms)
        zero = nodes.number(0.0, weight)
        usable = nodes.op("And", *(nodes.op("Greater", norm, zero) for norm in norms))
        for bound, op_type in ((hyper["ratio_min"], "Max"), (hyper["ratio_max"], "Min")):
            if math.isfinite(bound):
                ratio = nodes.op(op_type, ratio, nodes.number(bound, weight))
        ratio = nodes.op("Where", usable, ratio, nodes.number(1.0, weight))
        return nodes.op("Sub", weight, nodes.op("Mul", direction, nodes.op("Mul", rate, ratio))), moments
