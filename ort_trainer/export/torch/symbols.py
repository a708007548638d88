"""Translates torch's symbolic sizes into expressions over the dimension names of the model description."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.printers import PythonPrinter

from ...core.dims import evaluate
from ...options import InputDescription
from ...step import Dim
from .source_lines import line_of_condition

__all__ = ["SymbolTable", "hint", "is_choice_of_library", "number_of_elements", "size_in_bytes"]

# PyTorch compares sizes (a batch below 16, ...) to choose a convolution library; the results are the same.
_CHOICE_OF_LIBRARY = re.compile(r"_subclasses/fake_impls\.py:\d+ in conv\)")


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


class SymbolTable:
    """Maps torch's symbols to the dimensions of the batch.

    Args:
        shape_env: The record of symbols and the conditions on them.
        inputs: Descriptions of the batch inputs.
        shapes: The exporter's shapes of the same inputs.
        above_one: Symbols whose size 1 the model treats differently.

    Attributes:
        fixed: Name of a dimension that the exporter fixed -> its size.
    """

    def __init__(
        self,
        shape_env: ShapeEnv,
        inputs: Sequence[InputDescription],
        shapes: Sequence[Sequence[Any]],
        above_one: Collection[sympy.Symbol] = (),
    ) -> None:
        self._shape_env = shape_env
        self._above_one = above_one
        self._names: dict[sympy.Symbol, str] = {}
        for symbol, sources in shape_env.var_to_sources.items():
            for source in sources:
                axis = getattr(source, "idx", None)
                index = getattr(getattr(source, "base", None), "index", None)
                if axis is not None and index is not None and isinstance(inputs[index].shape[axis], str):
                    self._names[symbol] = str(inputs[index].shape[axis])
        values = shape_env.backed_var_to_val
        self._sizes = {name: int(values[symbol]) for symbol, name in self._names.items() if symbol in values}
        self.fixed: dict[str, int] = {}
        for entry, shape in zip(inputs, shapes, strict=True):
            for described, size in zip(entry.shape, shape, strict=True):
                value = self.expression(size)
                if isinstance(described, str) and isinstance(value, int):
                    self.fixed[described] = value

    def expression(self, size: int | torch.SymInt) -> Dim | None:
        """Returns a size as an expression over described dimensions; None if it depends on the values of a batch."""
        if isinstance(size, int):
            return size
        return self._print(size.node.expr)

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

    def guards(self) -> tuple[list[str], dict[str, int]]:
        """Returns the conditions under which the graph is valid.

        Returns:
            The conditions as expressions, and the sizes of symbols whose conditions have no expression: for these, the
            graph is valid only at the exported size.
        """
        names = sorted({self._names[symbol] for symbol in self._above_one if symbol in self._names})
        conditions = [f"dim({name!r}) >= 2" for name in names if name not in self.fixed]
        frozen: dict[str, int] = {}
        for guard in self._shape_env.guards:
            if is_choice_of_library(guard):
                continue
            condition = self._print(guard.expr)
            if condition is None:
                for symbol in guard.expr.free_symbols & set(self._names):
                    frozen[self._names[symbol]] = self._sizes[self._names[symbol]]
            elif isinstance(condition, str) and condition not in conditions:
                conditions.append(condition)
        return conditions, frozen

    def reason(self, name: str) -> str:
        """Returns the line where the model fixed a symbolic dimension; "" if the exporter does not know it."""
        about = [g for g in self._shape_env.guards if any(self._names.get(s) == name for s in g.expr.free_symbols)]
        # An equality fixes the size; an earlier bound may not.
        about.sort(key=lambda guard: not isinstance(guard.expr, sympy.Eq))
        return line_of_condition(about[0].sloc) if about else ""

    def _print(self, expression: sympy.Basic) -> Dim | None:
        if not expression.free_symbols <= set(self._names):
            return None
        named = expression.xreplace({s: sympy.Symbol(f"dim({self._names[s]!r})", integer=True) for s in self._names})
        if not named.free_symbols:
            return int(bool(named)) if named.is_Boolean else int(named)  # type: ignore[call-overload, no-any-return]
        try:
            text = str(PythonPrinter().doprint(named))
            evaluate(text, self._sizes)  # checks that it can be read back
        except (NotImplementedError, AttributeError, KeyError, ValueError, ZeroDivisionError):
            return None
        return text
