"""Writing nodes of an ONNX graph, and what is known of its values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.tape

from ...errors import ExportError
from ...graph import Dim
from ...graph.dims import symbols_of
from ...graph.names import Names

__all__ = [
    "FINAL",
    "Emitter",
    "SizeNeededError",
    "attributes_of",
    "constant_of",
    "dims",
    "dtype_of",
    "infer_node",
    "input_of",
    "named_symbols",
    "operand",
    "rank_of",
    "refuse",
    "shape_of",
    "size_of",
]

FINAL = "ort_trainer.final"
"""Key in the ``meta`` of a node that no rule is to rewrite again."""

Shape = tuple[int | str | None, ...]
# What is larger is no shape, and shape inference asks for no other constants.
_LARGEST_SHAPE = 64


class SizeNeededError(Exception):
    """A rewrite needs a size as a number that the graph leaves open.

    Attributes:
        symbol: The size's name, where it has one.
    """

    def __init__(self, message: str, symbol: str | None = None) -> None:
        super().__init__(message)
        self.symbol = symbol


def attributes_of(node: ir.Node) -> dict[str, Any]:
    """Returns the attributes of a node as Python values; those of several numbers as lists."""
    values = {name: attribute.value for name, attribute in node.attributes.items()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def dims(shape: Sequence[int | str | None] | None, symbols: Collection[str]) -> tuple[Dim, ...] | None:
    """Returns a shape as a training graph has it, or None if it has more than numbers and these symbols.

    Besides symbols a shape may have expressions over them, as a training graph has them.
    """
    if shape is None:
        return None
    found = [size if isinstance(size, int) else _dim(size, symbols) for size in shape]
    return tuple(size for size in found if size is not None) if None not in found else None


def _dim(size: str | None, symbols: Collection[str]) -> str | None:
    if size in symbols:
        return f"dim({size!r})"
    return size if size and named_symbols(size) and named_symbols(size) <= set(symbols) else None


def named_symbols(size: str) -> set[str]:
    """Returns the symbols in an expression of a training graph; none for a plain name."""
    return symbols_of(size) if "dim(" in size else set()


def dtype_of(value: ir.Value) -> ir.DataType:
    """Returns the element type of a value; float where nothing is known."""
    return ir.DataType.FLOAT if value.dtype in (None, ir.DataType.UNDEFINED) else value.dtype


def shape_of(value: ir.Value) -> Shape | None:
    """Returns the sizes of a value: str for a symbol, None for an unknown one; None if not even the rank is known."""
    return None if value.shape is None else tuple(size if isinstance(size, int) else size.value for size in value.shape)


def rank_of(value: ir.Value) -> int:
    """Returns the number of dimensions of a value."""
    if value.shape is None:
        raise SizeNeededError(f"the rank of {value.name!r} is not known")
    return len(value.shape)


def size_of(value: ir.Value, axis: int) -> int:
    """Returns a size as a number."""
    shape = shape_of(value)
    size = None if shape is None else shape[axis]
    if not isinstance(size, int):
        raise SizeNeededError(f"size {axis} of {value.name!r} is not known: {size!r}", size)
    return size


def operand(node: ir.Node, index: int = 0) -> ir.Value:
    """Returns an input of a node that its operator asks for."""
    value = node.inputs[index]
    assert value is not None
    return value


def input_of(node: ir.Node, index: int) -> ir.Value | None:
    """Returns an input of a node, or None if it was left out."""
    return node.inputs[index] if index < len(node.inputs) else None


def constant_of(node: ir.Node, index: int, default: Any = None) -> Any:
    """Returns the constant that an input is; the default if the input was left out.

    Raises:
        ExportError: If the input is computed.
    """
    value = input_of(node, index)
    if value is None:
        return default
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None:
        raise refuse(node, f"input {value.name!r} must be a constant")
    return tensor.numpy()


def refuse(node: ir.Node, what: str) -> ExportError:
    """Returns the error for a node that can't be rewritten."""
    return ExportError(f"{node.op_type} (node {node.name!r}, output {node.outputs[0].name!r}): {what}")


def infer_node(node: ir.Node, opset_imports: Mapping[str, int]) -> None:
    """Gives the outputs of a node types and shapes, as far as ONNX can tell them from its inputs."""
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
    except (KeyError, onnx.defs.SchemaError, onnx.shape_inference.InferenceError):
        return  # an operator that is not ONNX's, or inputs of which not enough is known
    for value in node.outputs:
        if value.name in found:
            value.type = ir.serde.deserialize_type_proto_for_type(found[value.name])
            value.shape = ir.serde.deserialize_type_proto_for_shape(found[value.name])


class Emitter:
    """Collects the nodes that take the place of another one, with names that are not taken.

    Args:
        opset_imports: Those of the model.
        names: Names in use.
        prefix: What names of new values begin with.
        dtype: Element type of the constants that :meth:`scalar` makes.
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
        """Returns a name that is not taken yet."""
        return self._names.unique(f"{self._prefix}.{hint}")

    def __call__(self, op_type: str, *inputs: ir.Value | None, domain: str = "", **attributes: Any) -> ir.Value:
        """Adds a node and returns its output."""
        return self.several(op_type, *inputs, outputs=1, domain=domain, **attributes)[0]

    def final(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """Adds a node that is not rewritten any more, and returns its output."""
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
        """Adds a constant tensor, of int64 if nothing else is asked for; equal ones are one."""
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
