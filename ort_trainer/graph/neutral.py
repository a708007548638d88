"""Rewriting rules that drop arithmetic with a neutral element: ``x + 0``, ``x - 0``, ``x * 1`` and ``x / 1``.

onnxscript has the same, but takes for 0 whatever is at most 1e-8, and for 1 whatever is within 1e-5 of it: the ``eps``
of ``log(x + 1e-8)`` would be gone, and with it what it is there for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import RewriteRule

__all__ = ["NEUTRAL_RULES"]


def _rule(pattern: Callable[[Any, Any, Any], Any], neutral: float) -> RewriteRule:
    def condition(context: Any, x: ir.Value, number: ir.Value) -> bool:
        constant = ir.convenience.get_const_tensor(number)
        return constant is not None and constant.numpy().ndim == 0 and bool(constant.numpy() == neutral)

    def replacement(op: Any, x: ir.Value, number: ir.Value) -> Any:
        return op.Identity(x)

    return RewriteRule(pattern, replacement, condition)


NEUTRAL_RULES = (
    _rule(lambda op, x, number: op.Add(x, number), 0),
    _rule(lambda op, x, number: op.Sub(x, number), 0),
    _rule(lambda op, x, number: op.Mul(x, number), 1),
    _rule(lambda op, x, number: op.Div(x, number), 1),
)
