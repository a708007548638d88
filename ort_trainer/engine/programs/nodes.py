"""Reads the nodes and constants of an ONNX model whose nodes are programs, without ONNX, whose import takes a while."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from ...core.protobuf import Field, Malformed, content, decoded, fields, text, varints
from .compiler import Call
from .program import Program

__all__ = ["DOMAIN", "OPERATOR", "read_nodes"]

DOMAIN, OPERATOR = "org.pytorch.aten", "ATen"
"""Of the nodes; their attribute ``operator`` is the key of a program."""

# Numbers of fields in onnx.proto.
_MODEL_GRAPH, _GRAPH_NODE, _GRAPH_INITIALIZER = 7, 1, 5
_NODE_INPUT, _NODE_OUTPUT, _NODE_NAME, _NODE_OPERATOR, _NODE_ATTRIBUTE, _NODE_DOMAIN = 1, 2, 3, 4, 5, 7
_ATTRIBUTE_NAME, _ATTRIBUTE_STRING = 1, 4
_TENSOR_DIMS, _TENSOR_TYPE, _TENSOR_NAME, _TENSOR_RAW_DATA = 1, 2, 8, 9
# ONNX's numbers of element types.
_TYPES = {
    1: torch.float32,
    2: torch.uint8,
    3: torch.int8,
    5: torch.int16,
    6: torch.int32,
    7: torch.int64,
    9: torch.bool,
    10: torch.float16,
    11: torch.float64,
    16: torch.bfloat16,
}


def read_nodes(model: bytes, programs: Mapping[str, str]) -> tuple[list[Call], dict[str, torch.Tensor]]:
    """Returns the nodes of a model, in order, and its constants by name.

    Args:
        model: The bytes of the ONNX model.
        programs: Key of a program -> its text.

    Raises:
        ValueError: If the bytes are not such a model.
    """
    parsed = {key: Program.from_text(program) for key, program in programs.items()}
    calls: list[Call] = []
    constants: dict[str, torch.Tensor] = {}
    for graph in (content(part) for part in fields(memoryview(model)) if part.number == _MODEL_GRAPH):
        for part in fields(graph):
            if part.number == _GRAPH_NODE:
                calls.append(_call(content(part), parsed))
            elif part.number == _GRAPH_INITIALIZER:
                constants[text(content(part), _TENSOR_NAME)] = _tensor(content(part))
    return calls, constants


def _call(node: memoryview, programs: Mapping[str, Program]) -> Call:
    name, operator = text(node, _NODE_NAME), f"{text(node, _NODE_DOMAIN)}::{text(node, _NODE_OPERATOR)}"
    attributes = (content(part) for part in fields(node) if part.number == _NODE_ATTRIBUTE)
    said = {text(part, _ATTRIBUTE_NAME): text(part, _ATTRIBUTE_STRING) for part in attributes}
    program = programs.get(said.get("operator", ""))
    if operator != f"{DOMAIN}::{OPERATOR}" or program is None:
        raise ValueError(f"node {name!r}, operator {operator}, is not a program of PyTorch's operators")
    return Call(name, program, _names(node, _NODE_INPUT), _names(node, _NODE_OUTPUT))


def _names(node: memoryview, number: int) -> list[str]:
    return [decoded(content(part)) for part in fields(node) if part.number == number]


def _tensor(data: memoryview) -> torch.Tensor:
    parts = list(fields(data))
    shape = [size for part in parts if part.number == _TENSOR_DIMS for size in _numbers(part)]
    (kind,) = (part.value for part in parts if part.number == _TENSOR_TYPE)
    raw = b"".join(content(part) for part in parts if part.number == _TENSOR_RAW_DATA)
    dtype = _TYPES.get(kind) if isinstance(kind, int) else None
    if dtype is None:
        raise Malformed(f"constant {text(data, _TENSOR_NAME)!r} has the unknown element type {kind}")
    if math.prod(shape) * dtype.itemsize != len(raw):
        raise Malformed(f"constant {text(data, _TENSOR_NAME)!r} has {len(raw)} bytes, but the shape {shape} of {dtype}")
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape) if raw else torch.empty(shape, dtype=dtype)


def _numbers(part: Field) -> Iterator[int]:
    if isinstance(part.value, int):
        yield part.value
    else:  # packed
        yield from varints(part.value)
