"""Symbolic sizes as expressions over the dimension names of the model description, and where the model fixes them."""

from __future__ import annotations

import contextlib
import dataclasses
import linecache
import math
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import sympy
import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, uninteresting_files
from torch.utils._sympy.functions import FloatPow, OpaqueUnaryFn_sqrt
from torch.utils._sympy.printers import PythonPrinter

from ..core.dims import evaluate
from ..options import InputDescription
from ..step import Dim
from .explain import LIBRARIES, shown_place

# PyTorch compares sizes (a batch below 16, ...) to choose a convolution library, and Inductor to choose how loops add
# up (one by one, up to 4096 elements); the results are the same, to rounding.
_CHOICE_OF_LIBRARY = re.compile(r"_subclasses/fake_impls\.py:\d+ in conv\)|cpp\.py:\d+ in need_use_acc_helper\)")
# It compares numbers of elements to find the strides of a view, or whether they matter: those that it finds for several
# elements are right for one or none, too.
_STRIDES = re.compile(r"in (_compute_stride|is_contiguous)\)")
_ARITHMETIC = ("_add", "_sub", "_mul", "_eq", "_ne", "_ge", "_gt", "_le", "_lt", "_sym_max", "_sym_min")
_PYTHON = str(Path(os.__file__).parent)
_CALLS_MODEL = str(Path(__file__).parents[1] / "capture" / "step_module.py")
_CALLS_OPERATOR = str(Path(torch.__file__).with_name("_ops.py"))


def is_choice_of_library(guard: Any) -> bool:
    """Returns whether a condition on sizes only chooses a library, which does not change results."""
    return _CHOICE_OF_LIBRARY.search(str(guard.sloc)) is not None


def hint(size: int | torch.SymInt) -> int:
    """Returns a size; for a symbolic one, the sample's."""
    return size if isinstance(size, int) else int(size.node.hint or 1)


def number_of_elements(value: torch.Tensor) -> int:
    """Returns the number of elements of a tensor at the sample's sizes."""
    return math.prod(hint(size) for size in value.shape)


def size_in_bytes(value: torch.Tensor) -> int:
    """Returns the number of bytes of a tensor at the sample's sizes."""
    return number_of_elements(value) * int(value.element_size())


class SymbolNames:
    """Writes sizes as expressions over named dimensions.

    Args:
        names: torch's symbol -> name of the dimension.
        sizes: Name of a dimension -> its size in the sample, to check expressions with.
    """

    def __init__(self, names: Mapping[sympy.Symbol, str], sizes: Mapping[str, int]) -> None:
        self._names, self._sizes = names, sizes

    def expression(self, size: int | torch.SymInt) -> Dim | None:
        """Returns a size as an expression over described dimensions; None if it depends on the values of a batch."""
        if isinstance(size, int):
            return size
        return self._print(size.node.expr)

    def add(self, name: str, size: torch.SymInt) -> None:
        """Names a symbolic size that does not come from the batch."""
        self._names = {**self._names, size.node.expr: name}
        self._sizes = {**self._sizes, name: hint(size)}

    def alike(self, size: torch.SymInt) -> set[sympy.Symbol]:
        """Returns all of torch's symbols that have the same name as a size."""
        name = self._names.get(size.node.expr)
        return {symbol for symbol, other in self._names.items() if other == name}

    def number(self, value: torch.SymFloat) -> float | str | None:
        """Returns a number computed from sizes, such as a ratio, in the form of :meth:`expression`."""
        expression = value.node.expr
        if not expression.free_symbols:
            return float(expression)
        text = self._print(expression)
        return text if isinstance(text, str) else None

    def shape(self, value: torch.Tensor) -> tuple[Dim, ...] | None:
        """Returns the shape of a traced tensor; None if any size depends on the values of a batch."""
        sizes = [self.expression(size) for size in value.shape]
        return None if any(size is None for size in sizes) else tuple(size for size in sizes if size is not None)

    def _named(self, expression: sympy.Basic) -> sympy.Basic:
        # Symbols named like calls, so that the printed text is an expression of core/dims.py: 2*dim('batch').
        named = expression.xreplace({s: sympy.Symbol(f"dim({self._names[s]!r})", integer=True) for s in self._names})
        return named.replace(OpaqueUnaryFn_sqrt, lambda value: FloatPow(value, sympy.Float(0.5)))

    def _print(self, expression: sympy.Basic) -> Dim | None:
        """Returns an expression over torch's symbols as text over names, or a number; None if a symbol has no name."""
        if not expression.free_symbols <= set(self._names):
            return None
        named = self._named(expression)
        if not named.free_symbols:
            return int(bool(named)) if named.is_Boolean else int(named)  # type: ignore[call-overload, no-any-return]
        try:
            text = str(PythonPrinter().doprint(named)).replace("torch.sym_float(", "float(")
            evaluate(text, self._sizes)  # checks that it can be read back
        except (NotImplementedError, AttributeError, KeyError, ValueError, ZeroDivisionError):
            return None
        return text


