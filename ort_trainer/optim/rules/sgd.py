"""Gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..config import OptimizerConfig, ParameterGroups, flag, number
from ..rule import NodeWriter, ParameterBatch, ParameterNodes, Rule, by_count

__all__ = ["SGDConfig"]

MOMENTUM = "Momentum"
_NARROW = (torch.float16, torch.bfloat16)


class SGDConfig(OptimizerConfig):
    """Gradient descent, as ``torch.optim.SGD``.

    With the gradient g and the weight w: ``d = g + weight_decay w``; with momentum
    ``b = momentum b + (1 - dampening) d`` (``b = d`` in the first update), then ``d = d + momentum b`` with
    ``nesterov``, otherwise ``d = b``; finally ``w -= lr d``.
    (I. Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML 2013.)

    Args:
        params: Parameter groups by name, each with any of the hyper-parameters below.
        lr: Learning rate, at least 0.
        momentum: Decay of the average of the gradients, at least 0; 0 for no momentum.
        dampening: Reduction of a gradient's share in the average, which is ``1 - dampening``.
        weight_decay: Factor on the weights that are added to their gradients, at least 0.
        nesterov: Whether to use Nesterov momentum, which requires a momentum and no dampening.
    """

    def __init__(
        self,
        params: ParameterGroups = (),
        lr: float = 0.001,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
        }
        super().__init__("SGDOptimizer", params, defaults)

    def _checked(self, key: str, value: Any) -> Any:
        return flag(key, value) if key == "nesterov" else number(key, value)

    def _check_values(self, values: Mapping[str, Any]) -> None:
        if values.get("nesterov") and (not values["momentum"] or values["dampening"]):
            raise ValueError(
                f"'nesterov' needs a momentum above 0 and no dampening, but momentum is {values['momentum']:g} and "
                f"dampening {values['dampening']:g}"
            )


class _SGD(Rule):
    """Gradient descent with torch's fused kernel."""

    name = "SGDOptimizer"
    slots = (MOMENTUM,)

    def slots_for(self, hyper: Mapping[str, Any]) -> tuple[str, ...]:
        return self.slots if hyper.get("momentum") else ()

    def keeps_count(self, hyper: Mapping[str, Any]) -> bool:
        return bool(hyper.get("momentum"))  # the first update is different

    def update(self, batch: ParameterBatch) -> None:
        momentum = batch.hyper.get("momentum", 0.0)
        # The average starts at zero, so the first update differs only with dampening.
        for count, same in by_count(batch) if momentum and batch.hyper["dampening"] else [(None, batch)]:
            for is_narrow, part in same.split([weight.dtype in _NARROW for weight in same.weights]):
                (self._update_narrow if is_narrow else self._update)(part, is_first=count == 0)
        if momentum:
            batch.count_up()

    def _update(self, batch: ParameterBatch, is_first: bool) -> None:
        hyper = batch.hyper
        torch._fused_sgd_(
            batch.weights,
            batch.gradients,
            batch.by_slot[MOMENTUM] if hyper.get("momentum") else [],
            weight_decay=hyper.get("weight_decay", 0.0),
            momentum=hyper.get("momentum", 0.0),
            lr=batch.lr,
            dampening=hyper.get("dampening", 0.0),
            nesterov=hyper.get("nesterov", False),
            maximize=False,
            is_first_step=is_first,
            grad_scale=batch.scale(),
            found_inf=None,
        )

    def _update_narrow(self, batch: ParameterBatch, is_first: bool) -> None:
        """Updates without the fused kernel, whose results are wrong for 16-bit floats on a CPU (torch 2.13)."""
        batch.divide()
        hyper, step = batch.hyper, tuple(batch.gradients)
        if hyper.get("weight_decay"):
            step = torch._foreach_add(step, batch.weights, alpha=hyper["weight_decay"])
        if hyper.get("momentum"):
            averages = batch.by_slot[MOMENTUM]
            if is_first:
                torch._foreach_copy_(averages, step)
            else:
                torch._foreach_mul_(averages, hyper["momentum"])
                torch._foreach_add_(averages, step, alpha=1.0 - hyper["dampening"])
            step = torch._foreach_add(step, averages, alpha=hyper["momentum"]) if hyper["nesterov"] else tuple(averages)
        torch._foreach_add_(batch.weights, step, alpha=-batch.lr)

    def nodes(self, nodes: NodeWriter, parameter: ParameterNodes) -> tuple[Any, Mapping[str, Any]]:
        weight, gradient, slots = parameter.weight, parameter.gradient, parameter.slots
        count, rate, hyper = parameter.count, parameter.rate, parameter.hyper
        new_slots: dict[str, Any] = {}
        if hyper.get("weight_decay"):
            decay = nodes.op("Mul", weight, nodes.number(hyper["weight_decay"], weight))
            gradient = nodes.op("Add", gradient, decay)
        if slots:
            momentum = nodes.number(hyper["momentum"], weight)
            share = gradient
            if hyper["dampening"]:  # which the first update ignores, because the average is zero
                is_first = nodes.op("Equal", count, nodes.number(1, count))
                shares = [nodes.number(value, weight) for value in (1.0, 1.0 - hyper["dampening"])]
                share = nodes.op("Mul", gradient, nodes.op("Where", is_first, *shares))
            average = nodes.op("Add", nodes.op("Mul", slots[MOMENTUM], momentum), share)
            new_slots[MOMENTUM] = average
            ahead = nodes.op("Mul", average, momentum) if hyper["nesterov"] else None
            gradient = average if ahead is None else nodes.op("Add", gradient, ahead)
        return nodes.op("Sub", weight, nodes.op("Mul", gradient, rate)), new_slots
