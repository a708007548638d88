"""Replaces ONNX Runtime's own operators with standard ones, so any ONNX runtime can run the graph."""

from __future__ import annotations

import onnx_ir as ir

from ....step.emitter import Emitter, Names, infer_node
from ..nodes import dtype_of
from ..rewrite import replace
from ..rewrites import contrib

__all__ = ["StandardOperatorsPass"]


class StandardOperatorsPass(ir.passes.InPlacePass):
    """Replaces the operators of ONNX Runtime by the rules of :mod:`..rewrites.contrib`.

    It visits the graph once, in order, and infers types and ranks on the way: the rules need them, and the nodes of the
    gradient builder lack them. An operator without a rule stays.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        names, modified = Names(ir.convenience.create_value_mapping(model.graph)), False
        for node in list(model.graph):
            rule = contrib.RULES.get(node.op_type)
            if rule is None or (not node.domain and node.op_type not in contrib.NOT_ONNX):
                infer_node(node, model.opset_imports)
                continue
            first = next((value for value in node.inputs if value is not None and _is_float(value)), None)
            dtype = ir.DataType.FLOAT if first is None else dtype_of(first)
            emitter = Emitter(model.opset_imports, names, node.name or node.op_type, dtype)
            results = rule(node, emitter)
            assert results is not None
            values = [results] if isinstance(results, ir.Value) else results
            for old, new in zip(node.outputs, values, strict=False):
                if new is not None and old.type is None:
                    old.type, old.shape = new.type, new.shape
            replace(node, emitter, values)
            modified = True
        return ir.passes.PassResult(model, modified)


def _is_float(value: ir.Value) -> bool:
    return value.dtype is not None and value.dtype.is_floating_point()
