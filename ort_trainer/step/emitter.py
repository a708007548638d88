"""New nodes with inferred types, for code that changes or writes ONNX models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.tape

from .names import Names

# Shape inference needs only constants that are shapes; larger constants are not.
_LARGEST_SHAPE = 64


def infer_node(node: ir.Node, opset_imports: Mapping[str, int]) -> None:
    """Sets types and shapes of a node's outputs, as far as ONNX can infer them from its inputs."""
    types, data = {}, {}
    for value in node.inputs:
        if value is None or value.type is None:
            continue
        types[value.name] = ir.serde.serialize_type(value.type)
        if value.shape is not None:
            ir.serde.serialize_shape_into(types[value.name], value.shape)
        tensor = ir.convenience.get_const_tensor(value)
        if tensor is not None and tensor.size <= _LARGEST_SHAPE:
            data[value.name] = ir.serde.serialize_tensor(tensor)
    try:
        inferred = onnx.shape_inference.infer_node_outputs(
            onnx.defs.get_schema(node.op_type, opset_imports[node.domain], node.domain),
            ir.serde.serialize_node(node),
            types,  # type: ignore[arg-type]
            data,  # type: ignore[arg-type]
        )
    except (
        KeyError,
        onnx.defs.SchemaError,
        onnx.shape_inference.InferenceError,
        onnx.checker.ValidationError,
    ):
        return  # not an ONNX operator, not enough known about its inputs, or an unsupported type
    for value in node.outputs:
        if value.name in inferred:
            value.type = ir.serde.deserialize_type_proto_for_type(inferred[value.name])
            value.shape = ir.serde.deserialize_type_proto_for_shape(inferred[value.name])


def infer_missing(model: ir.Model) -> None:
    """Sets types and shapes of values that rewrite rules or functions created without."""
    for node in model.graph.all_nodes():
        if any(value.name and value.dtype is None for value in node.outputs):
            infer_node(node, model.opset_imports)


class Emitter:
    """Collects nodes that replace another one, with unique names.

    Args:
        opset_imports: The model's opset imports.
        names: Names in use.
        prefix: Prefix of the names of new values.
    """

    def __init__(self, opset_imports: Mapping[str, int], names: Names, prefix: str) -> None:
        self._opset_imports, self._names, self._prefix = opset_imports, names, prefix
        self._tape = onnx_ir.tape.Tape()
        self._constants: dict[tuple[Any, ...], ir.Value] = {}

    @property
    def nodes(self) -> Sequence[ir.Node]:
        """The nodes so far."""
        return self._tape.nodes

    def inner(self) -> Emitter:
        """Returns an emitter for a graph within a node; its values have other names."""
        return Emitter(self._opset_imports, self._names, self._prefix)

    def name(self, hint: str) -> str:
        """Returns an unused name."""
        return self._names.unique(f"{self._prefix}.{hint}")

    def __call__(self, op_type: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any) -> ir.Value:
        """Adds a node and returns its output."""
        return self.several(op_type, *inputs, outputs=1, domain=domain, **attributes)[0]

    def several(
        self, op_type: str, *inputs: ir.Value | None, outputs: int, domain: str = "", **attributes: Any
    ) -> Sequence[ir.Value]:
        """Adds a node and returns its outputs."""
        values = [ir.Value(name=self.name(op_type)) for _ in range(outputs)]
        self._tape.op_multi_out(op_type, inputs, attributes, outputs=values, domain=domain, name=values[0].name)
        infer_node(self.nodes[-1], self._opset_imports)
        return values

    def constant(self, value: Any, dtype: Any = np.int64) -> ir.Value:
        """Adds a constant tensor, by default of int64; equal constants share one node."""
        array = np.asarray(value, dtype=dtype)
        key = (array.dtype, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self("Constant", value=ir.tensor(array))
        return self._constants[key]
