"""Reads the checkpoint files of onnxruntime-training's training API, which are flatbuffers.

The layout is that of ``ort_training_checkpoint.fbs`` in ONNX Runtime 1.17 to 1.19, version 2 of the format. Tensors of
a large checkpoint are in a second file, ``<path>.data``, as raw bytes one after the other.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.errors import CheckpointError, check_file
from ..core.foreign import is_upstream_checkpoint
from ..core.protobuf import ELEMENT_TYPES
from .flatbuffer import Table

Array = npt.NDArray[Any]
PropertyValue = int | float | str

VERSION = 2

DTYPES = {number: np.dtype(name) for number, name in ELEMENT_TYPES.items()}

UNLOADABLE = np.dtype(np.float16)
"""The runtime can't load a file with a tensor of this type."""
# NumPy's limit on dimensions.
_MOST_DIMENSIONS = 64
# A builder may write a name once and share it between a parameter and its moments.
_TEXT_SHARING = 4


@dataclass
class UpstreamParameter:
    """A parameter.

    Attributes:
        data: Its value; an empty array in a nominal checkpoint.
        requires_grad: Whether it is trained.
    """

    data: Array
    requires_grad: bool = True


@dataclass
class OptimizerGroup:
    """The state of an optimizer for a group of parameters.

    Attributes:
        step: Number of updates done.
        initial_lr: The optimizer's initial learning rate.
        moments: Parameter name -> name of a moment, ``momentum0`` or ``momentum1`` -> its value.
    """

    step: int = 0
    initial_lr: float = 0.001
    moments: dict[str, dict[str, Array]] = field(default_factory=dict)


@dataclass
class UpstreamCheckpoint:
    """The contents of a checkpoint file of onnxruntime-training's training API.

    Attributes:
        parameters: The parameters by name.
        properties: The user's own values: ints of 64 bits, floats of 32 bits and strings.
        groups: The state of the optimizer by group; upstream has only ``group0``.
        nominal: Whether the parameters have names only, and no values.
    """

    parameters: dict[str, UpstreamParameter] = field(default_factory=dict)
    properties: dict[str, PropertyValue] = field(default_factory=dict)
    groups: dict[str, OptimizerGroup] = field(default_factory=dict)
    nominal: bool = False


def read_upstream_checkpoint(source: str | os.PathLike[str] | bytes) -> UpstreamCheckpoint:
    """Reads a checkpoint of onnxruntime-training's training API.

    Args:
        source: Its path, or its content.

    Raises:
        FileNotFoundError: If the file does not exist.
        CheckpointError: If it is damaged, is not such a checkpoint, or has unsupported contents.
    """
    path: Path | None
    if isinstance(source, (bytes, bytearray, memoryview)):
        data, name, path = bytes(source), "the given checkpoint", None
    elif isinstance(source, (str, os.PathLike)):
        path = Path(source)
        check_file(path, "checkpoint")
        data, name = path.read_bytes(), repr(str(path))
    else:
        raise TypeError(f"source must be a path or bytes, but got {type(source).__name__}")
    if not is_upstream_checkpoint(data[:8]):
        raise CheckpointError(f"{name} is not a checkpoint of onnxruntime-training: the mark 'ODTC' is missing")
    return _Reader(data, name, path).read()


