"""Rewrite rules that drop arithmetic with a neutral element: ``x + 0``, ``x - 0``, ``x * 1`` and ``x / 1``.

onnxscript's own rules also match constants up to 1e-8 from 0 and up to 1e-5 from 1, so they would drop the ``eps`` in
``log(x + 1e-8)``.
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
