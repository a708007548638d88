"""Replaces operators by their definitions in ONNX."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import onnx
import onnx.defs
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from ....step.emitter import infer_missing

__all__ = ["InlineDefinitionsPass", "has_definition"]


class InlineDefinitionsPass(ir.passes.InPlacePass):
    """Replaces nodes by the ONNX functions that define their operators.

    Args:
        nodes: The nodes, whose operators must have a definition.
    """

    def __init__(self, nodes: Collection[ir.Node]) -> None:
        self._nodes = nodes

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        # Inlining would drop attributes left at their defaults.
        common_passes.AddDefaultAttributesPass()(model)
        for number, node in enumerate(self._nodes):
            node.overload = str(number)  # a definition may depend on the node
            function = ir.serde.deserialize_function(_definition(node, model.opset_imports[""]))
            model.functions[function.identifier()] = function
        common_passes.InlinePass(lambda function: not function.domain)(model)
        infer_missing(model)
        return ir.passes.PassResult(model, modified=bool(self._nodes))


def has_definition(node: ir.Node, opset: int) -> bool:
    """Returns whether ONNX defines the operator of a node in terms of others."""
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
    except onnx.defs.SchemaError:
        return False
    return not node.domain and bool(_versions(schema, opset))


def _versions(schema: Any, opset: int) -> list[int]:
    versions = (*schema.function_opset_versions, *schema.context_dependent_function_opset_versions)
    return [version for version in versions if version <= opset]


def _definition(node: ir.Node, opset: int) -> onnx.FunctionProto:
    schema: Any = onnx.defs.get_schema(node.op_type, opset, node.domain)  # its type stubs are incomplete
    version = max(_versions(schema, opset))
    if schema.has_context_dependent_function:
        types = [b"" if value is None else ir.to_proto(value).type.SerializeToString() for value in node.inputs]
        data = schema.get_context_dependent_function_with_opset_version(
            version, ir.to_proto(node).SerializeToString(), types
        )
    else:
        data = schema.get_function_with_opset_version(version)
    function: onnx.FunctionProto = onnx.FunctionProto.FromString(data)
    function.domain, function.name, function.overload = node.domain, node.op_type, node.overload
    # None of the operators in it has changed its meaning since.
    del function.opset_import[:]
    function.opset_import.add(domain="", version=opset)
    return function
