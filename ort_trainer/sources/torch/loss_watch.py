"""Notices where a number has changed that a loss function reads from outside: a closure, a global, an attribute."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ...errors import shown, warn

__all__ = ["LossWatch"]

_PLAIN = (bool, int, float, str)


class LossWatch:
    """Reads, at every step, the numbers, truth values and strings that a function does not get as arguments.

    A graph holds them for good, so each combination needs its own. What functions read that the loss function calls is
    not noticed.

    Args:
        loss_fn: The loss function, or None.
    """

    def __init__(self, loss_fn: Callable[..., Any] | None) -> None:
        self._readers = list(_readers(loss_fn))
        self._values = self._now()
        self._warned: set[str] = set()

    def variant(self) -> tuple[Any, ...]:
        """Returns the values; the same for the same. Warns where one has changed for the first time."""
        now = self._now()
        if now != self._values:
            for (name, _), old, new in zip(self._readers, self._values, now, strict=True):
                if old != new and name not in self._warned:
                    self._warned.add(name)
                    warn(
                        f"loss_fn reads {name!r}, which has changed from {shown(old)} to {shown(new)}: the model is "
                        "exported anew for each value. Let loss_fn take it as an argument, and set "
                        f"trainer.loss_parameters[{name!r}], which needs no export"
                    )
            self._values = now
        return now

    def _now(self) -> tuple[Any, ...]:
        values = (read() for _, read in self._readers)
        return tuple(value if isinstance(value, _PLAIN) else None for value in values)


def _readers(loss_fn: Any) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields name and getter of each plain value."""
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    if loss_fn is None or isinstance(loss_fn, nn.Module):  # a module's settings are watched as the model's are
        return
    owner = getattr(loss_fn, "__self__", None)
    if not inspect.isroutine(loss_fn):
        owner, loss_fn = loss_fn, type(loss_fn).__call__
    if owner is not None and not inspect.ismodule(owner) and not isinstance(owner, (type, nn.Module)):
        attributes = getattr(owner, "__dict__", {})
        for name, value in attributes.items():
            if isinstance(value, _PLAIN):
                yield name, functools.partial(attributes.get, name)
    function = inspect.unwrap(loss_fn)
    code = getattr(function, "__code__", None)
    if code is None or (getattr(function, "__module__", None) or "").partition(".")[0] == "torch":
        return
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if isinstance(value, _PLAIN):
            yield name, functools.partial(getattr, cell, "cell_contents", None)
    for name in code.co_names:
        if isinstance(function.__globals__.get(name), _PLAIN):
            yield name, functools.partial(function.__globals__.get, name)
