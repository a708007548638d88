"""Comparable stand-ins for values outside tensors: equal only if a program can't tell the values apart."""

from __future__ import annotations

import array
import contextvars
import enum
import functools
import hashlib
import sys
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Hashable, Iterator
from typing import Any

import numpy
import torch
from torch import nn

from .containers import CHANGEABLE, copied, kept_by
from .places import MISSING, referent

CONTAINERS = (dict, OrderedDict, defaultdict, list, tuple, deque, set, frozenset)
_ATOMS = (type(None), bool, int, float, complex, str, bytes, type(...), range, slice)
_NUMBERS_AND_TEXTS: tuple[Any, ...] = (int, float, complex, str, bytes)
VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))
"""Views of a dict, which their attribute ``mapping`` shows."""
MEMORIES = (numpy.ndarray, contextvars.ContextVar, bytearray, array.array, types.MappingProxyType, *VIEWS)
"""Kinds of objects that can't be watched, so their whole contents are compared."""
LARGE = 1 << 20
"""Bytes of an array from which on its elements are compared by a hash, and more and more seldom."""
_OF_TORCH = (torch.dtype, torch.device, torch.layout, torch.memory_format)
_PLAIN = (*_ATOMS, *_OF_TORCH, enum.Enum, numpy.generic, type)
_CALLABLES = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodWrapperType)
_DEEPEST = 50
_UNWATCHED = frozenset({"abc", "asyncio", "builtins", "collections.abc", "concurrent", "contextlib", "functools", "gc"})
_UNWATCHED |= {"importlib", "inspect", "io", "logging", "numpy", "ort_trainer", "re", "sympy", "sys"}
_UNWATCHED |= {"pathlib", "traceback", "types", "typing", "unittest", "warnings", "_thread"}
# Rooms of torch whose objects users keep and change.
_OF_USERS = frozenset({"amp", "cuda", "distributions", "optim", "utils"})
_HEAP_TYPE, _IMMUTABLE_TYPE = 1 << 9, 1 << 8  # Py_TPFLAGS_HEAPTYPE, Py_TPFLAGS_IMMUTABLETYPE


def is_watched(kind: type) -> bool:
    """Returns whether what is read of the objects of a class can be recorded and is worth it.

    Classes of extensions can't be changed, and the state of loggers, locks and the like does not decide what a model
    computes.
    """
    root, *rest = (kind.__module__ or "").split(".")
    if root in ("torch", "torchgen", "functorch"):
        return bool(rest) and rest[0] in _OF_USERS
    return root not in _UNWATCHED and kind.__flags__ & (_HEAP_TYPE | _IMMUTABLE_TYPE) == _HEAP_TYPE


def is_plain(value: Any) -> bool:
    """Returns whether a value is a number, a string or another constant without parts."""
    return isinstance(value, _PLAIN)


def are_equal_constants(value: Any, other: Any) -> bool:
    """Returns whether two values are equal, and have no objects in them, of which two may be equal and not the same."""
    return is_leaf(value) and is_leaf(other) and frozen(value) == frozen(other)


def is_leaf(value: Any, tensors: bool = False, depth: int = 0) -> bool:
    """Returns whether a value is a constant, or a container of nothing else, and so compared as a whole.

    Args:
        value: The value.
        tensors: Whether tensors count as constants.
        depth: How deep the value is in a container.
    """
    if type(value) not in CONTAINERS:
        return is_plain(value) or (tensors and isinstance(value, torch.Tensor))
    parts = (*value, *value.values()) if isinstance(value, dict) else value
    return depth < _DEEPEST and all(is_leaf(part, tensors, depth + 1) for part in parts)


