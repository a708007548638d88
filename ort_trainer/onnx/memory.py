"""The memory of a model's tensors: never more than its files hold, and shared by tensors that share it in a file."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ..core.errors import ExportError, shown

# NumPy's and PyTorch's limit on dimensions.
_MOST_DIMENSIONS = 64
# Functions may call each other, so the inlined graph of a small file can be exponentially large.
_MOST_NODES = 200_000
_DEEPEST_CALLS = 100
# Shape inference needs the values of small tensors only, such as the shape of a Reshape.
_SMALL = 1024

Array = np.ndarray[Any, Any]
Range = tuple[str, int, int]
"""A file, and the offsets in bytes where a tensor begins and ends."""


class LoadedTensors:
    """Copies the tensors of a model into this process's memory, so that neither the message nor the files are needed.

    External data is read once: tensors with the same place in a file share memory.

    Args:
        model: The model.
        folder: The folder of its external data.

    Raises:
        FileNotFoundError, ExportError: If external data is missing or too short, or tensors overlap.
    """

    def __init__(self, model: ir.Model, folder: Path | None) -> None:
        self._folder = folder or Path()
        self._messages: dict[int, tuple[object, Array]] = {}
        self._read: dict[Range, Array] = {}
        ranges: dict[Range, str | None] = {}

        def record_range(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
            if any(size < 0 for size in tensor.shape.numpy()):
                raise ExportError(
                    f"the data of {shown(tensor.name)} can't be read: it has the shape {tensor.shape}, and no size may "
                    "be negative: the model is damaged"
                )
            if len(tensor.shape) > _MOST_DIMENSIONS:
                raise ExportError(
                    f"{shown(tensor.name)} has {len(tensor.shape)} dimensions, and at most {_MOST_DIMENSIONS} are "
                    "possible: the model is damaged"
                )
            if isinstance(tensor, ir.ExternalTensor) and tensor.nbytes:
                ranges.setdefault(self._range(tensor), tensor.name)
            return tensor

        replace_tensors(model, record_range)
        for (first, name), (second, other) in itertools.pairwise(sorted(ranges.items(), key=lambda item: item[0])):
            if first[0] == second[0] and second[1] < first[2]:
                raise ExportError(
                    f"the external data of {shown(name)} and {shown(other)} overlap in {shown(first[0])}: tensors may "
                    "share all of their bytes, but no part of them. Save the model again"
                )

    def adopt(self, model: ir.Model) -> None:
        """Moves the tensors of the model, or of a copy of it, into this memory."""
        replace_tensors(model, self._moved)

    def _moved(self, tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        """Returns a tensor of the message or of a file as one in this memory, with the same name and metadata."""
        if not isinstance(tensor, (ir.ExternalTensor, ir.serde.TensorProtoTensor)):
            return tensor
        external = isinstance(tensor, ir.ExternalTensor)
        try:
            data = self._external(tensor) if isinstance(tensor, ir.ExternalTensor) else self._message(tensor)
            labels = {"name": tensor.name, "doc_string": tensor.doc_string, "metadata_props": tensor.metadata_props}
            if tensor.dtype.bitwidth < 8:
                return ir.PackedTensor(data, tensor.dtype, shape=tensor.shape, **labels)  # type: ignore[arg-type]
            values = data.view(tensor.dtype.numpy()).reshape(tensor.shape.numpy())
            return ir.Tensor(values, tensor.dtype, **labels)  # type: ignore[arg-type]
        except (OSError, TypeError, ValueError) as error:
            raise ExportError(
                f"the {'external ' if external else ''}data of {shown(tensor.name)} can't be read: {error}"
            ) from error

    def _range(self, tensor: ir.ExternalTensor) -> Range:
        begin = tensor.offset or 0
        return os.path.realpath(self._folder / tensor.location), begin, begin + tensor.nbytes

    def _external(self, tensor: ir.ExternalTensor) -> Array:
        """Returns the bytes of a tensor in a file."""
        place = path, begin, end = self._range(tensor)
        if place not in self._read:
            with Path(path).open("rb") as file:
                status = os.fstat(file.fileno())
                # A hard link may be a file of another folder, and unlike a symbolic link its path doesn't show it.
                if status.st_nlink > 1:
                    raise ValueError(f"{path!r} has several hard links, so it could be a file of another folder")
                if begin < 0 or end > status.st_size:
                    raise ValueError(f"it ends at byte {end}, but {path!r} has {status.st_size}")
                if tensor.length and tensor.length < end - begin:
                    raise ValueError(f"it has {tensor.length} bytes, but needs {end - begin}")
                data = _blank(end - begin)
                file.seek(begin)
                if file.readinto(data.data) != len(data):
                    raise ValueError(f"{path!r} became shorter while it was read")
            self._read[place] = data
        return self._read[place]

    def _message(self, tensor: ir.serde.TensorProtoTensor) -> Array:
        """Returns the bytes of a tensor in the model's message."""
        message = tensor.raw
        if id(message) not in self._messages:
            message_bytes = np.frombuffer(tensor.tobytes(), np.uint8)
            if len(message_bytes) != tensor.nbytes:
                raise ValueError(f"it has {len(message_bytes)} bytes, but needs {tensor.nbytes}")
            data = _blank(len(message_bytes))
            data[:] = message_bytes
            self._messages[id(message)] = message, data  # keeping the message alive keeps its id unique
        return self._messages[id(message)][1]


