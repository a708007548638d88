"""Writes operators of a captured graph as a program."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from ...core.dims import symbols_of
from ...engine.programs import Program
from ...engine.programs.program import GETITEM, Order
from ...fx.symbols import SymbolNames
from ...fx.values import Node, base_of, is_view, refuse, tensors_of
from .reuse import find_reuse

# A view that was possible at capture may be impossible for a tensor that comes from another program.
_TARGETS = {
    "aten.view.default": "aten.reshape.default",
    "aten._unsafe_view.default": "aten.reshape.default",
}


class Encoder:
    """Writes one program.

    Args:
        symbols: The symbolic sizes.
        sizes: Symbolic size -> batch input and axis where it can be read.
        orders: Value that is passed between programs -> its memory order.
        batch: Inputs that a run may lack, with all results that need their values.

    Attributes:
        inputs: The nodes that the program takes.
        operators: The node that each of its steps computes.
    """

    def __init__(
        self,
        symbols: SymbolNames,
        sizes: Mapping[str, tuple[Node, int]],
        orders: Mapping[Node, Order],
        batch: Collection[Node] = (),
    ) -> None:
        self._symbols, self._sizes, self._orders, self._batch = symbols, sizes, orders, batch
        self.inputs: list[Node] = []
        self.operators: list[Node | None] = []
        self._program = Program()
        self._places: dict[Node, dict[str, int]] = {}  # {"x": number of an input}, or {"v": number of a step}
        self._done: set[Node] = set()

    def write(self, nodes: Sequence[Node], results: Collection[Node]) -> Program:
        """Returns the program of some operators.

        Args:
            nodes: The operators, in order.
            results: What the program returns: some of the operators, or views of them or of inputs.
        """
        for node in nodes:
            self._step(node)
        for node in results:
            place = self._place(node)
            if "x" in self._places[base_of(node)] or (is_view(node) and base_of(node) in results):
                # Memory of an input, a constant or another result must not be returned as a second value.
                place = self._add(node, "aten.clone.default", [place], {})
            self._program.results.append((place["v"], self._orders.get(node)))
        return self._program

    def _place(self, node: Node) -> dict[str, int]:
        """Returns where in the program the value of a node is; adds views and inputs on first use."""
        if node not in self._places:
            if is_view(node):
                self._step(node)
            else:
                self._take(node)
        return self._places[node]

    def _take(self, node: Node) -> int:
        """Returns the number of the program's input that has the value of a node; adds the input on first use."""
        if node not in self._places:
            self._program.inputs.append(self._orders.get(node))
            self._places[node] = {"x": len(self.inputs)}
            self.inputs.append(node)
        return self._places[node]["x"]

    def _step(self, node: Node) -> None:
        """Writes an operator, so that it overwrites an operand if that is possible."""
        if node.target is operator.getitem:
            target = GETITEM
        else:
            overload = node.target
            assert isinstance(overload, torch._ops.OpOverload)
            target = str(overload)
        reuse = (
            find_reuse(node, functools.partial(self._is_free, node))
            if target != GETITEM and not is_view(node)
            else None
        )
        args = [self._argument(node, value) for value in node.args]
        kwargs = {name: self._argument(node, value) for name, value in node.kwargs.items()}
        # Everything is on one device, that of the step, and pinning memory is up to the caller.
        kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "pin_memory")}
        if reuse is not None:
            target = reuse.target
            if reuse.argument is not None:
                kwargs[reuse.argument] = self._place(reuse.operand)
        self._places[node] = self._add(node, _TARGETS.get(target, target), args, kwargs)
        self._done.add(node)

    def _is_free(self, node: Node, base: Node) -> bool:
        """Returns whether the program allocated a value, and nothing but ``node`` will still read it or its views."""
        if base not in self._done:
            return False
        pending = [base]
        while pending:
            for user in pending.pop().users:
                if is_view(user):
                    pending.append(user)
                elif user not in self._done and user is not node and (tensors_of(user) or user.op == "output"):
                    return False
        return True

    def _add(self, node: Node, target: str, args: list[Any], kwargs: dict[str, Any]) -> dict[str, int]:
        self.operators.append(node)
        self._program.steps.append((target, args, kwargs))
        return {"v": len(self._program.steps) - 1}

    def _argument(self, node: Node, value: Any) -> Any:
        """Returns an argument of an operator in the form of a program."""
        if isinstance(value, Node):
            if isinstance(value.meta.get("val"), (torch.Tensor, tuple, list)):
                return self._place(value)
            value = value.meta.get("val", value)
        if isinstance(value, torch.SymInt):
            return self._computed(node, "dim", self._symbols.expression(value))
        if isinstance(value, torch.SymFloat):
            return self._computed(node, "number", self._symbols.number(value))
        if isinstance(value, (list, tuple)):
            return [self._argument(node, entry) for entry in value]
        if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
            return {"torch": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return None
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise refuse(node, f"takes {value!r}")

    def _computed(self, node: Node, kind: str, expression: float | str | None) -> Any:
        """Returns a number that a program computes from sizes; makes it read the sizes from inputs."""
        if expression is None:
            raise refuse(node, "takes a size that depends on the values of the batch")
        if not isinstance(expression, str):
            return expression
        for symbol in symbols_of(expression):
            if symbol not in self._program.symbols:
                source, axis = self._place_of_size(symbol)
                self._program.symbols[symbol] = (self._take(source), axis)
        return {kind: expression}

    def _place_of_size(self, symbol: str) -> tuple[Node, int]:
        """Returns where to read a size: if possible in an input that the program takes anyway."""
        for node in filter(self._batch.__contains__, self.inputs):
            for axis, size in enumerate(node.meta["val"].shape):
                if isinstance(size, torch.SymInt) and self._symbols.expression(size) == f"dim({symbol!r})":
                    return node, axis
        return self._sizes[symbol]
