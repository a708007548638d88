"""Lets ONNX Runtime call programs of PyTorch's operators: two C callbacks, and tensors by DLPack, without copies.

ONNX Runtime asks for the callbacks once per process. What they need to know about the run that they are called in they find
in a record of the thread, which :func:`executing` puts there: ONNX Runtime calls them on the thread that called it, as long
as the session has one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .program import Program

__all__ = ["DOMAIN", "OPERATOR", "executing", "from_torch", "is_available", "prepare", "to_torch"]

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

_programs: dict[bytes, Callable[..., tuple[torch.Tensor, ...]]] = {}
_from_dlpack, _to_dlpack = torch._C._from_dlpack, torch._C._to_dlpack  # type: ignore[attr-defined]


class _Run(threading.local):
    """What callbacks know about the run that they are called in."""

    error: BaseException | None = None


_run = _Run()


def _execute(key: bytes, _: Any, input_count: int, inputs: Any, output_count: int, outputs: Any) -> None:
    try:
        # Its steps after one that failed get something that is a tensor, for ONNX Runtime to come to the end of the run.
        if _run.error is None:
            given = [_from_dlpack(_new_capsule(pointer, _FRESH, None)) for pointer in inputs[:input_count]]
            results = _programs[key](*given)
        else:
            results = (torch.empty(0),) * output_count
    except BaseException as error:  # no exception can cross the frames of C++ above: it is raised after the run
        _run.error = error
        results = (torch.empty(0),) * output_count
    for index, value in enumerate(results):
        capsule = _to_dlpack(value)
        outputs[index] = _pointer_of(capsule, _FRESH)
        _rename(capsule, _USED)  # the engine owns the tensor now


_callbacks = (_IsCpuArgument(lambda *_: False), _Execute(_execute))


def is_available() -> bool:
    """Returns whether the installed ONNX Runtime can call PyTorch."""
    from onnxruntime.capi import _pybind_state

    return hasattr(_pybind_state, "register_aten_op_executor")


@functools.cache
def _install() -> None:
    from onnxruntime.capi import _pybind_state

    addresses = [str(ctypes.cast(function, ctypes.c_void_p).value) for function in _callbacks]
    _pybind_state.register_aten_op_executor(*addresses)


def prepare(programs: dict[str, Program]) -> None:
    """Makes programs known under the names by which nodes call them."""
    _install()
    for key, program in programs.items():
        if key.encode() not in _programs:
            _programs[key.encode()] = program.compiled()


@contextlib.contextmanager
def executing() -> Iterator[None]:
    """Runs what it encloses with PyTorch as the graph was captured: no gradients, no casts; raises what a program raised."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        failed: BaseException | None = None
        try:
            yield
        except Exception as error:
            failed = error
        finally:
            raised, _run.error = _run.error, None
        if raised is not None:
            raise raised
        if failed is not None:
            raise failed


def to_torch(value: Any) -> torch.Tensor:
    """Returns the tensor that a value of ONNX Runtime holds, without a copy; booleans come as bytes."""
    found: torch.Tensor = _from_dlpack(value.to_dlpack())
    return found


def from_torch(value: torch.Tensor) -> Any:
    """Returns a value of ONNX Runtime in the memory of a contiguous tensor."""
    from onnxruntime.capi._pybind_state import OrtValue

    is_bool = value.dtype is torch.bool
    return OrtValue.from_dlpack(_to_dlpack(value.detach().view(torch.uint8) if is_bool else value.detach()), is_bool)
