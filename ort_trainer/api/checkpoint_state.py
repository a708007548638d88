"""``CheckpointState``: the training state, with parameters and the user's own properties as mappings."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.errors import shown, warn
from ..core.foreign import UPSTREAM, is_upstream_checkpoint
from ..core.unknown import nearest
from ..engine.ort import OrtValue
from ..state.state import Array, State, Value
from ..state.training_api import from_bytes, read_checkpoint, to_bytes, write_checkpoint
from ..upstream.checkpoint import UpstreamCheckpoint, read_upstream_checkpoint
from ..upstream.conversion import from_upstream, to_upstream
from ..upstream.write_checkpoint import upstream_checkpoint_bytes, write_upstream_checkpoint
from .live_state import LiveState

if TYPE_CHECKING:
    from ..engine.numpy_memory import StateTensor

# The largest int, in bits. Python parses at most 4300 digits, which is about 14,000 bits.
_BITS = 8192


class Parameter:
    """A parameter of the model, from ``state.parameters[name]``."""

    def __init__(self, name: str, state: LiveState) -> None:
        self._name = name
        self._state = state

    @property
    def name(self) -> str:
        """Its name."""
        return self._name

    @property
    def data(self) -> Array:
        """A copy of its values. Assign an array of the same shape and dtype to change them.

        Raises:
            RuntimeError: If it is read from a nominal checkpoint that has not been filled.
            TypeError: If the value assigned is neither an array nor an OrtValue, or has a different dtype.
            ValueError: If the array assigned has a different shape.
        """
        if self._name in self._state.missing:
            self._state.require_values()
        with self._state.lock:
            return self._tensor.read()

    @data.setter
    def data(self, value: Array | OrtValue) -> None:
        self._write(self._checked(value))

    def _write(self, array: Array) -> None:
        """Writes a checked array."""
        with self._state.lock:
            self._state.write(self._name, array)

    def _checked(self, value: Array | OrtValue | Parameter) -> Array:
        """Returns a value as an array of this parameter's dtype and shape."""
        array = _to_array(value, f"parameter {self._name!r}")
        if array.dtype != self.dtype:
            raise TypeError(
                f"parameter {self._name!r} has dtype {self.dtype}, but an array of {array.dtype} was given: use "
                f".astype(numpy.{self.dtype})"
            )
        if array.shape != self.shape:
            raise ValueError(
                f"parameter {self._name!r} has shape {list(self.shape)}, but an array of shape {list(array.shape)} was "
                "given"
            )
        return array

    @property
    def grad(self) -> Array | None:
        """A copy of the sum of its gradients since the last reset.

        Zeros before the first step; None if it is not trained or there is no module yet.
        """
        tensor = self._state.gradients.get(self._name)
        with self._state.lock:
            return None if tensor is None else tensor.read()

    @property
    def requires_grad(self) -> bool:
        """Whether it is trained."""
        return self._name in self._state.trainable

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its element type."""
        return self._tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        return self._tensor.shape

    @property
    def _tensor(self) -> StateTensor:
        return self._state.values[self._name]

    def __repr__(self) -> str:
        return (
            f"Parameter(name={self._name!r}, shape={list(self.shape)}, dtype={self.dtype}, "
            f"requires_grad={self.requires_grad})"
        )


class Parameters(MutableMapping[str, Parameter]):
    """The parameters of the model by name, including its floating-point buffers (running statistics).

    Values can be assigned, ``parameters["fc.weight"] = array``, but parameters can be neither added nor removed.
    """

    def __init__(self, state: LiveState) -> None:
        self._state = state
        self._parameters = {name: Parameter(name, state) for name in state.parameters}

    def __getitem__(self, name: str) -> Parameter:
        return self._find(name)

    def __setitem__(self, name: str, value: Array | OrtValue | Parameter) -> None:
        self._find(name).data = value  # type: ignore[assignment]

    def __delitem__(self, name: str) -> None:
        self._find(name)
        raise TypeError(f"parameter {name!r} can't be removed: the model needs it")

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Sets values, like ``dict.update``: all of them, or none if one is invalid.

        Raises:
            KeyError: If a parameter is unknown.
            TypeError: If a value is not an array, or has a different dtype.
            ValueError: If a value has a different shape.
        """
        pairs = [(self._find(name), value) for name, value in dict(*args, **kwargs).items()]
        checked = [(parameter, parameter._checked(value)) for parameter, value in pairs]
        with self._state.lock:
            for parameter, array in checked:
                parameter._write(array)

    def __iter__(self) -> Iterator[str]:
        return iter(self._state.parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._parameters

    def __repr__(self) -> str:
        return f"Parameters({list(self._parameters.values())})"

    def _find(self, name: str) -> Parameter:
        if name not in self:
            raise _unknown("parameter", name, self._parameters)
        return self._parameters[name]


class Properties(MutableMapping[str, Value]):
    """The user's own values in a checkpoint: int, float and str by name."""

    def __init__(self, state: LiveState) -> None:
        self._state = state

    def __getitem__(self, name: str) -> Value:
        return self._state.properties[self._find(name)]

    def __setitem__(self, name: str, value: Value) -> None:
        self._state.properties[name] = self._checked(name, value)

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Sets values, like ``dict.update``: all of them, or none if one is invalid.

        Raises:
            TypeError: If a name is not a str, or a value is not an int, a float or a str.
            ValueError: If an int is too large.
        """
        new_values = dict(*args, **kwargs)
        self._state.properties.update({name: self._checked(name, value) for name, value in new_values.items()})

    @staticmethod
    def _checked(name: str, value: Value) -> Value:
        """Returns a value as the int, float or str that a checkpoint stores."""
        if not isinstance(name, str):
            raise TypeError(f"the name of a property must be a str, but {shown(name)} was given")
        if isinstance(value, str):
            return str(value)
        if isinstance(value, (int, np.integer, np.bool_)):
            value = int(value)
            if value.bit_length() > _BITS:
                raise ValueError(f"property {name!r} is an int of more than {_BITS} bits: use a str instead")
            return value
        if isinstance(value, (float, np.floating)):
            return float(value)
        raise TypeError(f"property {name!r} must be an int, a float or a str, but {shown(value)} was given")

    def __delitem__(self, name: str) -> None:
        del self._state.properties[self._find(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state.properties)

    def __len__(self) -> int:
        return len(self._state.properties)

    def __repr__(self) -> str:
        return f"Properties({self._state.properties})"

    def _find(self, name: str) -> str:
        if name not in self._state.properties:
            raise _unknown("property", name, self._state.properties)
        return name


class CheckpointState:
    """The training state: parameters, gradients, the optimizer's state and the user's properties.

    Create it with :meth:`load_checkpoint`. Modules, optimizers and training sessions can share one: a change by one is
    visible to all.
    """

    def __init__(self, state: LiveState) -> None:
        if not isinstance(state, LiveState):
            raise TypeError(
                f"create a CheckpointState with CheckpointState.load_checkpoint(path); it can't be made from "
                f"{shown(state)}"
            )
        self._state = state
        self._parameters = Parameters(state)
        self._properties = Properties(state)

    @classmethod
    def load_checkpoint(cls, checkpoint_uri: str | os.PathLike[str]) -> CheckpointState:
        """Returns the state in a file: a complete or a nominal checkpoint.

        Args:
            checkpoint_uri: Path of the file.

        Raises:
            TypeError: If ``checkpoint_uri`` is not a path.
            FileNotFoundError: If the file does not exist.
            CheckpointError: If it is damaged or not the checkpoint of an export.
        """
        state = _read_upstream(checkpoint_uri) or read_checkpoint(checkpoint_uri)
        return cls._of(state, f"checkpoint {os.fspath(checkpoint_uri)!r}")

    @classmethod
    def load_checkpoint_from_buffer(cls, checkpoint_buffer: bytes) -> CheckpointState:
        """Returns the state in the bytes of a file.

        Args:
            checkpoint_buffer: The bytes.

        Raises:
            TypeError: If ``checkpoint_buffer`` is not bytes.
            CheckpointError: If it is damaged or not the checkpoint of an export.
        """
        if not isinstance(checkpoint_buffer, (bytes, bytearray, memoryview)):
            raise TypeError(f"the checkpoint must be given as bytes, but {shown(checkpoint_buffer)} was given")
        name = "the checkpoint given as bytes"
        data = bytes(checkpoint_buffer)
        return cls._of(_read_upstream(data) or from_bytes(data, name), name)

    @classmethod
    def _of(cls, checkpoint: State, name: str) -> CheckpointState:
        return cls(LiveState(checkpoint, name))

    @classmethod
    def save_checkpoint(
        cls, state: CheckpointState, checkpoint_uri: str | os.PathLike[str], include_optimizer_state: bool = False
    ) -> None:
        """Writes a file atomically.

        Args:
            state: The state to write.
            checkpoint_uri: Path of the file; an existing one is replaced.
            include_optimizer_state: Whether to include what resuming needs: the optimizer's state, the number of
                updates, and gradients not applied yet. Without it, training restarts from these weights.

        Raises:
            TypeError: If ``state`` is not a CheckpointState, or ``checkpoint_uri`` is not a path.
            FileNotFoundError: If the folder does not exist.
            RuntimeError: If it is a nominal checkpoint that has been filled only in part.
        """
        inner = state_of(state)
        if not isinstance(checkpoint_uri, (str, os.PathLike)):
            raise TypeError(f"the checkpoint must be given as a path, but {shown(checkpoint_uri)} was given")
        with inner.lock:
            checkpoint = inner.to_checkpoint(include_optimizer_state)
            if inner.is_upstream:
                write_upstream_checkpoint(checkpoint_uri, _as_upstream(checkpoint))
            else:
                write_checkpoint(checkpoint_uri, checkpoint)

    @classmethod
    def save_checkpoint_to_buffer(cls, state: CheckpointState, include_optimizer_state: bool = False) -> bytes:
        """Returns the bytes that :meth:`save_checkpoint` writes."""
        inner = state_of(state)
        with inner.lock:
            checkpoint = inner.to_checkpoint(include_optimizer_state)
            return upstream_checkpoint_bytes(_as_upstream(checkpoint)) if inner.is_upstream else to_bytes(checkpoint)

    @property
    def parameters(self) -> Parameters:
        """The parameters by name."""
        return self._parameters

    @property
    def properties(self) -> Properties:
        """The user's own values by name."""
        return self._properties

    def __repr__(self) -> str:
        return (
            f"CheckpointState({len(self._parameters)} parameters, {self._state.optimization_step} updates done, "
            f"properties={shown(self._state.properties)})"
        )


def state_of(state: CheckpointState) -> LiveState:
    """Returns the ``LiveState`` of a ``CheckpointState``.

    Raises:
        TypeError: If ``state`` is not a CheckpointState.
    """
    if not isinstance(state, CheckpointState):
        raise TypeError(
            f"state must be a CheckpointState, from CheckpointState.load_checkpoint(path), but {shown(state)} was given"
        )
    return state._state


def _read_upstream(source: str | os.PathLike[str] | bytes) -> State | None:
    """Returns the state in a checkpoint of onnxruntime-training, a path or bytes; None for any other file."""
    if isinstance(source, bytes):
        head = source[:8]
    elif isinstance(source, (str, os.PathLike)) and os.path.isfile(source):  # noqa: PTH113 - pathlib takes time
        with open(source, "rb") as file:  # noqa: PTH123
            head = file.read(8)
    else:
        return None
    if not is_upstream_checkpoint(head):
        return None
    return dataclasses.replace(from_upstream(read_upstream_checkpoint(source)), export=UPSTREAM)


def _as_upstream(state: State) -> UpstreamCheckpoint:
    upstream, left_out = to_upstream(dataclasses.replace(state, random=None))
    if left_out:
        warn(f"onnxruntime-training's checkpoints can't store {', '.join(left_out)}: left out")
    return upstream


def _to_array(value: object, what: str) -> Array:
    """Returns the array of a value.

    Raises:
        TypeError: If it is not an array, an OrtValue or another parameter.
    """
    if isinstance(value, Parameter):
        return value.data
    if isinstance(value, OrtValue):
        return np.asarray(value.numpy())
    if not isinstance(value, (np.ndarray, np.generic)):
        raise TypeError(f"{what} must be a numpy array or an OrtValue, but {shown(value)} was given")
    return np.asarray(value)


def _unknown(kind: str, name: object, names: Collection[str]) -> KeyError:
    """Returns an error that suggests similar names, or lists all of them."""
    close = nearest(name, names, 3) if isinstance(name, str) else []
    existing = f"known are {shown(list(names))}" if names else "none exist yet"
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else existing
    return KeyError(f"unknown {kind} {name!r}: {hint}")
