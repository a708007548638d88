"""Writes checkpoint files of onnxruntime-training's training API."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from ..core.atomic import atomic_path, check_target
from ..core.errors import shown
from ..core.foreign import UPSTREAM_MARK
from ..core.interrupts import uninterrupted
from .checkpoint import DTYPES, UNLOADABLE, VERSION, Array, OptimizerGroup, PropertyValue, UpstreamCheckpoint

if TYPE_CHECKING:  # imported only when such a file is written; a dependency of onnxruntime
    import flatbuffers

# A flatbuffer can have at most 2 GiB. Upstream itself starts a second file between 1.7 and 2.1 GiB.
_LARGEST = 1_800 << 20
_INT64 = (-(1 << 63), (1 << 63) - 1)
_LARGEST_FLOAT = float(np.finfo(np.float32).max)


def upstream_checkpoint_bytes(checkpoint: UpstreamCheckpoint) -> bytes:
    """Returns a checkpoint as the content of a file.

    Raises:
        TypeError, ValueError: If it holds a value that can't be written.
    """
    _check(checkpoint)
    return _Writer(checkpoint, None).write()


def write_upstream_checkpoint(
    path: str | os.PathLike[str], checkpoint: UpstreamCheckpoint, limit: int = _LARGEST
) -> None:
    """Writes a checkpoint of onnxruntime-training's training API.

    Args:
        path: The file; it is replaced if it exists.
        checkpoint: What to write.
        limit: Parameters of more bytes than this are written to a second file, ``<path>.data``, as upstream does.

    Raises:
        FileNotFoundError: If the folder does not exist.
        TypeError, ValueError: If it holds a value that can't be written.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"path must be a str or a path, but {shown(path)} was given")
    path = Path(path)
    _check(checkpoint)
    size = sum(parameter.data.nbytes for parameter in checkpoint.parameters.values())
    if size <= limit:
        content = upstream_checkpoint_bytes(checkpoint)
        with atomic_path(path) as temporary:
            temporary.write_bytes(content)
        return
    check_target(path)
    # The data file moves into place first, so a crash in between never leaves a checkpoint without its data.
    with contextlib.ExitStack() as stack:
        temporary = stack.enter_context(atomic_path(path))
        data = stack.enter_context(atomic_path(Path(f"{path}.data"), like=path))
        with data.open("wb") as file:
            content = _Writer(checkpoint, file).write()
        temporary.write_bytes(content)
        with uninterrupted():  # an interrupt between the two moves would leave new data beside the old checkpoint
            stack.close()


def _check(checkpoint: UpstreamCheckpoint) -> None:
    """Raises a TypeError or ValueError for a value that can't be written."""
    if not isinstance(checkpoint, UpstreamCheckpoint):
        raise TypeError(f"checkpoint must be an UpstreamCheckpoint, but a {type(checkpoint).__name__} was given")
    tensors = {name: parameter.data for name, parameter in checkpoint.parameters.items()}
    for group in checkpoint.groups.values():
        for name, moments in group.moments.items():
            tensors |= {f"{moment} of {name}": value for moment, value in moments.items()}
    for name, array in tensors.items():
        if not isinstance(array, (np.ndarray, np.generic)):
            raise TypeError(f"{name!r} must be a NumPy array, but {shown(array)} was given")
        if array.dtype not in DTYPES.values() or array.dtype == UNLOADABLE:
            allowed = [str(dtype) for dtype in DTYPES.values() if dtype != UNLOADABLE]
            raise TypeError(
                f"{name!r} has dtype {array.dtype}, which onnxruntime-training can't load from a checkpoint: it must "
                f"be one of {allowed}"
            )
    for name in (*checkpoint.parameters, *checkpoint.properties, *checkpoint.groups):
        if not isinstance(name, str):
            raise TypeError(f"names in a checkpoint must be str, but {shown(name)} was given")
    for name, value in checkpoint.properties.items():
        _check_property(name, value)
    for name, group in checkpoint.groups.items():
        if not 0 <= group.step <= _INT64[1] or not 0.0 <= group.initial_lr <= _LARGEST_FLOAT:
            raise ValueError(
                f"group {name!r} has step {shown(group.step)} and initial_lr {shown(group.initial_lr)}: step must be "
                "an int of 64 bits, initial_lr a float of 32 bits, and both at least 0"
            )


def _check_property(name: str, value: PropertyValue) -> None:
    if type(value) not in (int, float, str):
        raise TypeError(f"property {name!r} must be an int, a float or a str, but {shown(value)} was given")
    if isinstance(value, int) and not _INT64[0] <= value <= _INT64[1]:
        raise ValueError(f"property {name!r} must be an int of 64 bits, but {shown(value)} was given")
    if isinstance(value, float) and _LARGEST_FLOAT < abs(value) < math.inf:
        raise ValueError(
            f"property {name!r} is {value!r}, but onnxruntime-training stores floats of 32 bits, up to "
            f"{_LARGEST_FLOAT:.3e}: make it a str"
        )


