"""Writing nodes of an ONNX graph, and what is known of its values."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx import TensorProto, helper, numpy_helper

from ...errors import ExportError
from ...graph import Dim
from ...graph.dims import symbols_of
from ...graph.names import Names

__all__ = [
    "Emitter",
    "SizeNeededError",
    "Values",
    "attributes_of",
    "constant_of",
    "dims",
    "named_symbols",
    "names_in",
    "names_inside",
    "refuse",
    "replace_all",
    "torch_type",
]

Shape = tuple[int | str | None, ...]
_FLOATS = {TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE}


class SizeNeededError(Exception):
    """A rewrite needs a size as a number that the graph leaves open.

    Attributes:
        symbol: The size's name, where it has one.
    """

    def __init__(self, message: str, symbol: str | None = None) -> None:
        super().__init__(message)
        self.symbol = symbol


def torch_type(elem_type: int) -> torch.dtype:
    """Returns PyTorch's name of an ONNX element type."""
    if elem_type == TensorProto.BFLOAT16:
        return torch.bfloat16
    return torch.from_numpy(np.zeros(0, ir.DataType(elem_type).numpy())).dtype


def attributes_of(node: onnx.NodeProto) -> dict[str, Any]:
    """Returns the attributes of a node as Python values; strings as str."""
    found = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    return {
        name: value.decode()
        if isinstance(value, bytes)
        else [entry.decode() if isinstance(entry, bytes) else entry for entry in value]
        if isinstance(value, (list, tuple))
        else value
        for name, value in found.items()
    }


def names_in(graph: onnx.GraphProto) -> set[str]:
    """Returns all names of values of a graph, those of its subgraphs included."""
    names = {value.name for value in (*graph.input, *graph.output, *graph.initializer)}
    for node in graph.node:
        names.update(node.input, node.output, names_inside(node))
    return names


def names_inside(node: onnx.NodeProto) -> set[str]:
    """Returns all names of values of the subgraphs of a node."""
    graphs = (graph for attribute in node.attribute for graph in (attribute.g, *attribute.graphs))
    return {name for graph in graphs for name in names_in(graph)}


def replace_all(field: Any, values: Sequence[Any]) -> None:
    """Replaces the content of a repeated protobuf field, also by values that are in it.

    They are copied first, as deleting them from the field lets go of their memory.
    """
    copies = [type(value).FromString(value.SerializeToString()) for value in values]
    del field[:]
    field.extend(copies)


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


class Values:
    """Types and shapes of the values of a model, as far as shape inference finds them."""

    def __init__(self, model: onnx.ModelProto) -> None:
        graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
        self._types: dict[str, int] = {}
        self._shapes: dict[str, Shape | None] = {}
        self._others: set[str] = set()
        for value in (*graph.input, *graph.output, *graph.value_info):
            tensor = value.type.tensor_type
            if value.type.WhichOneof("value") not in (None, "tensor_type"):
                self._others.add(value.name)
            self._types[value.name] = tensor.elem_type
            self._shapes[value.name] = (
                tuple(
                    size.dim_value if size.HasField("dim_value") else (size.dim_param or None)
                    for size in tensor.shape.dim
                )
                if tensor.HasField("shape")
                else None
            )
        self.constants: dict[str, np.ndarray[Any, Any]] = {}
        for initializer in graph.initializer:
            self._types[initializer.name] = initializer.data_type
            self._shapes[initializer.name] = tuple(initializer.dims)
            if initializer.data_location != TensorProto.EXTERNAL:
                self.constants[initializer.name] = numpy_helper.to_array(initializer)
        for node in graph.node:
            if node.op_type == "Constant":
                (value,) = attributes_of(node).values()
                array = numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)
                self.constants[node.output[0]] = array

    def is_float(self, name: str) -> bool:
        """Returns whether a value is of floating point; where nothing is known, it is taken to be."""
        return self.type(name) in _FLOATS

    def is_tensor(self, name: str) -> bool:
        """Returns whether a value is a tensor, and not a sequence or an optional value."""
        return name not in self._others

    def type(self, name: str) -> int:
        """Returns the ONNX element type of a value; float where nothing is known."""
        return self.known_type(name) or TensorProto.FLOAT

    def known_type(self, name: str) -> int:
        """Returns the ONNX element type of a value; 0 where nothing is known."""
        return self._types.get(name, TensorProto.UNDEFINED)

    def shape(self, name: str) -> Shape | None:
        """Returns the sizes of a value (str for a symbol, None for an unknown one), or None if not even the rank is
        known."""
        return self._shapes.get(name)

    def rank(self, name: str) -> int:
        """Returns the number of dimensions of a value."""
        shape = self.shape(name)
        if shape is None:
            raise SizeNeededError(f"the rank of {name!r} is not known")
        return len(shape)

    def size(self, name: str, axis: int) -> int:
        """Returns a size as a number."""
        shape = self.shape(name)
        size = None if shape is None else shape[axis]
        if not isinstance(size, int):
            raise SizeNeededError(f"size {axis} of {name!r} is not known: {size!r}", size)
        return size


