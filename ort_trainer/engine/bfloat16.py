"""Removes bfloat16 from a model's interface: bindings name types by NumPy dtypes, and NumPy has no bfloat16."""

from __future__ import annotations

import onnx_ir as ir

from ..step.emitter import infer_missing
from .kernels import cast

__all__ = ["WidenInterfacePass"]

_NARROW, _WIDE = ir.DataType.BFLOAT16, ir.DataType.FLOAT


class WidenInterfacePass(ir.passes.InPlacePass):
    """Makes bfloat16 inputs and outputs of a model fp32, with casts inside the model.

    Every bfloat16 number is an fp32 number, so this is exact.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Runs the pass."""
        graph = model.graph
        before = len(graph)
        infer_missing(model)
        for value in list(graph.inputs):
            if value.dtype == _NARROW:
                node = cast(value, _NARROW, f"{value.name}__bfloat16")
                ir.convenience.replace_all_uses_with(value, node.outputs[0])
                node.replace_input_with(0, value)
                graph.insert_before(graph[0], node)
                value.type = ir.TensorType(_WIDE)
        for index, value in enumerate(graph.outputs):
            if value.dtype == _NARROW:
                name = value.name
                value.name = f"{name}__bfloat16"
                node = cast(value, _WIDE, str(name))
                graph.append(node)
                graph.outputs[index] = node.outputs[0]
        return ir.passes.PassResult(model, len(graph) > before)
