"""Reads the attributes, constants, shapes and dtypes of nodes and values."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

import onnx_ir as ir

from ...core.dims import symbols_of
from ...core.errors import ExportError
from ...step import Dim

__all__ = [
    "SizeNeededError",
    "attributes_of",
    "constant_of",
    "dims",
    "dtype_of",
    "input_of",
    "named_symbols",
    "operand",
    "rank_of",
    "refuse",
    "shape_of",
    "size_of",
    "with_sizes",
]

Shape = tuple[int | str | None, ...]
Size = TypeVar("Size", int | str, int | str | None)


class SizeNeededError(Exception):
    """A rewrite needs the number of a size that is unknown in the graph.

    Attributes:
        symbol: Name of the size, or None.
    """

    def __init__(self, message: str, symbol: str | None = None) -> None:
        super().__init__(message)
        self.symbol = symbol


def attributes_of(node: ir.Node) -> dict[str, Any]:
    """Returns the attributes of a node as Python values, sequences as lists."""
    values = {name: attribute.value for name, attribute in node.attributes.items()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def dims(shape: Sequence[int | str | None] | None, symbols: Collection[str]) -> tuple[Dim, ...] | None:
    """Returns a shape in the form of a training graph; None unless it has only numbers, symbols and expressions.

    Args:
        shape: Numbers, symbols, and expressions over symbols in the form of a training graph.
        symbols: The known symbols.
    """
    if shape is None:
        return None
    found = [size if isinstance(size, int) else _dim(size, symbols) for size in shape]
    return tuple(size for size in found if size is not None) if None not in found else None


def _dim(size: str | None, symbols: Collection[str]) -> str | None:
    if size in symbols:
        return f"dim({size!r})"
    return size if size and named_symbols(size) and named_symbols(size) <= set(symbols) else None


def with_sizes(shape: Sequence[Size], fixed: Mapping[str, int]) -> tuple[Size, ...]:
    """Returns a shape with numbers in place of symbols of fixed size."""
    return tuple(fixed.get(size, size) if isinstance(size, str) else size for size in shape)  # type: ignore[misc]


def named_symbols(size: str) -> set[str]:
    """Returns the symbols in an expression of a training graph; none for a plain name."""
    return symbols_of(size) if "dim(" in size else set()


def dtype_of(value: ir.Value) -> ir.DataType:
    """Returns the element type of a value; float if unknown."""
    return ir.DataType.FLOAT if value.dtype in (None, ir.DataType.UNDEFINED) else value.dtype


def shape_of(value: ir.Value) -> Shape | None:
    """Returns the sizes of a value: a str for a symbol, None if unknown. Returns None if even the rank is unknown."""
    return None if value.shape is None else tuple(size if isinstance(size, int) else size.value for size in value.shape)


def rank_of(value: ir.Value) -> int:
    """Returns the number of dimensions of a value."""
    if value.shape is None:
        raise SizeNeededError(f"the rank of {value.name!r} is unknown")
    return len(value.shape)


def size_of(value: ir.Value, axis: int) -> int:
    """Returns a size as a number."""
    shape = shape_of(value)
    size = None if shape is None else shape[axis]
    if not isinstance(size, int):
        raise SizeNeededError(f"size {axis} of {value.name!r} is unknown: {size!r}", size)
    return size


def operand(node: ir.Node, index: int = 0) -> ir.Value:
    """Returns a required input of a node."""
    value = node.inputs[index]
    assert value is not None
    return value


def input_of(node: ir.Node, index: int) -> ir.Value | None:
    """Returns an input of a node, or None if it is omitted."""
    return node.inputs[index] if index < len(node.inputs) else None


def constant_of(node: ir.Node, index: int, default: Any = None) -> Any:
    """Returns the value of a constant input; the default if the input is omitted.

    Raises:
        ExportError: If the input is not a constant.
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