class _Writer:
    """Builds the flatbuffer from its end to its beginning: strings and vectors before the tables that refer to them.

    The numbers of fields are those of upstream's schema, ``ort_training_checkpoint.fbs``.
    """

    def __init__(self, checkpoint: UpstreamCheckpoint, external: BinaryIO | None) -> None:
        try:
            import flatbuffers
        except ImportError as error:
            raise ImportError(
                "writing a checkpoint of onnxruntime-training needs flatbuffers: pip install flatbuffers"
            ) from error
        self._checkpoint, self._external = checkpoint, external
        size = sum(array.nbytes for group in checkpoint.groups.values() for array in _moments(group))
        if external is None:
            size += sum(parameter.data.nbytes for parameter in checkpoint.parameters.values())
        if size > _LARGEST:
            raise ValueError(
                f"the checkpoint has {size / (1 << 30):.1f} GiB apart from its second file, but a file of "
                f"onnxruntime-training holds at most {_LARGEST / (1 << 30):.2f}: leave out the optimizer's state"
            )
        self._builder: flatbuffers.Builder = flatbuffers.Builder(1024)

    def write(self) -> bytes:
        checkpoint, builder = self._checkpoint, self._builder
        parameters = sorted(checkpoint.parameters.items())
        trained, frozen = (
            self._offsets([self._parameter(n, p.data) for n, p in parameters if p.requires_grad is wanted])
            for wanted in (True, False)
        )
        builder.StartObject(4)
        builder.PrependUOffsetTRelativeSlot(0, trained, 0)
        builder.PrependUOffsetTRelativeSlot(1, frozen, 0)
        builder.PrependBoolSlot(2, checkpoint.nominal, False)
        builder.PrependBoolSlot(3, self._external is not None, False)
        module = builder.EndObject()
        groups = self._offsets([self._group(name, group) for name, group in sorted(checkpoint.groups.items())])
        bag = self._properties(checkpoint.properties)
        builder.StartObject(4)
        builder.PrependInt32Slot(0, VERSION, 0)
        builder.PrependUOffsetTRelativeSlot(1, module, 0)
        builder.PrependUOffsetTRelativeSlot(2, groups, 0)
        builder.PrependUOffsetTRelativeSlot(3, bag, 0)
        builder.Finish(builder.EndObject(), file_identifier=UPSTREAM_MARK)
        return bytes(builder.Output())

    def _parameter(self, name: str, array: Array) -> int:
        """Writes a parameter; in a nominal checkpoint only its name and type."""
        if self._checkpoint.nominal:
            return self._tensor(name, np.empty(0, array.dtype), None, named_only=True)
        return self._tensor(name, array, self._external)

    def _tensor(self, name: str, array: Array, external: BinaryIO | None, named_only: bool = False) -> int:
        """Writes a tensor, whose data goes to a second file if there is one, and returns its offset."""
        number = next(number for number, dtype in DTYPES.items() if dtype == array.dtype)
        builder, offset = self._builder, -1
        array = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False)).reshape(array.shape)
        text = builder.CreateString(name)
        dims = builder.CreateNumpyVector(np.array([] if named_only else array.shape, np.int64))
        if external is None:
            data = builder.CreateByteVector(array.tobytes())
        else:
            offset = external.tell()
            external.write(array.data)
        builder.StartObject(7)
        builder.PrependUOffsetTRelativeSlot(0, text, 0)
        builder.PrependUOffsetTRelativeSlot(2, dims, 0)
        builder.PrependInt32Slot(3, number, 0)
        if external is None:
            builder.PrependUOffsetTRelativeSlot(4, data, 0)
        builder.PrependInt64Slot(6, offset, -1)
        return int(builder.EndObject())

    def _group(self, name: str, group: OptimizerGroup) -> int:
        builder, states = self._builder, []
        for parameter, moments in sorted(group.moments.items()):
            tensors = self._offsets([self._tensor(key, array, None) for key, array in sorted(moments.items())])
            text = builder.CreateString(parameter)
            builder.StartObject(2)
            builder.PrependUOffsetTRelativeSlot(0, text, 0)
            builder.PrependUOffsetTRelativeSlot(1, tensors, 0)
            states.append(builder.EndObject())
        vector, text = self._offsets(states), builder.CreateString(name)
        builder.StartObject(4)
        builder.PrependUOffsetTRelativeSlot(0, text, 0)
        builder.PrependInt64Slot(1, group.step, 0)
        builder.PrependFloat32Slot(2, group.initial_lr, 0.0)
        builder.PrependUOffsetTRelativeSlot(3, vector, 0)
        return int(builder.EndObject())

    def _properties(self, properties: Mapping[str, PropertyValue]) -> int:
        builder = self._builder
        kinds: dict[type, list[int]] = {int: [], float: [], str: []}
        for name, value in sorted(properties.items()):
            text = builder.CreateString(name)
            content = builder.CreateString(value) if isinstance(value, str) else 0
            builder.StartObject(2)
            builder.PrependUOffsetTRelativeSlot(0, text, 0)
            if isinstance(value, str):
                builder.PrependUOffsetTRelativeSlot(1, content, 0)
            elif isinstance(value, float):
                builder.PrependFloat32Slot(1, value, 0.0)
            else:
                builder.PrependInt64Slot(1, value, 0)
            kinds[type(value)].append(builder.EndObject())
        vectors = [self._offsets(entries) for entries in kinds.values()]
        builder.StartObject(3)
        for slot, vector in enumerate(vectors):
            builder.PrependUOffsetTRelativeSlot(slot, vector, 0)
        return int(builder.EndObject())

    def _offsets(self, offsets: Sequence[int]) -> int:
        """Writes a vector of tables."""
        self._builder.StartVector(4, len(offsets), 4)
        for offset in reversed(offsets):
            self._builder.PrependUOffsetTRelative(offset)
        return int(self._builder.EndVector())


def _moments(group: OptimizerGroup) -> Iterator[Array]:
    return (array for moments in group.moments.values() for array in moments.values())
