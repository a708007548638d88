"""Computes numbers, such as ``(batch + 1) ** 0.5``, in double precision as Python does.

What a program computes with sizes is an operator of Python in its graph, which torch.onnx would compute in single
precision. Here it becomes an operator on tensors without dimensions, and is rounded once, where it is read::

    pow(size, 0.5) -> mul(x, number)    becomes    pow.Tensor_Tensor(double(size), 0.5) -> to(float32) -> mul(x, number)
"""

from __future__ import annotations

import builtins
import math
import operator
from typing import Any

import torch

from ...fx.operator_table import Operator

aten = torch.ops.aten

_FUNCTIONS = ("sqrt", "cos", "cosh", "sin", "sinh", "tan", "tanh", "asin", "acos", "atan", "log2")
_OPERATORS: dict[Any, Operator] = {
    operator.add: aten.add.Tensor,
    operator.sub: aten.sub.Tensor,
    operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor,
    operator.pow: aten.pow.Tensor_Tensor,
    operator.neg: aten.neg.default,
    operator.abs: aten.abs.default,
    torch.sym_max: aten.maximum.default,
    torch.sym_min: aten.minimum.default,
    **{getattr(torch, f"_sym_{name}"): getattr(aten, name).default for name in _FUNCTIONS},
}
_ROUNDED: dict[Any, Operator] = {
    math.floor: aten.floor.default,
    math.ceil: aten.ceil.default,
    math.trunc: aten.trunc.default,
    torch.sym_int: aten.trunc.default,
    builtins.round: aten.round.default,  # both round halves to even numbers
}


def compute_numbers_in_doubles(graph: torch.fx.Graph) -> None:
    """Replaces all numbers that aren't integers by tensors in double precision, each rounded only where it is read."""
    tensors = [node.meta["val"] for node in graph.nodes if isinstance(node.meta.get("val"), torch.Tensor)]
    if tensors:
        numbers = _Numbers(graph, tensors[0].new_empty((), dtype=torch.float64))
        for node in list(graph.nodes):
            if node.op in ("call_function", "output"):
                numbers.replace(node)
        graph.eliminate_dead_code()


class _Numbers:
    """Replaces the numbers of a graph.

    Args:
        graph: The graph, which is changed in place.
        like: A traced double without dimensions.
    """

    def __init__(self, graph: torch.fx.Graph, like: torch.Tensor) -> None:
        self._graph, self._like = graph, like
        self._doubles: dict[torch.fx.Node, torch.fx.Node] = {}  # number or size -> its double
        self._rounded: dict[tuple[torch.fx.Node, torch.dtype], torch.fx.Node] = {}

    def replace(self, node: torch.fx.Node) -> None:
        """Replaces a node that computes a number, and in other nodes the numbers that they read."""
        is_number = _is_number(node)
        reads = [source for source in node.all_input_nodes if _is_number(source) and source in self._doubles]
        with self._graph.inserting_before(node):
            if is_number and node.target is torch.sym_float:
                self._doubles[node] = self._double(node.args[0])
            elif is_number and node.target in _OPERATORS:
                self._doubles[node] = self._add(_OPERATORS[node.target], *map(self._double, node.args))
            elif is_number and node.target in (operator.mod, operator.floordiv):
                self._doubles[node] = self._divide(node.target, *map(self._double, node.args))
            elif reads and node.target in _ROUNDED and node.args[1:] in ((), (None,)):
                integer = self._add(_ROUNDED[node.target], self._double(node.args[0]))
                integer = self._add(aten._to_copy.default, integer, dtype=torch.int64)
                integer.meta["val"] = node.meta["val"]
                node.replace_all_uses_with(integer)
            else:
                for number in reads:
                    node.replace_input_with(number, self._round(self._doubles[number], _dtype_for(node)))

    def _add(self, target: Operator, *args: Any, **kwargs: Any) -> torch.fx.Node:
        node = self._graph.call_function(target, args, kwargs)
        node.meta["val"] = self._like
        return node

    def _double(self, number: Any) -> torch.fx.Node:
        """Returns a tensor in double precision for a number or a size."""
        if not isinstance(number, torch.fx.Node):
            return self._add(aten.scalar_tensor.default, number, dtype=torch.float64)
        if number not in self._doubles:
            self._doubles[number] = self._add(aten.scalar_tensor.default, number, dtype=torch.float64)
        return self._doubles[number]

    def _divide(self, target: Any, dividend: torch.fx.Node, divisor: torch.fx.Node) -> torch.fx.Node:
        """Returns the remainder or the quotient rounded down as Python computes them: from an exact remainder."""
        zero = self._double(0.0)
        remainder = self._add(aten.fmod.Tensor, dividend, divisor)
        other_sign = self._add(aten.lt.Tensor, self._add(aten.mul.Tensor, remainder, divisor), zero)
        other_sign.meta["val"] = self._like.new_empty((), dtype=torch.bool)
        corrected = self._add(aten.add.Tensor, remainder, divisor)
        remainder = self._add(aten.where.self, other_sign, corrected, remainder)
        if target is operator.mod:
            return remainder
        multiple = self._add(aten.sub.Tensor, dividend, remainder)
        return self._add(aten.round.default, self._add(aten.div.Tensor, multiple, divisor))

    def _round(self, double: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
        if dtype == torch.float64:
            return double
        if (double, dtype) not in self._rounded:
            with self._graph.inserting_after(double):
                rounded = self._add(aten._to_copy.default, double, dtype=dtype)
            rounded.meta["val"] = self._like.new_empty((), dtype=dtype)
            self._rounded[double, dtype] = rounded
        return self._rounded[double, dtype]


def _is_number(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymFloat)


def _dtype_for(node: torch.fx.Node) -> torch.dtype:
    """Returns the precision in which an operator reads a number: PyTorch rounds it to that of the tensors beside it."""
    result = node.meta.get("val")
    beside = [source.meta.get("val") for source in node.all_input_nodes]
    dtypes = [value.dtype for value in beside if isinstance(value, torch.Tensor)]
    if isinstance(result, torch.Tensor):
        if not dtypes:  # such as torch.full(..., number)
            return result.dtype if result.dtype.is_floating_point else torch.float64
        dtypes.append(result.dtype)
    return torch.float64 if torch.float64 in dtypes else torch.float32
