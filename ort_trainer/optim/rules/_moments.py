"""The common part of Adam and LAMB: two moments, and the correction of their bias toward zero."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import OptimizerConfig, flag, number
from ..rule import NodeWriter, ParameterNodes

__all__ = ["MOMENT_1", "MOMENT_2", "AdaptiveConfig", "adaptive_step"]

MOMENT_1 = "Moment_1"
MOMENT_2 = "Moment_2"


class AdaptiveConfig(OptimizerConfig):
    """The common part of the configs of Adam and LAMB."""

    def _checked(self, key: str, value: Any) -> Any:
        if key in ("alpha", "beta"):
            return number(key, value, below=1.0)
        if key == "do_bias_correction":
            return flag(key, value)
        if key == "max_norm_clip":
            limit = number(key, value, finite=False)
            if limit == 0:
                raise ValueError("'max_norm_clip' must not be 0: to disable clipping, set utils.grad_norm_clip False")
            return limit
        return number(key, value)


def _average(nodes: NodeWriter, moment: Any, value: Any, decay: float) -> Any:
    """Writes ``decay * moment + (1 - decay) * value``."""
    kept = nodes.op("Mul", moment, nodes.number(decay, moment))
    return nodes.op("Add", kept, nodes.op("Mul", value, nodes.number(1.0 - decay, moment)))


def adaptive_step(
    nodes: NodeWriter, parameter: ParameterNodes, corrected_epsilon: bool = True
) -> tuple[Mapping[str, Any], Any, Any]:
    """Writes the new moments, and ``m / c1 / (sqrt(v / c2) + epsilon)`` as a tensor and a scalar factor.

    These are ``m / (sqrt(v) + epsilon sqrt(c2))`` and ``sqrt(c2) / c1``: the corrections stay scalar operations.

    Args:
        nodes: Writes the nodes.
        parameter: The parameter.
        corrected_epsilon: Whether epsilon is added to the corrected root; if False, to ``sqrt(v)``.

    Returns:
        The moments by slot, the tensor, and the factor, which is None without bias correction.
    """
    gradient, slots, hyper = parameter.gradient, parameter.slots, parameter.hyper
    first = _average(nodes, slots[MOMENT_1], gradient, hyper["alpha"])
    second = _average(nodes, slots[MOMENT_2], nodes.op("Mul", gradient, gradient), hyper["beta"])
    epsilon, factor = nodes.number(hyper["epsilon"], first), None
    if hyper["do_bias_correction"]:
        root = nodes.op("Sqrt", nodes.power(hyper["beta"], parameter.count, first))
        factor = nodes.op("Div", root, nodes.power(hyper["alpha"], parameter.count, first))
        epsilon = nodes.op("Mul", epsilon, root) if corrected_epsilon else epsilon
    step = nodes.op("Div", first, nodes.op("Add", nodes.op("Sqrt", second), epsilon))
    return {MOMENT_1: first, MOMENT_2: second}, step, factor
