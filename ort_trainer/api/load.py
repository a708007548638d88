"""Loads the models of an export into sessions, after checking them."""

from __future__ import annotations

import os
from typing import Generic, TypeVar

from ..core.errors import shown
from ..engine.contained import check_contained, custom_operators
from ..engine.ort import (
    Device,
    InferenceSession,
    RunOptions,
    SessionOptions,
    engine,
    load_format,
    make_session,
    own_options,
    providers_for,
)
from ..step.contract import METADATA, OptimizerModel, Step, from_metadata
from .artifact_checks import check_described, check_fits
from .live_state import LiveState

ModelSource = str | os.PathLike[str] | bytes
"""A model: the path of its file, or its bytes."""
Model = TypeVar("Model", Step, OptimizerModel)

# Operators that only onnxruntime-training has.
_UPSTREAM = (b"InPlaceAccumulatorV2", b"AdamWOptimizer", b"SGDOptimizerV2")
_NEEDED = """{name} is an artifact of onnxruntime-training, and {package}, which converts it, is not installed:
  pip install 'ort_trainer[upstream]'
Or convert all artifacts where it is installed, and train with the result here: ort-trainer convert FOLDER TARGET"""


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
        return own_options(update)
    if not isinstance(options, SessionOptions):
        raise TypeError(f"session_options must be an onnxruntime.SessionOptions, but {shown(options)} was given")
    if load_format(options) != "ONNX":
        raise ValueError(
            f"session_options sets session.load_model_format to {load_format(options)!r}, but artifacts are in ONNX "
            "format: leave it out, or set it to 'ONNX'"
        )
    return options


def check_run_options(options: RunOptions | None) -> None:
    """Checks the options of a run.

    Raises:
        TypeError: If ``options`` is not a RunOptions.
    """
    if options is not None and not isinstance(options, RunOptions):
        raise TypeError(f"run_options must be an onnxruntime.RunOptions, but {shown(options)} was given")


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
    state: LiveState,
    device: Device,
) -> Loaded[Model]:
    """Loads a model into a session.

    Args:
        cls: :class:`Step` or :class:`OptimizerModel`.
        source: Path or bytes.
        argument: Name of the argument with the model.
        kind: ``training``, ``evaluation`` or ``optimizer``.
        options: The options of the session.
        state: The state that it will use. If that comes from onnxruntime-training, the model must too.
        device: The device to run on.

    Raises:
        TypeError: If the source is neither a path nor bytes.
        FileNotFoundError: If the file does not exist.
        ValueError: If it is damaged, not an exported model of this kind, or has unsupported operators.
        ImportError: If it is a model of onnxruntime-training, and torch or onnx is not installed.
    """
    data, name = _read(source, argument)
    if data[4:8] == b"ORTM":
        raise ValueError(
            f"{name} is in ORT format (.ort), which can't be trained: use the .onnx file that it was made from"
        )
    if not state.is_upstream and METADATA.encode() not in data and any(operator in data for operator in _UPSTREAM):
        raise ValueError(
            f"{name} is an artifact of onnxruntime-training, but {state.name} is not: use the checkpoint that was "
            "written with it"
        )
    check_contained(data, name)
    if state.is_upstream:
        data = _converted(cls, data, name, kind, state)
    session = _make_session(data, name, options, device)
    try:
        model = from_metadata(cls, session.get_modelmeta().custom_metadata_map.get(METADATA), name)
        if model.kind != kind:
            raise ValueError(f"expected the {kind} model of an export, but {name} is the {model.kind} model")
        check_described(model, name)
        check_fits(model, session.get_inputs(), session.get_outputs(), name)
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is damaged: a name in it is not valid UTF-8 ({error})") from error
    return Loaded[Model](session, model, name, data)


def _converted(cls: type[Model], data: bytes, name: str, kind: str, state: LiveState) -> bytes:
    """Converts a model of onnxruntime-training to one of ort_trainer."""
    if METADATA.encode() in data:
        raise ValueError(
            f"{name} is a model of ort_trainer, but {state.name} is of onnxruntime-training: use the models and the "
            "checkpoint that were written together"
        )
    try:
        from ..artifacts.files import model_bytes
        from ..artifacts.from_upstream import converted_optimizer, converted_step
        from ..step.onnx_file import corruption_reported
    except ImportError as error:
        raise ImportError(_NEEDED.format(name=name, package=error.name)) from error

    values = {key: tensor.view() for key, tensor in state.values.items()}
    with corruption_reported(name):
        if cls is Step:
            return model_bytes(*converted_step(data, name, kind, values))
        return model_bytes(*converted_optimizer(data, name, {key: values[key] for key in state.trainable}))


def _read(source: ModelSource, argument: str) -> tuple[bytes, str]:
    """Returns the bytes of a model, and its name for messages."""
    if isinstance(source, (bytes, bytearray, memoryview)):
        return bytes(source), f"the model given as {argument}"
    if not isinstance(source, (str, os.PathLike)):
        raise TypeError(f"{argument} must be a path or the bytes of a model, but {shown(source)} was given")
    from pathlib import Path

    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"there is no model {os.fspath(source)!r} ({argument})")
    return path.read_bytes(), repr(str(path))


def _make_session(data: bytes, name: str, options: SessionOptions, device: Device) -> InferenceSession:
    try:
        return make_session(data, options, providers_for(device))
    except Exception as error:  # ONNX Runtime's errors have no common class
        custom = _custom_operators(data)
        if custom:
            raise ValueError(
                f"{name} can't be loaded by ONNX Runtime {engine().__version__}: it has custom operators, "
                f"{shown(custom)}. If you trust the library with these operators, call register_custom_ops_library("
                "path) on the SessionOptions that you pass as session_options; libraries are never loaded automatically"
            ) from error
        raise ValueError(
            f"{name} can't be loaded by ONNX Runtime {engine().__version__}; it is damaged, truncated or not an "
            f"ONNX model: {error}"
        ) from error


def _custom_operators(data: bytes) -> list[str]:
    try:
        return custom_operators(data)
    except ValueError:  # not an ONNX model
        return []
