"""Lets ONNX Runtime call programs of PyTorch's operators: two C callbacks, and tensors by DLPack, without copies.

ONNX Runtime asks for the callbacks once per process. What they need to know about the run that they are called in they
find in a record of the thread, which :func:`execute` fills: ONNX Runtime calls them on the thread that called it, as
long as the session has one thread.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..engine import engine
from .program import Program

__all__ = ["DOMAIN", "OPERATOR", "Call", "execute", "from_torch", "prepare", "prepare_timed"]

DOMAIN, OPERATOR = "org.pytorch.aten", "ATen"

# A capsule keeps the address of its name, so both must live on.
_FRESH, _USED = b"dltensor", b"used_dltensor"
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype, _new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
_rename = ctypes.pythonapi.PyCapsule_SetName
_rename.restype, _rename.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]

_Pointers = ctypes.POINTER(ctypes.c_void_p)
_IsCpuArgument = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_bool)
_Execute = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_size_t, _Pointers, ctypes.c_size_t, _Pointers
)

_programs: dict[bytes, tuple[Callable[..., tuple[torch.Tensor, ...]], list[tuple[int, str]]]] = {}
_timed: dict[bytes, Callable[..., tuple[torch.Tensor, ...]]] = {}
_from_dlpack, _to_dlpack = torch._C._from_dlpack, torch._C._to_dlpack  # type: ignore[attr-defined]


Call = tuple[str, str, list[int]]
"""Name of a node, key of its program, and the times in nanoseconds that the program has marked."""


class _Run(threading.local):
    """What callbacks know about the run that they are called in."""

    error: BaseException | None = None
    outputs: dict[str, torch.Tensor] | None = None
    calls: list[Call] | None = None


_run = _Run()


def _execute(key: bytes, node: int, input_count: int, inputs: Any, output_count: int, outputs: Any) -> None:
    try:
        # Its steps after one that failed get something that is a tensor, for ONNX Runtime to come to the end of the
        # run.
        if _run.error is None:
            program, outputs_of_graph = _programs[key]
            if _run.calls is not None:
                program = _marking(key, node, _run.calls)
            results = program(*[_from_dlpack(_new_capsule(pointer, _FRESH, None)) for pointer in inputs[:input_count]])
            if _run.outputs is not None:
                for index, name in outputs_of_graph:
                    _run.outputs[name] = results[index]
        else:
            results = (torch.empty(0),) * output_count
    except BaseException as error:  # no exception can cross the frames of C++ above: it is raised after the run
        _run.error = error
        results = (torch.empty(0),) * output_count
    for index, value in enumerate(results):
        capsule = _to_dlpack(value)
        outputs[index] = _pointer_of(capsule, _FRESH)
        _rename(capsule, _USED)  # the engine owns the tensor now


def _marking(key: bytes, node: int, calls: list[Call]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Returns a program that notes when its steps are done.

    Args:
        key: Of the program.
        node: Address of the node's name.
        calls: Where it is noted.
    """
    marks: list[int] = []
    calls.append((ctypes.string_at(node).decode(), key.decode(), marks))
    return functools.partial(_timed[key], marks.append)


_callbacks = (_IsCpuArgument(lambda *_: False), _Execute(_execute))


@functools.cache
def _install() -> None:
    addresses = [str(ctypes.cast(function, ctypes.c_void_p).value) for function in _callbacks]
    engine().capi._pybind_state.register_aten_op_executor(*addresses)


def prepare(programs: dict[str, Program]) -> None:
    """Makes programs known under the names by which nodes call them."""
    _install()
    for key, program in programs.items():
        if key.encode() not in _programs:
            outputs = [(int(index), name) for index, name in program.outputs.items()]
            _programs[key.encode()] = program.compiled(), outputs


def prepare_timed(programs: dict[str, Program]) -> None:
    """Makes programs known that can be asked to note when their steps are done."""
    for key, program in programs.items():
        if key.encode() not in _timed:
            _timed[key.encode()] = program.compiled(timed=True)


def execute(
    session: Any, feeds: Mapping[str, Any], wanted: str, calls: list[Call] | None = None
) -> dict[str, torch.Tensor]:
    """Runs a graph of programs, with PyTorch as the graph was captured: no gradients are recorded, no casts are made.

    Args:
        session: The ONNX Runtime session.
        feeds: Inputs by name, as values of ONNX Runtime.
        wanted: Name of one output: ONNX Runtime wants to be asked for something.
        calls: Gets the calls of programs with their times, in order. The programs must have been handed to
            :func:`prepare_timed`. None for no times.

    Returns:
        The outputs by name, as the programs made them: booleans as bytes. They need not come by way of ONNX Runtime,
        which takes ten microseconds for each.

    Raises:
        Exception: What a program raised.
    """
    grad, autocast = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    outputs: dict[str, torch.Tensor] = {}
    torch.set_grad_enabled(False)
    if autocast:
        torch.set_autocast_enabled("cpu", False)
    _run.outputs, _run.calls = outputs, calls
    failed: Exception | None = None
    try:
        session.run_with_ort_values(feeds, [wanted], None)
    except Exception as error:
        failed = error
    finally:
        torch.set_grad_enabled(grad)
        if autocast:
            torch.set_autocast_enabled("cpu", True)
        raised, _run.error, _run.outputs, _run.calls = _run.error, None, None, None
    # What ONNX Runtime says of a program that failed is a consequence of it.
    if raised is not None:
        raise raised
    if failed is not None:
        raise failed
    return outputs


@functools.cache
def _ort_value() -> Any:
    return engine().capi._pybind_state.OrtValue


def from_torch(value: torch.Tensor) -> Any:
    """Returns a value of ONNX Runtime in the memory of a contiguous tensor that does not require grad."""
    if value.dtype is torch.bool:
        return _ort_value().from_dlpack(_to_dlpack(value.view(torch.uint8)), True)
    return _ort_value().from_dlpack(_to_dlpack(value), False)
