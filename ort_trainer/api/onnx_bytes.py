"""Makes an inference model of an evaluation model, in the bytes of the file: there is no ``onnx`` on the device.

A message of protobuf is a sequence of fields, each a number with a type and a value. What is looked into here are a few
fields of an ONNX model; all others are copied as they are. Field numbers and types are those of ``onnx.proto``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..errors import shown
from .artifact import METADATA

__all__ = ["inference_model"]

# Types of a field's value; the two others ended with protobuf's first version.
_VARINT, _EIGHT_BYTES, _BYTES, _FOUR_BYTES = 0, 1, 2, 5

# Field numbers.
_MODEL_GRAPH, _MODEL_METADATA, _MODEL_TRAINING = 7, 14, 20
_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_INPUT, _GRAPH_OUTPUT, _GRAPH_VALUE_INFO = 1, 5, 11, 12, 13
_GRAPH_QUANTIZATION, _GRAPH_SPARSE_INITIALIZER = 14, 15
_NODE_INPUT, _NODE_OUTPUT, _NODE_ATTRIBUTE = 1, 2, 5
_ATTRIBUTE_GRAPH, _ATTRIBUTE_GRAPHS = 6, 11
_VALUE_INFO_NAME = 1
_TENSOR_DIMS, _TENSOR_TYPE, _TENSOR_NAME, _TENSOR_RAW_DATA = 1, 2, 8, 9
_SPARSE_TENSOR_VALUES = 1
_ENTRY_KEY = 1

_ELEMENT_TYPES = {
    "float32": 1,
    "uint8": 2,
    "int8": 3,
    "uint16": 4,
    "int16": 5,
    "int32": 6,
    "int64": 7,
    "bool": 9,
    "float16": 10,
    "float64": 11,
    "uint32": 12,
    "uint64": 13,
}
_DAMAGED = "the evaluation model is damaged, or no ONNX model: "
_LARGEST = 2**31 - 1
"""Bytes of a message that protobuf reads."""


class _Field(NamedTuple):
    """A field: its number, its value (bytes, or a number), and the bytes of both."""

    number: int
    value: memoryview | int
    raw: memoryview


@dataclass
class _Graph:
    """A graph, or the body of an If, Loop or Scan.

    Attributes:
        nodes: In the order of computation.
        initializers: Name -> field.
        inputs: Name -> field.
        outputs: Name -> field.
        value_info: Name -> field.
        rest: All other fields.
    """

    nodes: list[_Node] = field(default_factory=list)
    initializers: dict[str, _Field] = field(default_factory=dict)
    inputs: dict[str, _Field] = field(default_factory=dict)
    outputs: dict[str, _Field] = field(default_factory=dict)
    value_info: dict[str, _Field] = field(default_factory=dict)
    rest: list[_Field] = field(default_factory=list)

    def values(self) -> list[str]:
        """Returns the names of all values, without those of bodies."""
        return list(dict.fromkeys([*self.inputs, *self.initializers, *(o for n in self.nodes for o in n.outputs)]))

    def needed_from_outside(self) -> set[str]:
        """Returns the names that a body takes from the graphs around it."""
        used = {name for node in self.nodes for name in node.inputs} | set(self.outputs)
        return used - set(self.values())


@dataclass
class _Node:
    """A node: what it reads, the values that bodies in its attributes take from here included, and what it makes."""

    field: _Field
    inputs: set[str]
    outputs: list[str]


def inference_model(eval_model: bytes, state: Mapping[str, np.ndarray[Any, Any]], output_names: Sequence[str]) -> bytes:
    """Returns a model that computes some values of an evaluation model from the inputs that they need.

    Args:
        eval_model: The content of an ONNX file without external data.
        state: Graph input -> value: these inputs become initializers.
        output_names: The outputs of the new model, in order: any values of the graph, outputs or not.

    Returns:
        The content of an ONNX file, with the nodes, initializers and inputs that the outputs need, and without the
        metadata of an artifact.

    Raises:
        TypeError: If ``output_names`` is a text.
        ValueError: If the graph has no such value or input, a name is given twice or none is given, a value has a type
            that ONNX does not have, the bytes are no ONNX model, or the new model is larger than 2 GB.
    """
    model = list(_fields(memoryview(eval_model)))
    graph = _read_graph(
        b"".join(f.value for f in model if f.number == _MODEL_GRAPH and isinstance(f.value, memoryview))
    )
    if not graph.outputs:
        raise ValueError(f"{_DAMAGED}it has no outputs")
    _check_names(graph, state, output_names)
    nodes, needed = _needed(graph, output_names)
    content: list[bytes | memoryview] = [node.field.raw for node in nodes]
    content += [f.raw for name, f in graph.initializers.items() if name in needed and name not in state]
    content += [_field(_GRAPH_INITIALIZER, _tensor(name, value)) for name, value in state.items() if name in needed]
    content += [f.raw for name, f in graph.inputs.items() if name in needed and name not in state]
    content += [_field(_GRAPH_OUTPUT, _described(graph, name)) for name in output_names]
    made = {name for node in nodes for name in node.outputs} - set(output_names)
    content += [f.raw for name, f in graph.value_info.items() if name in made]
    content += [f.raw for f in graph.rest]
    others = [f for f in model if f.number not in (_MODEL_GRAPH, _MODEL_TRAINING) and not _is_artifact_metadata(f)]
    result = b"".join([*(f.raw for f in others), _field(_MODEL_GRAPH, b"".join(content))])
    if len(result) > _LARGEST:
        raise ValueError(
            f"the inference model would have {len(result)} bytes, and an ONNX file can have {_LARGEST}: name outputs "
            "that need fewer parameters"
        )
    return result


def _check_names(graph: _Graph, state: Iterable[str], output_names: Sequence[str]) -> None:
    if isinstance(output_names, str):
        raise TypeError(f"the names of outputs must be a list of names, but {output_names!r} was given")
    if not output_names or len(set(output_names)) < len(output_names):
        raise ValueError(f"an inference model needs outputs, each once, but {shown(list(output_names))} was given")
    unknown = [name for name in state if name not in graph.inputs]
    if unknown:
        raise ValueError(f"the evaluation model has no inputs {shown(unknown)}; it has {shown(list(graph.inputs))}")
    values = graph.values()
    for name in output_names:
        if name not in values:
            close = difflib.get_close_matches(str(name), values)
            raise ValueError(
                f"the evaluation model has no value {shown(name)}"
                + (f" (did you mean {' or '.join(map(repr, close))}?)" if close else "")
                + f"; its outputs are {list(graph.outputs)}, and any of the {len(values)} values of its graph may be "
                f"named: {shown(values)}"
            )


def _needed(graph: _Graph, output_names: Iterable[str]) -> tuple[list[_Node], set[str]]:
    """Returns the nodes that some values need, and the names of all values that are needed."""
    needed, nodes = set(output_names), []
    for node in reversed(graph.nodes):  # what a node reads is made before it
        if needed.intersection(node.outputs):
            nodes.append(node)
            needed |= node.inputs
    return nodes[::-1], needed


def _described(graph: _Graph, name: str) -> bytes:
    """Returns the ValueInfoProto of an output; without a type, which can be inferred, where the graph says none."""
    for known in (graph.outputs, graph.value_info, graph.inputs):
        if name in known:
            return bytes(_content(known[name]))
    return _field(_VALUE_INFO_NAME, name.encode())


def _is_artifact_metadata(found: _Field) -> bool:
    return found.number == _MODEL_METADATA and _text(_content(found), _ENTRY_KEY) == METADATA


def _read_graph(data: memoryview | bytes) -> _Graph:
    graph = _Graph()
    named = {_GRAPH_INPUT: graph.inputs, _GRAPH_OUTPUT: graph.outputs, _GRAPH_VALUE_INFO: graph.value_info}
    for found in _fields(memoryview(data)):
        if found.number == _GRAPH_NODE:
            graph.nodes.append(_read_node(found))
        elif found.number == _GRAPH_INITIALIZER:
            graph.initializers[_text(_content(found), _TENSOR_NAME)] = found
        elif found.number == _GRAPH_SPARSE_INITIALIZER:
            for values in _fields(_content(found)):
                if values.number == _SPARSE_TENSOR_VALUES:
                    graph.initializers[_text(_content(values), _TENSOR_NAME)] = found
        elif found.number in named:
            named[found.number][_text(_content(found), _VALUE_INFO_NAME)] = found
        elif found.number != _GRAPH_QUANTIZATION:  # these name tensors that may be gone
            graph.rest.append(found)
    return graph


def _read_node(found: _Field) -> _Node:
    node = _Node(found, set(), [])
    for part in _fields(_content(found)):
        if part.number == _NODE_INPUT:
            node.inputs.add(_decoded(_content(part)))
        elif part.number == _NODE_OUTPUT:
            node.outputs.append(_decoded(_content(part)))
        elif part.number == _NODE_ATTRIBUTE:
            for value in _fields(_content(part)):
                if value.number in (_ATTRIBUTE_GRAPH, _ATTRIBUTE_GRAPHS):
                    node.inputs |= _read_graph(_content(value)).needed_from_outside()
    node.inputs.discard("")  # an optional input that is left out
    node.outputs = [name for name in node.outputs if name]
    return node


def _tensor(name: str, value: np.ndarray[Any, Any]) -> bytes:
    """Returns a TensorProto."""
    element = _ELEMENT_TYPES.get(value.dtype.name)
    if element is None:
        raise ValueError(f"{name} has the dtype {value.dtype}; an ONNX model can have {', '.join(_ELEMENT_TYPES)}")
    dims = b"".join(_tag(_TENSOR_DIMS, _VARINT) + _varint(size) for size in value.shape)
    data = np.asarray(value, dtype=value.dtype.newbyteorder("<")).tobytes()
    kind = _tag(_TENSOR_TYPE, _VARINT) + _varint(element)
    return dims + kind + _field(_TENSOR_NAME, name.encode()) + _field(_TENSOR_RAW_DATA, data)


def _fields(data: memoryview) -> Iterator[_Field]:
    """Yields the fields of a message.

    Raises:
        ValueError: If it is none.
    """
    position = 0
    while position < len(data):
        start = position
        tag, position = _read_varint(data, position)
        number, kind = tag >> 3, tag & 7
        value: memoryview | int
        if kind == _VARINT:
            value, position = _read_varint(data, position)
        else:
            size = {_EIGHT_BYTES: 8, _FOUR_BYTES: 4}.get(kind)
            if kind == _BYTES:
                size, position = _read_varint(data, position)
            if size is None or position + size > len(data):
                raise ValueError(f"{_DAMAGED}byte {start} begins no field")
            value = data[position : position + size]
            position += size
        yield _Field(number, value, data[start:position])


def _content(found: _Field) -> memoryview:
    """Returns the bytes of a field that has bytes by its number."""
    if isinstance(found.value, int):
        raise ValueError(f"{_DAMAGED}field {found.number} is a number")
    return found.value


def _text(data: memoryview, number: int) -> str:
    """Returns a field of a message that is a text; an empty one if there is none."""
    return next((_decoded(_content(f)) for f in _fields(data) if f.number == number), "")


def _decoded(data: memoryview) -> str:
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{_DAMAGED}a name is no text ({error})") from error


def _field(number: int, content: bytes) -> bytes:
    return _tag(number, _BYTES) + _varint(len(content)) + content


def _tag(number: int, kind: int) -> bytes:
    return _varint(number << 3 | kind)


def _varint(number: int) -> bytes:
    """Returns a number as protobuf writes it: seven bits a byte, the lowest first."""
    parts = bytearray()
    while number > 127:
        parts.append(number & 127 | 128)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _read_varint(data: memoryview, position: int) -> tuple[int, int]:
    """Returns the number at a position, and the position after it."""
    number = shift = 0
    while position < len(data) and shift < 70:
        byte = data[position]
        number |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return number, position
    raise ValueError(f"{_DAMAGED}it ends within a number")
