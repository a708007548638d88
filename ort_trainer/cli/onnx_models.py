"""Describes an ONNX model from the bytes of its file, and reads only the parts it needs."""

from __future__ import annotations

import json
import math
import mmap
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..core.protobuf import ELEMENT_TYPES, Malformed, content, decoded, fields, varints
from ..step.contract import METADATA

# What is read of onnx.proto: message -> number of a field -> its name, and its type: int, str or a message.
_MESSAGES: dict[str, dict[int, tuple[str, Any]]] = {
    "model": {
        1: ("ir_version", int),
        2: ("producer", str),
        7: ("graph", "graph"),
        8: ("opsets", "opset"),
        14: ("metadata", "entry"),
    },
    "opset": {1: ("domain", str), 2: ("version", int)},
    "entry": {1: ("key", str), 2: ("value", str)},
    "graph": {1: ("nodes", "node"), 5: ("tensors", "tensor"), 11: ("inputs", "value"), 12: ("outputs", "value")},
    "node": {4: ("operator", str), 7: ("domain", str)},
    "tensor": {1: ("dims", int), 2: ("type", int), 8: ("name", str), 14: ("location", int)},
    "value": {1: ("name", str), 2: ("type", "type")},
    "type": {1: ("tensor", "tensor type")},
    "tensor type": {1: ("type", int), 2: ("shape", "shape")},
    "shape": {1: ("dims", "dim")},
    "dim": {1: ("size", int), 2: ("name", str)},
}
# Messages that a file has once, if need be in several parts.
_SINGLE = ("graph", "type", "tensor type", "shape")
_EXTERNAL = 1

# Number of an element type -> its name and bytes per element. Strings differ in length.
_TYPES = {number: (name, np.dtype(name).itemsize) for number, name in ELEMENT_TYPES.items()}
_TYPES |= {8: ("string", 0), 16: ("bfloat16", 2)}

Message = defaultdict[str, list[Any]]


def describe_model(path: Path) -> dict[str, Any]:
    """Returns a description of a model in JSON values.

    Raises:
        ValueError: If the file is not an ONNX model.
    """
    with path.open("rb") as file:  # the map lives as long as any view of it
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    try:
        return _model(_read(whole, "model"))
    except Malformed as error:
        raise ValueError(f"{str(path)!r} is damaged or not an ONNX model: {error}") from error


def _read(data: memoryview, kind: str, message: Message | None = None) -> Message:
    """Returns the values of a message's fields, by name; of a message in several parts, those of all."""
    message = defaultdict(list) if message is None else message
    for part in fields(data):
        name, contents = _MESSAGES[kind].get(part.number, ("", None))
        if contents is int:  # one per field, or packed into one field
            message[name] += [part.value] if isinstance(part.value, int) else varints(content(part))
        elif contents in _SINGLE and message[name]:
            _read(content(part), contents, message[name][0])
        elif contents is not None:
            value = content(part)
            message[name].append(decoded(value) if contents is str else _read(value, contents))
    return message


def _last(message: Mapping[str, list[Any]], name: str, default: Any) -> Any:
    """Returns a field that a message has once: the last if there are several, as every reader does."""
    return message[name][-1] if message.get(name) else default


def _model(model: Message) -> dict[str, Any]:
    entries = {_last(entry, "key", ""): _last(entry, "value", "") for entry in model["metadata"]}
    description = {
        "ir_version": _last(model, "ir_version", 0),
        "producer": _last(model, "producer", ""),
        "opsets": {_last(opset, "domain", "") or "ai.onnx": _last(opset, "version", 0) for opset in model["opsets"]},
        "metadata": list(entries),
        **({"artifact": _artifact(entries[METADATA])} if METADATA in entries else {}),
    }
    if not model["graph"]:
        raise Malformed("it has no graph")
    graph = model["graph"][-1]
    operators = Counter(map(_operator, graph["nodes"]))
    return description | {
        "inputs": [_value(value) for value in graph["inputs"]],
        "outputs": [_value(value) for value in graph["outputs"]],
        "nodes": operators.total(),
        "operators": dict(sorted(operators.items(), key=lambda entry: (-entry[1], entry[0]))),
        "tensors": [_tensor(tensor) for tensor in graph["tensors"]],
    }


def _artifact(metadata: str) -> dict[str, Any]:
    """Returns the kind of an ort_trainer artifact, and the export it comes from."""
    try:
        artifact = json.loads(metadata)
        return {key: artifact.get(key) for key in ("kind", "export", "format")}
    except (ValueError, AttributeError, RecursionError) as error:
        raise Malformed(f"its metadata {METADATA!r} are not a JSON object ({error})") from error


def _operator(node: Message) -> str:
    domain, operator = _last(node, "domain", ""), _last(node, "operator", "")
    return operator if domain in ("", "ai.onnx") else f"{domain}.{operator}"


def _tensor(tensor: Message) -> dict[str, Any]:
    """Describes an initializer, whose values are not read."""
    kind, shape = _last(tensor, "type", 0), tensor["dims"]
    dtype, size = _TYPES.get(kind, (f"type {kind}", 0))
    description = {"name": _last(tensor, "name", ""), "dtype": dtype, "shape": shape, "bytes": math.prod(shape) * size}
    return description | ({"external": True} if _last(tensor, "location", 0) == _EXTERNAL else {})


def _value(value: Message) -> dict[str, Any]:
    """Describes an input or output; a size is a number, a name, or None if unknown."""
    tensor = _last(_last(value, "type", {}), "tensor", {})
    shape = _last(tensor, "shape", None)
    sizes = None if shape is None else [_last(dim, "size", _last(dim, "name", "") or None) for dim in shape["dims"]]
    return {"name": _last(value, "name", ""), "dtype": _TYPES.get(_last(tensor, "type", 0), (None,))[0], "shape": sizes}
