"""What passes over ONNX models share: unique names, new nodes with inferred types, and running in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.tape

__all__ = ["FINAL", "Emitter", "Names", "infer_missing", "infer_node", "run_passes"]


class Names:
    """Hands out unused names."""

    def __init__(self, taken: Iterable[str]) -> None:
        self._taken = set(taken)

    def unique(self, name: str) -> str:
        """Returns the name, with a number appended if it is taken."""
        candidate, number = name, 1
        while candidate in self._taken:
            candidate, number = f"{name}_{number}", number + 1
        self._taken.add(candidate)
        return candidate


FINAL = "ort_trainer.final"
"""Key in the ``meta`` of nodes that no rule may rewrite."""

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
        found = onnx.shape_inference.infer_node_outputs(
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
        if value.name in found:
            value.type = ir.serde.deserialize_type_proto_for_type(found[value.name])
            value.shape = ir.serde.deserialize_type_proto_for_shape(found[value.name])


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
        dtype: Element type of the constants from :meth:`scalar`.
    """

    def __init__(
        self, opset_imports: Mapping[str, int], names: Names, prefix: str, dtype: ir.DataType = ir.DataType.FLOAT
    ) -> None:
        self._opset_imports, self._names, self._prefix = opset_imports, names, prefix
        self._tape = onnx_ir.tape.Tape()
        self._constants: dict[tuple[Any, ...], ir.Value] = {}
        self.dtype = dtype

    @property
    def nodes(self) -> Sequence[ir.Node]:
        """The nodes so far."""
        return self._tape.nodes

    def name(self, hint: str) -> str:
        """Returns an unused name."""
        return self._names.unique(f"{self._prefix}.{hint}")

    def __call__(self, op_type: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any) -> ir.Value:
        """Adds a node and returns its output."""
        return self.several(op_type, *inputs, outputs=1, domain=domain, **attributes)[0]

    def final(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """Adds a node that no rule may rewrite, and returns its output."""
        value = self(op_type, *inputs, **attributes)
        self.nodes[-1].meta[FINAL] = True
        return value

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

    def scalar(self, value: float) -> ir.Value:
        """Adds a constant number of the element type."""
        return self.constant(value, self.dtype.numpy())

    def reduce_sum(self, value: ir.Value, axes: Iterable[int], keepdims: bool = True) -> ir.Value:
        """Adds a sum over axes."""
        return self("ReduceSum", value, self.constant(list(axes)), keepdims=int(keepdims))

    def reduce_mean(self, value: ir.Value, axes: Iterable[int], keepdims: bool = True) -> ir.Value:
        """Adds a mean over axes."""
        return self("ReduceMean", value, self.constant(list(axes)), keepdims=int(keepdims))

    def slice(self, value: ir.Value, start: int, end: int, axis: int) -> ir.Value:
        """Adds a slice along one axis."""
        return self("Slice", value, self.constant([start]), self.constant([end]), self.constant([axis]))


def run_passes(model: ir.Model, *passes: ir.passes.PassBase) -> ir.Model:
    """Runs passes over a model in order and returns the result.

    It raises errors of a pass without onnx_ir's wrapper, because callers check their type.
    """
    try:
        return ir.passes.Sequential(*passes)(model).model
    except ir.passes.PassError as error:
        raise error.__cause__ or error from None