def _blank(size: int) -> Array:
    """Returns uninitialized bytes, aligned as PyTorch's tensors are."""
    return torch.empty(size, dtype=torch.uint8).numpy()  # type: ignore[no-any-return]


def replace_tensors(model: ir.Model, replace: Callable[[ir.TensorProtocol], ir.TensorProtocol]) -> None:
    """Replaces all tensors of a model: initializers, attributes, and those in functions."""
    for graph in (*model.graphs(), *(graph for function in model.functions.values() for graph in function.subgraphs())):
        for value in graph.initializers.values():
            if value.const_value is not None:
                value.const_value = replace(value.const_value)
    for attributes in _attributes(model):
        for name, attribute in attributes.items():
            if attribute.value is None or attribute.is_ref():
                continue
            if attribute.type == ir.AttributeType.TENSOR:
                attributes[name] = ir.AttrTensor(name, replace(attribute.value), attribute.doc_string)
            elif attribute.type == ir.AttributeType.TENSORS:
                attributes[name] = ir.AttrTensors(name, [*map(replace, attribute.value)], attribute.doc_string)


def _attributes(model: ir.Model) -> Iterator[Any]:
    """Yields the attributes of every node and function, as mutable mappings."""
    for function in model.functions.values():
        yield function.attributes
    parts: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for part in parts:
        for node in part.all_nodes():
            yield node.attributes


def without_data(model: ir.Model) -> ir.Model:
    """Returns a copy of a model whose larger tensors have types and shapes but no data, as shape inference needs."""

    def described(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        if tensor.size <= _SMALL:
            return tensor
        return ir.ExternalTensor(
            "-", None, None, tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=tensor.name or ""
        )

    copy = model.clone()
    replace_tensors(copy, described)
    return copy


def check_calls(model: ir.Model) -> None:
    """Checks how many nodes a model has once its functions are inlined.

    Raises:
        ExportError: If there are too many, or a function calls itself.
    """
    sizes: dict[Any, int] = {}

    def size(part: ir.Graph | ir.Function, depth: int) -> int:
        if depth > _DEEPEST_CALLS:
            raise ExportError(
                f"the functions of the ONNX model call each other more than {_DEEPEST_CALLS} deep, or in a circle: "
                "inline them"
            )
        total = 0
        for node in part.all_nodes():
            key = node.op_identifier()
            if key in model.functions and key not in sizes:
                sizes[key] = size(model.functions[key], depth + 1)
            total += sizes.get(key, 1)
        return total

    total = size(model.graph, 0)
    if total > _MOST_NODES:
        raise ExportError(
            f"the ONNX model has {total} nodes once its functions are inlined, and at most {_MOST_NODES} are possible: "
            "export it with fewer"
        )
