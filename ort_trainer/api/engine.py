"""The only importer of ``onnxruntime`` in the training API: devices, tensors and the models of an export."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import onnxruntime
from onnxruntime import InferenceSession, OrtValue, RunOptions, SessionOptions

from ..core.errors import shown
from ..engine.sessions import new_session
from ..step.contract import METADATA, OptimizerModel, Step, from_metadata
from .artifact_checks import check_described, check_fits
from .contained import check_contained, custom_operators

if TYPE_CHECKING:
    from .checkpoint_file import Array

__all__ = [
    "CPU",
    "Device",
    "InferenceSession",
    "Loaded",
    "ModelSource",
    "OrtValue",
    "RunOptions",
    "SessionOptions",
    "StateTensor",
    "check_options",
    "check_run_options",
    "default_options",
    "load_model",
    "parse_device",
    "to_ort_value",
]

ModelSource = str | os.PathLike[str] | bytes
"""A model: the path of its file, or its bytes."""
Model = TypeVar("Model", Step, OptimizerModel)

_LOAD_FORMAT = "session.load_model_format"
_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}
# Operators that only onnxruntime-training has.
_UPSTREAM = (b"InPlaceAccumulatorV2", b"AdamWOptimizer", b"SGDOptimizerV2")


class Device(NamedTuple):
    """A device for state and outputs.

    Attributes:
        type: ``cpu`` or ``cuda``, ONNX Runtime's name.
        number: Index among the devices of this type.
    """

    type: str
    number: int = 0

    def __str__(self) -> str:
        return self.type if self.type == "cpu" else f"{self.type}:{self.number}"


CPU = Device("cpu")


def parse_device(text: str) -> Device:
    """Returns the device with a name.

    Raises:
        TypeError: If the name is not a str.
        ValueError: If the device is unknown or unavailable.
    """
    if not isinstance(text, str):
        raise TypeError(f"device must be a str, such as 'cpu' or 'cuda:1', but {shown(text)} was given")
    kind, colon, index = text.partition(":")
    known = kind in _PROVIDERS and (index.isdecimal() if colon else True) and not (kind == "cpu" and index.strip("0"))
    if not known:
        raise ValueError(f"unknown device {text!r}: use 'cpu', 'cuda' or 'cuda:N'")
    available = onnxruntime.get_available_providers()
    if _PROVIDERS[kind] not in available:
        raise ValueError(
            f"device {text!r} needs {_PROVIDERS[kind]}, but the installed ONNX Runtime {onnxruntime.__version__} has "
            f"only {available}: use device='cpu', or install a build that has it"
        )
    return Device(kind, int(index or 0))


def default_options(update: bool = False) -> SessionOptions:
    """Returns the default session options.

    Args:
        update: Whether the session updates the weights.
    """
    options = SessionOptions()
    # Threads that keep spinning after a run take the cores from the other session's run. During the update they do
    # spin: it is a chain of short operators, and waking a thread takes as long as its share of one. During a step,
    # spinning would make processes that share the cores wait for each other.
    spinning = ("session.force_spinning_stop", "1") if update else ("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry(*spinning)
    options.enable_mem_pattern = False  # it would keep a plan for every combination of shapes ever seen
    options.log_severity_level = 3
    return options


def check_options(options: SessionOptions | None, update: bool = False) -> SessionOptions:
    """Returns the user's options, or the defaults.

    Args:
        options: The user's options; None for the defaults.
        update: Whether the session updates the weights.

    Raises:
        TypeError: If ``options`` is not a SessionOptions.
        ValueError: If the options set a model format other than ONNX.
    """
    if options is None:
        return default_options(update)
    if not isinstance(options, SessionOptions):
        raise TypeError(f"session_options must be an onnxruntime.SessionOptions, but {shown(options)} was given")
    try:
        given = options.get_session_config_entry(_LOAD_FORMAT)
    except RuntimeError:  # not set
        return options
    if given != "ONNX":
        raise ValueError(
            f"session_options sets {_LOAD_FORMAT} to {given!r}, but artifacts are in ONNX format: leave it out, or set "
            "it to 'ONNX'"
        )
    return options


def check_run_options(options: RunOptions | None) -> None:
    """Checks the options of a run.

    Raises:
        TypeError: If ``options`` is not a RunOptions.
    """
    if options is not None and not isinstance(options, RunOptions):
        raise TypeError(f"run_options must be an onnxruntime.RunOptions, but {shown(options)} was given")


class StateTensor:
    """A tensor at a fixed address on a device, so it needs to be bound only once.

    Args:
        array: Its initial values; on the CPU its memory is reused if possible.
        device: The device of the tensor.

    Attributes:
        value: The tensor for ONNX Runtime.
        dtype: The element type.
        shape: The sizes.
    """

    def __init__(self, array: Array, device: Device) -> None:
        self.dtype: np.dtype[Any] = array.dtype
        self.shape: tuple[int, ...] = array.shape
        self._array: Array | None = None
        if device.type == "cpu":
            self._array = array = np.require(array, requirements=["C", "W", "O"])
        # Shares the array's memory on the CPU, and copies it to other devices.
        self.value = OrtValue.ortvalue_from_numpy(array, device.type, device.number)

    def view(self) -> Array:
        """Returns the values: on the CPU the memory itself, elsewhere a copy."""
        return self.value.numpy() if self._array is None else self._array

    def read(self) -> Array:
        """Returns a copy of the values."""
        return self.value.numpy() if self._array is None else self._array.copy()

    def write(self, array: Array) -> None:
        """Copies values of the same type and size into the tensor."""
        if self._array is None:
            self.value.update_inplace(np.ascontiguousarray(array).reshape(self.shape))
        else:
            np.copyto(self._array, array.reshape(self.shape))


def to_ort_value(array: Array, device: Device) -> OrtValue:
    """Returns a copy of an array as an OrtValue that owns its memory, which lives as long as any view of it."""
    if not array.size:  # ONNX Runtime can't allocate empty ones
        return OrtValue.ortvalue_from_numpy(array, device.type, device.number)
    value = OrtValue.ortvalue_from_shape_and_type(array.shape, array.dtype.type, device.type, device.number)
    value.update_inplace(array)
    return value


class Loaded(Generic[Model]):
    """A model of an export, ready to run.

    Attributes:
        session: ONNX Runtime's session.
        model: The model's description of itself.
        name: Name of the model in error messages.
        data: The bytes of the model.
    """

    def __init__(self, session: InferenceSession, model: Model, name: str, data: bytes) -> None:
        self.session = session
        self.model: Model = model
        self.name = name
        self.data = data


def load_model(
    cls: type[Model],
    source: ModelSource,
    argument: str,
    kind: str,
    options: SessionOptions,
    device: Device,
) -> Loaded[Model]:
    """Loads a model into a session.

    Args:
        cls: :class:`Step` or :class:`OptimizerModel`.
        source: Path or bytes.
        argument: Name of the argument with the model.
        kind: ``training``, ``evaluation`` or ``optimizer``.
        options: The options of the session.
        device: The device to run on.

    Raises:
        TypeError: If the source is neither a path nor bytes.
        FileNotFoundError: If the file does not exist.
        ValueError: If it is damaged, or not an exported model of this kind.
    """
    data, name = _read(source, argument)
    if data[4:8] == b"ORTM":
        raise ValueError(
            f"{name} is in ORT format (.ort), which can't be trained: use the .onnx file that it was made from"
        )
    if METADATA.encode() not in data and any(operator in data for operator in _UPSTREAM):
        raise ValueError(
            f"{name} is an artifact of flavor 'onnxruntime-training', which only onnxruntime.training.api of "
            "onnxruntime-training can run: train with that, or export again with the default flavor"
        )
    check_contained(data, name)
    session = _make_session(data, name, options, _providers(device))
    try:
        model = from_metadata(cls, session.get_modelmeta().custom_metadata_map.get(METADATA), name)
        if model.kind != kind:
            raise ValueError(f"expected the {kind} model of an export, but {name} is the {model.kind} model")
        check_described(model, name)
        check_fits(model, session.get_inputs(), session.get_outputs(), name)
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is damaged: a name in it is not valid UTF-8 ({error})") from error
    return Loaded[Model](session, model, name, data)


def _read(source: ModelSource, argument: str) -> tuple[bytes, str]:
    if isinstance(source, (bytes, bytearray, memoryview)):
        return bytes(source), f"the model given as {argument}"
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"{argument} must be a path or the bytes of a model, but {shown(source)} was given")
    from pathlib import Path

    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"there is no model {os.fspath(source)!r} ({argument})")
    return path.read_bytes(), repr(str(path))


def _providers(device: Device) -> list[Any]:
    names: list[Any] = [_PROVIDERS["cpu"]]
    if device.type != "cpu":
        names.insert(0, (_PROVIDERS[device.type], {"device_id": str(device.number)}))
    return names


def _make_session(data: bytes, name: str, options: SessionOptions, providers: Sequence[Any]) -> InferenceSession:
    try:
        session: InferenceSession = new_session(onnxruntime, data, options, providers)
        return session
    except Exception as error:  # ONNX Runtime's errors have no common class
        custom = _custom_operators(data)
        if custom:
            raise ValueError(
                f"{name} can't be loaded by ONNX Runtime {onnxruntime.__version__}: it has custom operators, "
                f"{shown(custom)}. If you trust the library with these operators, call register_custom_ops_library("
                "path) on the SessionOptions that you pass as session_options; libraries are never loaded automatically"
            ) from error
        raise ValueError(
            f"{name} can't be loaded by ONNX Runtime {onnxruntime.__version__}; it is damaged, truncated or not an "
            f"ONNX model: {error}"
        ) from error


def _custom_operators(data: bytes) -> list[str]:
    try:
        return custom_operators(data)
    except ValueError:  # not an ONNX model
        return []
