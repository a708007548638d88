"""What Adam and LAMB share: two moments, and their correction for having begun at zero."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import OptimizerConfig, flag, number
from ..rule import Nodes

__all__ = ["MOMENT_1", "MOMENT_2", "AdaptiveConfig", "average", "corrected"]

MOMENT_1 = "Moment_1"
MOMENT_2 = "Moment_2"


class AdaptiveConfig(OptimizerConfig):
    """What Adam and LAMB share."""

    def _checked(self, key: str, value: Any) -> Any:
        if key in ("alpha", "beta"):
            return number(key, value, below=1.0)
        if key == "do_bias_correction":
            return flag(key, value)
        if key == "max_norm_clip":
            limit = number(key, value, finite=False)
            if limit == 0:
                raise ValueError("'max_norm_clip' must not be 0: to switch clipping off, set utils.grad_norm_clip")
            return limit
        return number(key, value)


def average(nodes: Nodes, moment: Any, value: Any, decay: float) -> Any:
    """Writes ``decay * moment + (1 - decay) * value``."""
    kept = nodes.op("Mul", moment, nodes.number(decay, moment))
    return nodes.op("Add", kept, nodes.op("Mul", value, nodes.number(1.0 - decay, moment)))


def corrected(nodes: Nodes, first: Any, second: Any, count: Any, hyper: Mapping[str, Any]) -> tuple[Any, Any]:
    """Writes both moments divided by what their averages lack."""
    if not hyper["do_bias_correction"]:
        return first, second
    return (
        nodes.op("Div", first, nodes.power(hyper["alpha"], count, first)),
        nodes.op("Div", second, nodes.power(hyper["beta"], count, second)),
    )
