"""Describes an ONNX model from the bytes of its file, and reads only the parts it needs."""

from __future__ import annotations

import json
import math
import mmap
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from ..core.protobuf import ELEMENT_TYPES, Field, Malformed, content, decoded, fields, merged, text, varints
from ..step.contract import METADATA

# Field numbers of onnx.proto.
_MODEL_IR_VERSION, _MODEL_PRODUCER, _MODEL_GRAPH, _MODEL_OPSET, _MODEL_METADATA = 1, 2, 7, 8, 14
_GRAPH_NODE, _GRAPH_INITIALIZER, _GRAPH_INPUT, _GRAPH_OUTPUT = 1, 5, 11, 12
_NODE_TYPE, _NODE_DOMAIN = 4, 7
_TENSOR_DIMS, _TENSOR_TYPE, _TENSOR_NAME, _TENSOR_LOCATION = 1, 2, 8, 14
_INFO_NAME, _INFO_TYPE, _TYPE_TENSOR, _TENSOR_ELEMENT_TYPE, _TENSOR_SHAPE = 1, 2, 1, 1, 2
_SHAPE_DIM, _DIM_SIZE, _DIM_NAME = 1, 1, 2
_OPSET_DOMAIN, _OPSET_VERSION, _ENTRY_KEY, _ENTRY_VALUE = 1, 2, 1, 2
_EXTERNAL = 1

# Number of an element type -> its name and bytes per element. Strings differ in length.
_TYPES = {number: (name, np.dtype(name).itemsize) for number, name in ELEMENT_TYPES.items()}
_TYPES |= {8: ("string", 0), 16: ("bfloat16", 2)}


def describe_model(path: Path) -> dict[str, Any]:
    """Returns a description of a model in JSON values.

    Raises:
        ValueError: If the file is not an ONNX model.
    """
    with path.open("rb") as file:  # the map lives as long as any view of it
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    try:
        return _model(whole)
    except Malformed as error:
        raise ValueError(f"{str(path)!r} is damaged or not an ONNX model: {error}") from error


def _model(data: memoryview) -> dict[str, Any]:
    description: dict[str, Any] = {"ir_version": 0, "producer": "", "opsets": {}, "metadata": []}
    for part in fields(data):
        if part.number == _MODEL_IR_VERSION:
            description["ir_version"] = _number(part)
        elif part.number == _MODEL_PRODUCER:
            description["producer"] = decoded(content(part))
        elif part.number == _MODEL_OPSET:
            entry = content(part)
            description["opsets"][text(entry, _OPSET_DOMAIN) or "ai.onnx"] = _last_number(entry, _OPSET_VERSION)
        elif part.number == _MODEL_METADATA:
            key = text(content(part), _ENTRY_KEY)
            description["metadata"].append(key)
            if key == METADATA:
                description["artifact"] = _artifact(text(content(part), _ENTRY_VALUE))
    graph = merged(data, _MODEL_GRAPH)
    if graph is None:
        raise Malformed("it has no graph")
    return description | _graph(graph)


def _artifact(metadata: str) -> dict[str, Any]:
    """Returns the kind of an ort_trainer artifact, and the export it comes from."""
    try:
        artifact = json.loads(metadata)
        return {key: artifact.get(key) for key in ("kind", "export", "format")}
    except (ValueError, AttributeError, RecursionError) as error:
        raise Malformed(f"its metadata {METADATA!r} are not a JSON object ({error})") from error


def _graph(data: memoryview) -> dict[str, Any]:
    inputs, outputs, tensors = [], [], []
    operators: Counter[str] = Counter()
    for part in fields(data):
        if part.number == _GRAPH_NODE:
            node = content(part)
            domain, kind = text(node, _NODE_DOMAIN), text(node, _NODE_TYPE)
            operators[f"{domain}.{kind}" if domain not in ("", "ai.onnx") else kind] += 1
        elif part.number == _GRAPH_INITIALIZER:
            tensors.append(_tensor(content(part)))
        elif part.number == _GRAPH_INPUT:
            inputs.append(_value(content(part)))
        elif part.number == _GRAPH_OUTPUT:
            outputs.append(_value(content(part)))
    return {
        "inputs": inputs,
        "outputs": outputs,
        "nodes": sum(operators.values()),
        "operators": dict(sorted(operators.items(), key=lambda entry: (-entry[1], entry[0]))),
        "tensors": tensors,
    }


def _tensor(data: memoryview) -> dict[str, Any]:
    """Describes an initializer, without reading its values."""
    shape: list[int] = []
    kind, name, outside = 0, "", False
    for part in fields(data):
        if part.number == _TENSOR_DIMS:  # one per field, or packed into one field
            shape += [part.value] if isinstance(part.value, int) else varints(content(part))
        elif part.number == _TENSOR_TYPE:
            kind = _number(part)
        elif part.number == _TENSOR_NAME:
            name = decoded(content(part))
        elif part.number == _TENSOR_LOCATION:
            outside = _number(part) == _EXTERNAL
    dtype, size = _TYPES.get(kind, (f"type {kind}", 0))
    description = {"name": name, "dtype": dtype, "shape": shape, "bytes": math.prod(shape) * size}
    return description | ({"external": True} if outside else {})


def _value(data: memoryview) -> dict[str, Any]:
    """Describes an input or output; a size is a number, a name, or None if unknown."""
    kind: str | None = None
    shape: list[int | str | None] | None = None
    tensor = merged(merged(data, _INFO_TYPE) or memoryview(b""), _TYPE_TENSOR)
    if tensor is not None:
        kind = _TYPES.get(_last_number(tensor, _TENSOR_ELEMENT_TYPE), (None, 0))[0]
        sizes = merged(tensor, _TENSOR_SHAPE)
        if sizes is not None:
            shape = [_size(content(f)) for f in fields(sizes) if f.number == _SHAPE_DIM]
    return {"name": text(data, _INFO_NAME), "dtype": kind, "shape": shape}


def _size(data: memoryview) -> int | str | None:
    """Returns the size or the name of a dimension; None if it is unknown."""
    dimension = [f for f in fields(data) if f.number in (_DIM_SIZE, _DIM_NAME)][-1:]  # it has one of both
    if dimension and dimension[0].number == _DIM_SIZE:
        return _number(dimension[0])
    return text(data, _DIM_NAME) or None


def _last_number(data: memoryview, number: int) -> int:
    return ([0] + [_number(f) for f in fields(data) if f.number == number])[-1]


def _number(entry: Field) -> int:
    if not isinstance(entry.value, int):
        raise Malformed(f"field {entry.number} is not a number")
    return entry.value
