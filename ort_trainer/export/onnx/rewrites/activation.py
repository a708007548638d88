"""Rewrites of activations."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ....step.emitter import Emitter
from ..nodes import attributes_of

__all__ = ["RULES"]


def _elu(node: ir.Node, e: Emitter) -> ir.Value:
    """Rewrites Elu, Selu and Celu, with the exponential of negative numbers only: an infinite one has no gradient."""
    attributes = attributes_of(node)
    alpha = attributes.get("alpha", 1.6732632 if node.op_type == "Selu" else 1.0)
    value, zero = node.inputs[0], e.scalar(0.0)
    negative = e("Min", value, zero)
    if node.op_type == "Celu":
        negative = e("Div", negative, e.scalar(alpha))
    curve = e("Mul", e("Sub", e("Exp", negative), e.scalar(1.0)), e.scalar(alpha))
    result = e("Where", e("Less", value, zero), curve, value)
    return e("Mul", result, e.scalar(attributes.get("gamma", 1.050701))) if node.op_type == "Selu" else result


def _gelu(node: ir.Node, e: Emitter) -> ir.Value | None:
    if attributes_of(node).get("approximate", "none") != "tanh":
        return None
    x = node.inputs[0]
    cube = e("Mul", e("Mul", e("Mul", x, x), x), e.scalar(0.044715))
    inner = e("Tanh", e("Mul", e("Add", x, cube), e.scalar(float(np.sqrt(2.0 / np.pi)))))
    return e("Mul", e("Mul", x, e.scalar(0.5)), e("Add", inner, e.scalar(1.0)))


def _softplus(node: ir.Node, e: Emitter) -> ir.Value:
    """Uses max(x, 0) - log(sigmoid(abs(x))), because log(1 + exp(x)) = -log(sigmoid(-x)) overflows."""
    value, zero = node.inputs[0], e.scalar(0.0)
    positive = e("Where", e("Less", value, zero), zero, value)
    size = e("Where", e("Less", value, zero), e("Neg", value), value)
    return e("Sub", positive, e("Log", e("Sigmoid", size)))


RULES = {"Celu": _elu, "Elu": _elu, "Gelu": _gelu, "Selu": _elu, "Softplus": _softplus}
