"""Sees each Python function of users' code that runs: factories, operators, context managers and callbacks, too."""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .code import is_users
from .places import Access

_WRAPPERS: tuple[Any, ...] = (
    property,
    staticmethod,
    classmethod,
    functools.partial,
    functools.partialmethod,
    functools.cached_property,
)
_WRAPPERS += (functools._lru_cache_wrapper, functools.singledispatchmethod, types.FunctionType)
_WRAPPED = ("__func__", "fget", "fset", "func", "__wrapped__")


class Calls(TorchFunctionMode):
    """A context in which each function of users' code is reported when it first runs in this thread.

    A profile hook sees every call. Most of a capture are PyTorch's own calls, below its operators, so the hook is off
    there: it costs 3 % of a capture, and would cost twice the capture's time. What the garbage collector calls is no
    part of the run.

    Args:
        report: Takes the frame, before the function's first line.
        before_operator: Is called before each of PyTorch's operators.
    """

    def __init__(self, report: Callable[[types.FrameType], None], before_operator: Callable[[], object]) -> None:
        super().__init__()
        self._before_operator = before_operator
        of_collector = (getattr(callback, "__code__", None) for callback in gc.callbacks)
        codes: dict[int, Any] = {id(code): code for code in of_collector}

        def hook(frame: types.FrameType, event: str, _: Any) -> None:
            code = frame.f_code
            if event == "call" and id(code) not in codes:
                codes[id(code)] = code
                if is_users(frame.f_globals.get("__name__")) and code.co_name != "__del__":
                    report(frame)

        self._hook = hook
        self._others: Any = sys.getprofile()

    def __enter__(self) -> Any:
        sys.setprofile(self._hook)
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        sys.setprofile(None)
        if hasattr(self._others, "enable"):  # Python's own profiler
            self._others.enable()
        else:
            sys.setprofile(self._others)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(function, torch._ops.HigherOrderOperator) or any(is_users(kind.__module__) for kind in types):
            return function(*args, **(kwargs or {}))
        hook = sys.getprofile()
        sys.setprofile(None)
        try:
            self._before_operator()
            return function(*args, **(kwargs or {}))
        finally:
            sys.setprofile(hook)


def functions_in(value: Any) -> Iterator[tuple[tuple[Access, ...], types.FunctionType]]:
    """Yields the functions in an attribute of a class or a module, such as a property, each with the steps to it."""
    if isinstance(value, types.FunctionType):
        yield (), value
    for name in _WRAPPED if isinstance(value, _WRAPPERS) else ():
        for steps, function in functions_in(getattr(value, name, None)):
            yield (Access("get", name), *steps), function
