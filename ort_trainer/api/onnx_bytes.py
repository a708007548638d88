"""Makes an inference model from an evaluation model by editing the bytes of the file, because devices lack ``onnx``.

A protobuf message is a sequence of fields, each a number with a type and a value. Only a few fields of an ONNX model
are decoded here; all others are copied unchanged. Field numbers and types are those of ``onnx.proto``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core.errors import shown
from ..core.protobuf import (
    ELEMENT_TYPES,
    VARINT,
    Field,
    Malformed,
    content,
    decoded,
    delimited,
    field,
    fields,
    merged,
    tag,
    text,
    varint,
)
from ..core.unknown import nearest
from ..step.contract import METADATA

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

_NUMBERS = {name: number for number, name in ELEMENT_TYPES.items()}
_DAMAGED = "the evaluation model is damaged or not an ONNX model: "
_LARGEST = 2**31 - 1
"""The largest message that protobuf reads, in bytes."""


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

    nodes: list[_Node] = dataclasses.field(default_factory=list)
    initializers: dict[str, Field] = dataclasses.field(default_factory=dict)
    inputs: dict[str, Field] = dataclasses.field(default_factory=dict)
    outputs: dict[str, Field] = dataclasses.field(default_factory=dict)
    value_info: dict[str, Field] = dataclasses.field(default_factory=dict)
    rest: list[Field] = dataclasses.field(default_factory=list)

    def values(self) -> list[str]:
        """Returns the names of all values, excluding those inside bodies."""
        return list(dict.fromkeys([*self.inputs, *self.initializers, *(o for n in self.nodes for o in n.outputs)]))

    def needed_from_outside(self) -> set[str]:
        """Returns the names that a body captures from the graphs around it."""
        used = {name for node in self.nodes for name in node.inputs} | set(self.outputs)
        return used - set(self.values())


@dataclass
class _Node:
    """A node with its inputs, including values that bodies in its attributes capture, and its outputs."""

    field: Field
    inputs: set[str]
    outputs: list[str]


def inference_model(eval_model: bytes, state: Mapping[str, np.ndarray[Any, Any]], output_names: Sequence[str]) -> bytes:
    """Returns a model that computes some values of an evaluation model from the inputs that they need.

    Args:
        eval_model: The content of an ONNX file without external data.
        state: Graph input -> value: these inputs become initializers.
        output_names: The outputs of the new model, in order: any values of the graph.

    Returns:
        The content of an ONNX file, with the nodes, initializers and inputs that the outputs need, and without the
        metadata of an artifact.

    Raises:
        TypeError: If ``output_names`` is a str.
        ValueError: If a value or input is unknown, ``output_names`` is empty or has duplicates, a value has a dtype
            that ONNX lacks, the bytes are not an ONNX model, or the new model would exceed 2 GB.
    """
    try:
        model = list(fields(memoryview(eval_model)))
        graph = _read_graph(merged(memoryview(eval_model), _MODEL_GRAPH) or memoryview(b""))
    except Malformed as error:
        raise ValueError(f"{_DAMAGED}{error}") from error
    if not graph.outputs:
        raise ValueError(f"{_DAMAGED}it has no outputs")
    _check_names(graph, state, output_names)
    nodes, needed = _needed(graph, output_names)
    parts: list[bytes | memoryview] = [node.field.raw for node in nodes]
    parts += [f.raw for name, f in graph.initializers.items() if name in needed and name not in state]
    parts += [field(_GRAPH_INITIALIZER, _tensor(name, value)) for name, value in state.items() if name in needed]
    parts += [f.raw for name, f in graph.inputs.items() if name in needed and name not in state]
    parts += [field(_GRAPH_OUTPUT, _described(graph, name)) for name in output_names]
    inner_values = {name for node in nodes for name in node.outputs} - set(output_names)
    parts += [f.raw for name, f in graph.value_info.items() if name in inner_values]
    parts += [f.raw for f in graph.rest]
    others = [f for f in model if f.number not in (_MODEL_GRAPH, _MODEL_TRAINING) and not _is_artifact_metadata(f)]
    result = b"".join([*(f.raw for f in others), field(_MODEL_GRAPH, b"".join(parts))])
    if len(result) > _LARGEST:
        raise ValueError(
            f"the inference model would have {len(result)} bytes, but an ONNX file can have at most {_LARGEST}: choose "
            "outputs that need fewer parameters"
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
            close = nearest(str(name), values, 3)
            raise ValueError(
                f"the evaluation model has no value {shown(name)}"
                + (f" (did you mean {' or '.join(map(repr, close))}?)" if close else "")
                + f"; its outputs are {list(graph.outputs)}, and any of the {len(values)} values of its graph is "
                f"allowed: {shown(values)}"
            )


def _needed(graph: _Graph, output_names: Iterable[str]) -> tuple[list[_Node], set[str]]:
    """Returns the nodes that some values need, and the names of all values needed."""
    needed, nodes = set(output_names), []
    for node in reversed(graph.nodes):  # in topological order, so a node's inputs are computed before it
        if needed.intersection(node.outputs):
            nodes.append(node)
            needed |= node.inputs
    return nodes[::-1], needed


def _described(graph: _Graph, name: str) -> bytes:
    """Returns the ValueInfoProto of an output. If the graph has no type for it, ONNX Runtime infers it."""
    for described_values in (graph.outputs, graph.value_info, graph.inputs):
        if name in described_values:
            return bytes(content(described_values[name]))
    return field(_VALUE_INFO_NAME, name.encode())


def _is_artifact_metadata(entry: Field) -> bool:
    """Returns whether a field of the model is the description that makes it an artifact."""
    is_metadata = entry.number == _MODEL_METADATA and isinstance(entry.value, memoryview)
    return is_metadata and text(content(entry), _ENTRY_KEY) == METADATA


def _read_graph(data: memoryview | bytes) -> _Graph:
    graph = _Graph()
    named = {_GRAPH_INPUT: graph.inputs, _GRAPH_OUTPUT: graph.outputs, _GRAPH_VALUE_INFO: graph.value_info}
    for part in delimited(memoryview(data)):
        if part.number == _GRAPH_NODE:
            graph.nodes.append(_read_node(part))
        elif part.number == _GRAPH_INITIALIZER:
            graph.initializers[text(content(part), _TENSOR_NAME)] = part
        elif part.number == _GRAPH_SPARSE_INITIALIZER:
            for values in delimited(content(part)):
                if values.number == _SPARSE_TENSOR_VALUES:
                    graph.initializers[text(content(values), _TENSOR_NAME)] = part
        elif part.number in named:
            named[part.number][text(content(part), _VALUE_INFO_NAME)] = part
        elif part.number != _GRAPH_QUANTIZATION:  # annotations may refer to tensors that are left out
            graph.rest.append(part)
    return graph


def _read_node(node_field: Field) -> _Node:
    node = _Node(node_field, set(), [])
    for member in delimited(content(node_field)):
        if member.number == _NODE_INPUT:
            node.inputs.add(decoded(content(member)))
        elif member.number == _NODE_OUTPUT:
            node.outputs.append(decoded(content(member)))
        elif member.number == _NODE_ATTRIBUTE:
            for value in delimited(content(member)):
                if value.number in (_ATTRIBUTE_GRAPH, _ATTRIBUTE_GRAPHS):
                    node.inputs |= _read_graph(content(value)).needed_from_outside()
    node.inputs.discard("")  # an omitted optional input
    node.outputs = [name for name in node.outputs if name]
    return node


def _tensor(name: str, value: np.ndarray[Any, Any]) -> bytes:
    """Returns a TensorProto."""
    element = _NUMBERS.get(value.dtype.name)
    if element is None:
        raise ValueError(f"{name} has dtype {value.dtype}, but supported are only {', '.join(_NUMBERS)}")
    dims = b"".join(tag(_TENSOR_DIMS, VARINT) + varint(size) for size in value.shape)
    data = np.asarray(value, dtype=value.dtype.newbyteorder("<")).tobytes()
    kind = tag(_TENSOR_TYPE, VARINT) + varint(element)
    return dims + kind + field(_TENSOR_NAME, name.encode()) + field(_TENSOR_RAW_DATA, data)
