"""Detects changes in the values that a loss function reads from outside: a closure, a global, an attribute."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ....core.errors import shown, warn
from ..step_module import content_of
from .model_watch import settings_of

__all__ = ["LossWatch"]

_PLAIN = (bool, int, float, str)
# Containers with more entries or deeper nesting are not watched: comparing them at every step is too slow.
_MOST_ENTRIES, _DEEPEST = 1000, 4
_Reader = tuple[str, Callable[[], Any]]


class LossWatch:
    """Reads, at every step, the values that a loss function uses without getting them as arguments.

    These are numbers, booleans, strings, tensors, modules, and lists, tuples and dicts of them. They are constants of a
    graph, so each combination needs its own. Values read by functions that the loss function calls are not watched.

    Args:
        loss_fn: The loss function, or None.
        model: The model, whose own parameters and buffers are inputs of its graphs.
    """

    def __init__(self, loss_fn: Callable[..., Any] | None, model: nn.Module) -> None:
        self._readers = list(_readers(loss_fn))
        if isinstance(loss_fn, nn.Module):  # a ModelWatch watches its settings
            self._readers.append((type(loss_fn).__name__, lambda: list(_tensors_of(loss_fn))))
        self._models_own = {id(part) for part in (*model.modules(), *_tensors_of(model))}
        self._settings: weakref.WeakKeyDictionary[nn.Module, list[str]] = weakref.WeakKeyDictionary()
        self._contents: dict[int, tuple[weakref.ref[torch.Tensor], int, Hashable]] = {}
        self._values = self._now()
        self._warned: set[str] = set()

    def variant(self) -> tuple[Any, ...]:
        """Returns a comparable key for the values. Warns when a value changes for the first time."""
        now = self._now()
        if now != self._values:
            for (name, _), old, new in zip(self._readers, self._values, now, strict=True):
                if old != new and name not in self._warned:
                    self._warned.add(name)
                    warn(f"loss_fn reads {name!r}, {_change(name, old, new)}")
            self._values = now
        return now

    def _now(self) -> tuple[Any, ...]:
        return tuple(self._seen(read()) for _, read in self._readers) if self._readers else ()

    def _seen(self, value: Any, depth: int = 0) -> Any:
        """Returns a comparable stand-in for a value; None for what is not watched."""
        if isinstance(value, _PLAIN):
            return value
        if id(value) in self._models_own:
            return None
        if isinstance(value, torch.Tensor):
            return self._content(value)
        if isinstance(value, nn.Module):
            return (*map(self._seen, _tensors_of(value)), *map(self._of_module, value.modules()))
        if not isinstance(value, (list, tuple, dict)) or len(value) > _MOST_ENTRIES or depth == _DEEPEST:
            return None
        if isinstance(value, dict):
            value = [part for pair in value.items() for part in pair]
        return tuple(self._seen(part, depth + 1) for part in value)

    def _of_module(self, module: nn.Module) -> tuple[Any, ...]:
        """Returns the mode and settings of one module."""
        if module not in self._settings:
            self._settings[module] = ["training", *settings_of(module)]
        return tuple(self._seen(vars(module).get(key)) for key in self._settings[module])

    def _content(self, tensor: torch.Tensor) -> Hashable:
        """Returns dtype, shape and hash of a tensor; hashes it again only if it may have changed."""
        if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
            return id(tensor)
        version = -1 if tensor.is_inference() else tensor._version
        known = self._contents.get(id(tensor))
        if known is None or known[0]() is not tensor or known[1] != version or version < 0:
            value = (tensor.dtype, tensor.shape, hash(content_of(tensor)))
            known = self._contents[id(tensor)] = weakref.ref(tensor), version, value
        return known[2]


def _change(name: str, old: Any, new: Any) -> str:
    if isinstance(new, _PLAIN):
        return (
            f"which has changed from {shown(old)} to {shown(new)}: the model is exported again for each value. To "
            f"avoid that, make it an argument of loss_fn, and set trainer.loss_parameters[{name!r}]"
        )
    return (
        "in which a tensor has changed: the model is exported again for each value. To avoid that, make the tensor an "
        "argument of loss_fn, and pass it with every batch"
    )


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _readers(loss_fn: Any) -> Iterator[_Reader]:
    """Yields the name and getter of each value that may be watched."""
    while isinstance(loss_fn, functools.partial):
        yield "arguments of partial", functools.partial(getattr, loss_fn, "args")
        yield from _entries(loss_fn.keywords)
        loss_fn = loss_fn.func
    if loss_fn is None or isinstance(loss_fn, nn.Module):  # a ModelWatch watches a module's settings
        return
    owner = getattr(loss_fn, "__self__", None)
    if not inspect.isroutine(loss_fn):
        owner, loss_fn = loss_fn, type(loss_fn).__call__
    if owner is not None and not inspect.ismodule(owner) and not isinstance(owner, (type, nn.Module)):
        yield from _entries(getattr(owner, "__dict__", {}))
    function = inspect.unwrap(loss_fn)
    code = getattr(function, "__code__", None)
    if code is None or (getattr(function, "__module__", None) or "").partition(".")[0] == "torch":
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        yield name, functools.partial(_in_cell, cell)
    yield from _entries(function.__globals__, set(code.co_names))


def _entries(values: Mapping[str, Any], names: Collection[str] | None = None) -> Iterator[_Reader]:
    for name in list(values) if names is None else sorted(values.keys() & names):
        if isinstance(values[name], (*_PLAIN, torch.Tensor, nn.Module, list, tuple, dict)):
            yield name, functools.partial(values.get, name)


def _in_cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
