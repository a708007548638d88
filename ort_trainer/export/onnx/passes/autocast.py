"""Casts for mixed precision."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ....step.emitter import Emitter
from ..nodes import attributes_of, dtype_of, operand
from ..rewrite import Rule, rewrite

__all__ = ["AutocastPass"]

# The ONNX counterparts of operators that PyTorch's autocast runs in half precision.
_HALF = ("Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU", "RNN", "Einsum")


class AutocastPass(ir.passes.InPlacePass):
    """Runs matrix products and convolutions in half precision; everything else stays in fp32::

        x, w -> MatMul -> y    =>    x, w -> Cast (fp16) -> MatMul -> Cast (fp32) -> y

    Args:
        dtype: Element type of half precision.
    """

    def __init__(self, dtype: ir.DataType) -> None:
        self._dtype = dtype

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        rules: dict[str, Rule] = dict.fromkeys(_HALF, self._half)
        return ir.passes.PassResult(model, rewrite(model, rules))

    def _half(self, node: ir.Node, e: Emitter) -> Sequence[ir.Value] | None:
        single = ir.DataType.FLOAT
        if dtype_of(operand(node)) != single:
            return None
        inputs = [
            e("Cast", value, to=self._dtype) if value is not None and dtype_of(value) == single else value
            for value in node.inputs
        ]
        results = e.several(node.op_type, *inputs, outputs=len(node.outputs), **attributes_of(node))
        return [e("Cast", result, to=single) for result in results]