class SymbolTable(SymbolNames):
    """Maps torch's symbols to the dimensions of the batch.

    Args:
        shape_env: The record of symbols and the conditions on them.
        inputs: Descriptions of the batch inputs.
        shapes: The exporter's shapes of the same inputs.
        least: The least size of a symbol whose sizes 0 or 1 the model treats differently.

    Attributes:
        fixed: Name of a dimension that the exporter fixed -> its size.
    """

    def __init__(
        self,
        shape_env: ShapeEnv,
        inputs: Sequence[InputDescription],
        shapes: Sequence[Sequence[Any]],
        least: Mapping[sympy.Symbol, int] = {},
    ) -> None:
        self._shape_env = shape_env
        self._least = least
        names: dict[sympy.Symbol, str] = {}
        for symbol, sources in shape_env.var_to_sources.items():
            for source in sources:
                axis = getattr(source, "idx", None)
                index = getattr(getattr(source, "base", None), "index", None)
                if axis is not None and index is not None and isinstance(inputs[index].shape[axis], str):
                    names[symbol] = str(inputs[index].shape[axis])
        values = shape_env.backed_var_to_val
        super().__init__(names, {name: int(values[symbol]) for symbol, name in names.items() if symbol in values})
        self._required: tuple[list[str], dict[str, int]] = [], {}
        self.fixed: dict[str, int] = {}
        for entry, shape in zip(inputs, shapes, strict=True):
            for described, size in zip(entry.shape, shape, strict=True):
                value = self.expression(size)
                if isinstance(described, str) and isinstance(value, int):
                    self.fixed[described] = value

    def guards(self) -> tuple[list[str], dict[str, int]]:
        """Returns the conditions under which the graph is valid.

        Returns:
            The conditions as expressions, and the sizes of symbols whose conditions have no expression: for these, the
            graph is valid only at the exported size.
        """
        least = {self._names[symbol]: size for symbol, size in self._least.items() if symbol in self._names}
        conditions = [f"dim({name!r}) >= {size}" for name, size in sorted(least.items()) if name not in self.fixed]
        conditions += self._required[0]
        frozen = dict(self._required[1])
        for guard in self._shape_env.guards:
            if is_choice_of_library(guard) or self._asks_for_several(guard):
                continue
            condition = self._print(guard.expr)
            if condition is None:
                for symbol in guard.expr.free_symbols & set(self._names):
                    frozen[self._names[symbol]] = self._sizes[self._names[symbol]]
            elif isinstance(condition, str) and condition not in conditions:
                conditions.append(condition)
        return conditions, frozen

    def _asks_for_several(self, guard: Any) -> bool:
        """Returns whether a condition only says, where strides are found, that sizes are larger than 1."""
        if not _STRIDES.search(str(guard.sloc)):
            return False
        named = self._named(guard.expr)
        more = {s: sympy.Symbol(str(s), integer=True, nonnegative=True) + 2 for s in named.free_symbols}
        return bool(named.xreplace(more) == sympy.true)

    def require(self, conditions: Sequence[str], frozen: Mapping[str, int]) -> None:
        """Adds conditions that another process has found, in the form of :meth:`guards`."""
        self._required[0].extend(text for text in conditions if text not in self._required[0])
        self._required[1].update(frozen)

    def reason(self, name: str) -> str:
        """Returns the line where the model fixed a symbolic dimension; "" if the exporter does not know it."""
        about = [g for g in self._shape_env.guards if any(self._names.get(s) == name for s in g.expr.free_symbols)]
        # An equality fixes the size; an earlier bound may not.
        about.sort(key=lambda guard: not isinstance(guard.expr, sympy.Eq))
        return _line_of_condition(about[0].sloc) if about else ""


