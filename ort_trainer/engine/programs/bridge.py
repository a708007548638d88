"""Lets ONNX Runtime call programs of PyTorch's operators: two C callbacks, and tensors by DLPack, without copies.

The callbacks are registered once per process. They find the data of the current run in a thread-local record, which
:func:`execute` fills: with one session thread, ONNX Runtime calls them on its caller's thread.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..ort import engine
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
"""Name of a node, key of its program, and the times in nanoseconds that the program has recorded."""


class _Run(threading.local):
    """The callbacks' data of the current run."""

    error: BaseException | None = None
    outputs: dict[str, torch.Tensor] | None = None
    calls: list[Call] | None = None


_run = _Run()


def _execute(key: bytes, node: int, input_count: int, inputs: Any, output_count: int, outputs: Any) -> None:
    try:
        # After a failure, further programs return dummy tensors, so that ONNX Runtime can complete the run.
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
    except BaseException as error:  # exceptions can't cross the C++ frames above, so execute() raises it after the run
        _run.error = error
        results = (torch.empty(0),) * output_count
    for index, value in enumerate(results):
        capsule = _to_dlpack(value)
        outputs[index] = _pointer_of(capsule, _FRESH)
        _rename(capsule, _USED)  # the engine owns the tensor now


def _marking(key: bytes, node: int, calls: list[Call]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """Returns a program that records when its steps end.

    Args:
        key: Key of the program.
        node: Address of the node's name.
        calls: Receives the record.
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
    """Registers programs under the keys by which nodes call them."""
    _install()
    for key, program in programs.items():
        if key.encode() not in _programs:
            outputs = [(int(index), name) for index, name in program.outputs.items()]
            _programs[key.encode()] = program.compiled(), outputs


def prepare_timed(programs: dict[str, Program]) -> None:
    """Registers the second form of programs, which records when their steps end."""
    for key, program in programs.items():
        if key.encode() not in _timed:
            _timed[key.encode()] = program.compiled(timed=True)


def execute(
    session: Any, feeds: Mapping[str, Any], wanted: str, calls: list[Call] | None = None
) -> dict[str, torch.Tensor]:
    """Runs a graph of programs with PyTorch's gradients and autocast off, as the graph was captured.

    Args:
        session: The ONNX Runtime session.
        feeds: Inputs by name, as values of ONNX Runtime.
        wanted: Name of any output: ONNX Runtime requires at least one.
        calls: Receives the calls of programs with their times, in order; requires :func:`prepare_timed` for the
            programs. None for no times.

    Returns:
        The outputs by name, directly from the programs: booleans as bytes. Returning them through ONNX Runtime would
        take ten microseconds each.

    Raises:
        Exception: If a program raised it.
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
    # If a program failed, ONNX Runtime's error is only a consequence.
    if raised is not None:
        raise raised
    if failed is not None:
        raise failed
    return outputs


@functools.cache
def _ort_value() -> Any:
    return engine().capi._pybind_state.OrtValue


def from_torch(value: torch.Tensor) -> Any:
    """Returns an ONNX Runtime value that shares the memory of a contiguous tensor without requires_grad."""
    if value.dtype is torch.bool:
        return _ort_value().from_dlpack(_to_dlpack(value.view(torch.uint8)), True)
    return _ort_value().from_dlpack(_to_dlpack(value), False)