@dataclass
class Emitter:
    """Collects new nodes, and gives their outputs names that are not taken.

    Attributes:
        names: Names in use.
        nodes: The nodes so far.
        type: ONNX element type of the constants that :meth:`scalar` makes.
    """

    names: Names
    nodes: list[onnx.NodeProto]
    prefix: str = "lowered"
    type: int = TensorProto.FLOAT

    def name(self, hint: str) -> str:
        """Returns a name that is not taken yet."""
        return self.names.unique(f"{self.prefix}.{hint}")

    def __call__(self, op_type: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        """Adds a node and returns the name of its output, or a list of them if ``outputs`` is above 1."""
        names = [self.name(op_type) for _ in range(outputs)]
        self.nodes.append(helper.make_node(op_type, inputs, names, name=names[0], domain=domain, **attributes))
        return names[0] if outputs == 1 else names

    def constant(self, value: Any, dtype: Any = np.int64) -> str:
        """Adds a constant tensor, of int64 if nothing else is asked for."""
        tensor = numpy_helper.from_array(np.asarray(value, dtype=dtype))
        return str(self("Constant", value=tensor))

    def scalar(self, value: float) -> str:
        """Adds a constant number of the element type."""
        return self.constant(value, helper.tensor_dtype_to_np_dtype(self.type))

    def assign(self, name: str, value: str) -> None:
        """Gives a value another name, such as the one that a replaced node had for it."""
        if name:
            self.nodes.append(helper.make_node("Identity", [value], [name], name=self.name("Identity")))

    def reduce_sum(self, value: str, axes: Iterable[int], keepdims: bool = True) -> str:
        """Adds a sum over axes."""
        return str(self("ReduceSum", value, self.constant(list(axes)), keepdims=int(keepdims)))

    def reduce_mean(self, value: str, axes: Iterable[int], keepdims: bool = True) -> str:
        """Adds a mean over axes."""
        return str(self("ReduceMean", value, self.constant(list(axes)), keepdims=int(keepdims)))

    def slice(self, value: str, start: int, end: int, axis: int) -> str:
        """Adds a slice along one axis."""
        return str(self("Slice", value, self.constant([start]), self.constant([end]), self.constant([axis])))


def refuse(node: onnx.NodeProto, what: str) -> ExportError:
    """Returns the error for a node that can't be rewritten."""
    return ExportError(f"{node.op_type} (node {node.name!r}, output {node.output[0]!r}): {what}")


def constant_of(node: onnx.NodeProto, index: int, values: Values, default: Any = None) -> Any:
    """Returns the constant that an input is; the default if the input was left out.

    Raises:
        ExportError: If the input is computed.
    """
    if index >= len(node.input) or not node.input[index]:
        return default
    found: Mapping[str, Any] = values.constants
    if node.input[index] not in found:
        raise refuse(node, f"input {node.input[index]!r} must be a constant")
    return found[node.input[index]]
