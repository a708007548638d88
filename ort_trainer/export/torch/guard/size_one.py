"""Detects where a model treats a symbolic size of 1 differently from larger sizes.

The exporter assumes that symbolic sizes are at least 2, so it evaluates a condition such as ``x.shape[0] > 1`` at once,
without a trace in the graph or its guards. In the model's code, such a condition compares a ``torch.SymInt`` with a
number, so the comparison operators are watched.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import sympy
import torch

__all__ = ["squeezed_sizes", "watch_size_one"]

aten = torch.ops.aten

_TORCH = str(Path(torch.__file__).parent)
# Model code within torch: batch norm in training, for example, refuses a single value per channel.
_TORCH_MODELS = str(Path(torch.nn.__file__).parent)
_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "__gt__": operator.gt,
    "__ge__": operator.ge,
    "__lt__": operator.lt,
    "__le__": operator.le,
    "__eq__": operator.eq,
    "__ne__": operator.ne,
}


@contextlib.contextmanager
def watch_size_one() -> Iterator[set[sympy.Symbol]]:
    """Yields a set that collects the symbols for which the model's comparisons distinguish size 1 from size 2."""
    special: set[sympy.Symbol] = set()

    def watched(name: str) -> Callable[[Any, Any], Any]:
        original, compare = getattr(torch.SymInt, name), _COMPARISONS[name]

        def method(self: Any, other: Any) -> Any:
            file = sys._getframe(1).f_code.co_filename
            if isinstance(other, int) and (not file.startswith(_TORCH) or file.startswith(_TORCH_MODELS)):
                expression = self.node.expr
                symbols = expression.free_symbols
                if len(symbols) == 1:
                    (symbol,) = symbols
                    one, two = (bool(compare(int(expression.subs(symbol, size)), other)) for size in (1, 2))
                    if one != two:
                        special.add(symbol)
            return original(self, other)

        return method

    with contextlib.ExitStack() as stack:
        for name in _COMPARISONS:
            stack.enter_context(mock.patch.object(torch.SymInt, name, watched(name)))
        yield special


def squeezed_sizes(graph: torch.fx.Graph) -> list[torch.SymInt]:
    """Returns the symbolic sizes of dimensions that a graph squeezes: it is valid only if they are not 1."""
    sizes = []
    for node in graph.find_nodes(op="call_function", target=aten.squeeze.default):
        sizes += list(node.args[0].meta["val"].shape)
    for target in (aten.squeeze.dim, aten.squeeze.dims):
        for node in graph.find_nodes(op="call_function", target=target):
            dims = node.args[1] if target is aten.squeeze.dims else [node.args[1]]
            shape = node.args[0].meta["val"].shape
            sizes += [shape[dim] for dim in dims if len(shape)]
    return [size for size in sizes if isinstance(size, torch.SymInt)]