def frozen(value: Any, depth: int = 0) -> Hashable:
    """Returns a stand-in for a value, which tells 1 from True and 0.0 from -0.0, and takes NaN as equal to itself.

    Of a tensor, it has what a graph depends on, not the numbers: these are an input of the graph. Functions, modules
    and other objects stand for themselves, and what is read of them has places of its own.
    """
    kind = type(value)
    if kind in _ATOMS:
        return kind, repr(value) if kind in (float, complex) else value if kind is not slice else str(value)
    if isinstance(value, torch.Tensor):
        # A tensor subclass or another layout may keep anything, so it stands for itself.
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            return kind, id(value), getattr(value, "_version", 0) if not value.is_inference() else 0
        return kind, value.dtype, value.shape, value.device, value.requires_grad
    if isinstance(value, numpy.ndarray):
        return kind, str(value.dtype), value.shape, _contents(value, depth + 1)
    if isinstance(value, numpy.generic):
        return kind, str(value.dtype), value.tobytes()
    if value is sys.modules:  # an import elsewhere has no effect by itself
        return kind, id(value)
    if isinstance(value, (dict, list, tuple, deque, set, frozenset)):
        return _frozen_container(value, depth + 1)
    if isinstance(value, functools._lru_cache_wrapper):
        return kind, _Same(value), frozen([part for _, part in parts_of(value)], depth + 1)
    if isinstance(value, functools.partial):
        return kind, frozen(value.func), frozen(value.args, depth + 1), frozen(value.keywords, depth + 1)
    if issubclass(kind, _NUMBERS_AND_TEXTS) and not issubclass(kind, enum.Enum):  # a class of its own
        base = next(base for base in _NUMBERS_AND_TEXTS if issubclass(kind, base))
        return kind, base.__repr__(value)
    if isinstance(value, (*_CALLABLES, *_OF_TORCH, enum.Enum, type)):
        return kind, _Same(value)
    if isinstance(value, contextvars.ContextVar):
        return kind, id(value), frozen(referent(value), depth + 1)
    if isinstance(value, (bytearray, array.array)):
        return kind, bytes(value)
    if isinstance(value, VIEWS):
        return kind, frozen(value.mapping, depth)
    if isinstance(value, types.MappingProxyType):
        return kind, frozen(dict(value), depth)
    # What is read of an object has places of its own, if its class can be watched.
    return (kind,) if is_watched(kind) and not isinstance(value, nn.Module) else (kind, _Same(value))


def _contents(array: Any, depth: int) -> Hashable:
    """Returns a stand-in for the elements of an array; for those in a file, which may exceed the memory, itself."""
    if array.dtype.hasobject:
        return frozen(array.ravel().tolist(), depth)
    owner = array
    while isinstance(owner, numpy.ndarray):
        if isinstance(owner, numpy.memmap):
            return _Same(array)
        owner = owner.base
    if array.nbytes > LARGE:
        elements: Any = numpy.ascontiguousarray(array).view(numpy.uint8)
        return hashlib.blake2b(elements).digest()
    return bytes(array.tobytes())


def _frozen_container(value: Any, depth: int) -> Hashable:
    """Returns a stand-in for a container; of a deeply nested one, only its class and length."""
    if depth > _DEEPEST:
        return type(value), len(value)
    if isinstance(value, dict):
        return type(value), tuple((frozen(key), frozen(entry, depth)) for key, entry in copied(value).items())
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(map(frozen, value))
    return type(value), tuple(frozen(part, depth) for part in value)


def _is_changeable(part: Any) -> bool:
    """Returns whether what a function has kept may be changed by others, or has such parts; a tensor stays."""
    if isinstance(part, (tuple, frozenset)):
        return any(map(_is_changeable, part))
    watched = is_watched(type(part)) and not isinstance(part, (torch.Tensor, nn.Module))
    return watched or isinstance(part, (*CHANGEABLE, *MEMORIES))


class _Same:
    """Equal only for the same object, or for methods of the same object and function."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return False
        mine, theirs = self._value, other._value
        if isinstance(mine, types.MethodType) and isinstance(theirs, types.MethodType):
            return mine.__func__ is theirs.__func__ and mine.__self__ is theirs.__self__
        return mine is theirs

    def __hash__(self) -> int:
        return hash(type(self._value))

    def __repr__(self) -> str:
        return getattr(self._value, "__qualname__", None) or repr(self._value)


def parts_of(value: Any) -> Iterator[tuple[tuple[str, str | int], Any]]:
    """Yields the parts of a container, each with the step that leads to it; nothing for other values."""
    if isinstance(value, functools.partial):
        yield ("get", "func"), value.func
        yield ("get", "args"), value.args
        yield ("get", "keywords"), value.keywords
    elif isinstance(value, dict):
        # Copies, because the caller may change the container meanwhile.
        yield from ((("entry", at), part) for at, part in enumerate(copied(value).values()))
    elif isinstance(value, (set, frozenset)):
        yield from ((("member", at), part) for at, part in enumerate(tuple(value)))
    elif isinstance(value, numpy.ndarray) and value.dtype.hasobject:
        yield from ((("item", at), part) for at, part in enumerate(value.flat))
    elif isinstance(value, (list, tuple, deque)):
        yield from ((("item", at), part) for at, part in enumerate(tuple(value)))
    elif isinstance(value, functools._lru_cache_wrapper):
        yield from ((("kept", at), part) for at, part in enumerate(kept_by(value)) if _is_changeable(part))
    elif isinstance(value, contextvars.ContextVar) and referent(value) is not MISSING:
        yield ("referent", ""), referent(value)


def memory_of(tensor: torch.Tensor) -> Hashable:
    """Returns a key that only tensors on the same memory share; None for tensors without elements in memory."""
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or not tensor.numel():
        return None
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