@contextlib.contextmanager
def remembered_sizes() -> Iterator[None]:
    """Caches torch's arithmetic with symbolic sizes, which takes a third of an export.

    Every fake tensor computes its strides, and whether it is contiguous in some order: 200,000 results for a BERT-base,
    only 700 of them different.
    """
    cache: dict[tuple[Any, ...], SymNode] = {}

    def remembering(name: str) -> Callable[[SymNode, Any], SymNode]:
        compute = getattr(SymNode, name)

        def method(self: SymNode, other: Any) -> SymNode:
            if type(other) is not SymNode or get_proxy_mode() is not None:  # while tracing, every result is recorded
                return compute(self, other)  # type: ignore[no-any-return]
            key = name, self.shape_env, self._expr, other._expr, self.pytype, other.pytype
            result = cache.get(key)
            if result is None:
                result = cache[key] = compute(self, other)
            return result

        return method

    with contextlib.ExitStack() as stack:
        for name in _ARITHMETIC:
            stack.enter_context(mock.patch.object(SymNode, name, remembering(name)))
        yield


@contextlib.contextmanager
def users_lines_of_conditions() -> Iterator[None]:
    """Makes torch record the user's line with every condition on sizes; by default it records only its own."""
    original = ShapeEnv._get_sloc
    uninteresting_files().add(__file__)  # or torch would take the wrapper below for the line that caused a condition

    def noted(self: ShapeEnv, *args: Any, **kwargs: Any) -> Any:
        place, line = original(self, *args, **kwargs), _current_line_of_the_user()
        return place if line is None else dataclasses.replace(place, maybe_user_loc=line)

    with mock.patch.object(ShapeEnv, "_get_sloc", noted):
        yield


def _current_line_of_the_user() -> str | None:
    """Returns the innermost running line of model and loss, ignoring PyTorch, this package and Python's library."""
    frame: FrameType | None = sys._getframe(2)
    users_frame = None
    while frame is not None and frame.f_code.co_filename != _CALLS_MODEL:
        file = frame.f_code.co_filename
        of_python = file.startswith(_PYTHON) and "site-packages" not in file
        if users_frame is None and not of_python and not file.startswith((*LIBRARIES, "<")):
            users_frame = frame
        frame = frame.f_back
    if frame is None or users_frame is None:
        return None
    file, line = users_frame.f_code.co_filename, users_frame.f_lineno
    return shown_place((file, str(line), users_frame.f_code.co_name, linecache.getline(file, line)))


def _line_of_condition(place: Any) -> str:
    """Returns the line, the user's or a library's, that caused a condition on sizes; "" if it is unknown.

    Args:
        place: The location that torch records with a condition; its own text truncates the path.
    """
    if place.maybe_user_loc is not None:
        return str(place.maybe_user_loc)
    frame = place.framework_loc
    if not isinstance(frame, traceback.FrameSummary):
        return str(place).strip("()")
    if frame.filename == _CALLS_OPERATOR:
        return ""
    return shown_place((frame.filename, str(frame.lineno), frame.name, frame.line or "")).removesuffix(": ")
