"""Lion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...core.errors import shown
from ..config import OptimizerConfig, ParameterGroups, number
from ..rule import NodeWriter, ParameterBatch, ParameterNodes, Rule
from ._moments import MOMENT_1

__all__ = ["LionConfig"]


class LionConfig(OptimizerConfig):
    """Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", NeurIPS 2023, algorithm 2).

    With the gradient g, weight w and moment m: ``w -= lr (sign(beta1 m + (1 - beta1) g) + weight_decay w)``, then
    ``m = beta2 m + (1 - beta2) g``. It needs half of Adam's state. Learning rates are 3 to 10 times smaller than
    Adam's, and weight decay is larger by the same factor.

    Args:
        params: Parameter groups by name, each with any of the hyper-parameters below.
        lr: Learning rate, at least 0.
        betas: Decay inside the sign and decay of the moment, each in [0, 1).
        weight_decay: Weight decay, at least 0.
    """

    def __init__(
        self,
        params: ParameterGroups = (),
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__("LionOptimizer", params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _checked(self, key: str, value: Any) -> Any:
        if key != "betas":
            return number(key, value)
        if isinstance(value, str) or not isinstance(value, Sequence) or len(value) != 2:
            raise TypeError(f"'betas' must be two numbers, but {shown(value)} was given")
        return tuple(number(key, beta, below=1.0) for beta in value)


class _Lion(Rule):
    """Lion, with operations on lists of tensors."""

    name = "LionOptimizer"
    slots = (MOMENT_1,)

    def keeps_count(self, hyper: Mapping[str, Any]) -> bool:
        return False

    def update(self, batch: ParameterBatch) -> None:
        batch.divide()
        (inner, outer), moments = batch.hyper["betas"], batch.by_slot[MOMENT_1]
        direction = torch._foreach_lerp(moments, batch.gradients, 1.0 - inner)
        torch._foreach_sign_(direction)
        torch._foreach_lerp_(moments, batch.gradients, 1.0 - outer)
        if batch.hyper["weight_decay"]:
            torch._foreach_mul_(batch.weights, 1.0 - batch.lr * batch.hyper["weight_decay"])
        torch._foreach_add_(batch.weights, direction, alpha=-batch.lr)

    def nodes(self, nodes: NodeWriter, parameter: ParameterNodes) -> tuple[Any, Mapping[str, Any]]:
        weight, rate, hyper = parameter.weight, parameter.rate, parameter.hyper
        moment, (inner, outer) = parameter.slots[MOMENT_1], hyper["betas"]
        # The new moment is computed from the average inside the sign, so that nothing reads the old moment after it.
        change = nodes.op("Sub", parameter.gradient, moment)
        average = nodes.op("Add", moment, nodes.op("Mul", change, nodes.number(1.0 - inner, weight)))
        new_slots = {MOMENT_1: nodes.op("Add", average, nodes.op("Mul", change, nodes.number(inner - outer, weight)))}
        if hyper["weight_decay"]:
            decay = nodes.op("Mul", rate, nodes.number(hyper["weight_decay"], weight))
            weight = nodes.op("Mul", weight, nodes.op("Sub", nodes.number(1.0, weight), decay))
        return nodes.op("Sub", weight, nodes.op("Mul", nodes.op("Sign", average), rate)), new_slots