class _Reader:
    """Reads one file, and counts the bytes of its tensors and strings, which must not exceed the file's."""

    def __init__(self, data: bytes, name: str, path: Path | None) -> None:
        self._name, self._path = name, path
        self._root = Table.root(memoryview(data), name)
        # Tensors of a valid file never share bytes. A hostile file could let many share them, to exhaust memory.
        self._left = len(data)
        self._text_left = _TEXT_SHARING * len(data)
        self._external: Path | None = None

    def read(self) -> UpstreamCheckpoint:
        version = self._root.integer(0, format="<i")
        if version not in (1, VERSION):
            raise CheckpointError(
                f"{self._name} is a checkpoint of onnxruntime-training in version {version} of the format; supported "
                f"is version {VERSION}, of onnxruntime-training 1.17 to 1.19"
            )
        checkpoint = UpstreamCheckpoint()
        module = self._root.table(1)
        if module is not None:
            checkpoint.nominal = module.boolean(2)
            if module.boolean(3):
                self._find_external()
            for number, requires_grad in ((0, True), (1, False)):
                for name, array in self._tensors(module.tables(number), checkpoint.nominal):
                    self._put(checkpoint.parameters, name, UpstreamParameter(array, requires_grad))
        for table in self._root.tables(2):
            self._put(checkpoint.groups, self._text(table, 0), self._group(table))
        bag = self._root.table(3)
        if bag is not None:
            for table in bag.tables(0):
                self._put(checkpoint.properties, self._text(table, 0), table.integer(1))
            for table in bag.tables(1):
                self._put(checkpoint.properties, self._text(table, 0), table.float(1))
            for table in bag.tables(2):
                self._put(checkpoint.properties, self._text(table, 0), self._text(table, 1))
        return checkpoint

    def _group(self, table: Table) -> OptimizerGroup:
        group = OptimizerGroup(table.integer(1), table.float(2))
        if group.step < 0 or not 0.0 <= group.initial_lr < math.inf:
            raise CheckpointError(
                f"{self._name} is damaged: invalid step {group.step} or learning rate {group.initial_lr}"
            )
        for state in table.tables(3):
            moments: dict[str, Array] = {}
            for name, array in self._tensors(state.tables(1), nominal=False):
                self._put(moments, name, array)
            self._put(group.moments, self._text(state, 0), moments)
        return group

    def _tensors(self, tables: list[Table], nominal: bool) -> Iterator[tuple[str, Array]]:
        for table in tables:
            name = self._text(table, 0)
            dtype = DTYPES.get(table.integer(3, format="<i"))
            if dtype is None:
                raise CheckpointError(
                    f"{self._name} can't be read: {name!r} has ONNX element type {table.integer(3, format='<i')}, "
                    "which NumPy does not support"
                )
            yield name, np.empty(0, dtype) if nominal else self._array(table, name, dtype)

    def _array(self, table: Table, name: str, dtype: np.dtype[Any]) -> Array:
        shape = table.integers(2, _MOST_DIMENSIONS)
        size = math.prod(shape) * dtype.itemsize
        if any(length < 0 for length in shape):
            raise CheckpointError(f"{self._name} is damaged: {name!r} has the invalid shape {list(shape)}")
        data, offset = table.data(4), table.integer(6, -1)
        if data is None and offset >= 0 and self._external is not None:
            data = self._outside(offset, size)
        if data is None or len(data) != size:
            raise CheckpointError(
                f"{self._name} is damaged: {name!r} of shape {list(shape)} and dtype {dtype} needs {size} bytes, but "
                f"has {0 if data is None else len(data)}"
            )
        self._left -= size
        if self._left < 0:
            raise CheckpointError(f"{self._name} is damaged: its tensors overlap")
        try:
            return np.frombuffer(data, dtype.newbyteorder("<")).reshape(shape).astype(dtype)
        except ValueError as error:  # too many dimensions, or a huge one next to one of size 0
            raise CheckpointError(f"{self._name} is damaged: {name!r} has the invalid shape {list(shape)}") from error

    def _find_external(self) -> None:
        if self._path is None:
            raise CheckpointError(
                f"{self._name} keeps tensors in a second file, '<path>.data', so it can't be read from bytes: pass the "
                "path"
            )
        self._external = Path(f"{self._path}.data")
        if not self._external.is_file():
            raise CheckpointError(
                f"{self._name} keeps tensors in {str(self._external)!r}, which is missing: copy both files"
            )
        self._left += self._external.stat().st_size

    def _outside(self, offset: int, size: int) -> memoryview:
        """Returns bytes of the second file; fewer if the file is too short."""
        assert self._external is not None
        with self._external.open("rb") as file:
            file.seek(min(offset, self._external.stat().st_size))
            return memoryview(file.read(min(size, self._left)))

    def _text(self, table: Table, number: int) -> str:
        text = table.text(number)
        if text is None:
            raise CheckpointError(f"{self._name} is damaged: a string is missing")
        self._text_left -= len(text)
        if self._text_left < 0:
            raise CheckpointError(f"{self._name} is damaged: its strings overlap")
        return text

    def _put(self, entries: dict[str, Any], name: str, value: Any) -> None:
        """Adds an entry, after a check that the name is new."""
        if name in entries:
            raise CheckpointError(f"{self._name} is damaged: it has {name!r} twice")
        entries[name] = value
