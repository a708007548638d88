"""``FlatGraph``: one graph of forward and backward pass, and the meaning of its inputs and results."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import sympy
import torch
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from ..capture.branches import Assumption
from ..core.indices import IndexRange
from ..fx.symbols import SymbolTable
from ..fx.values import reached

aten = torch.ops.aten


@dataclass
class FlatGraph:
    """A flat graph, and the meaning of its placeholders and results.

    Attributes:
        module: The graph; placeholders and results are tensors in no particular order.
        state: Placeholder -> canonical name of the model's parameter or buffer.
        constants: Placeholder -> value, for tensors that are not the model's parameters or buffers.
        batch: Placeholder -> index of the batch input.
        tangents: Placeholder -> index of the output whose gradient it takes; of a step's loss, it is the loss scale.
        outputs: Results of the captured module, in order.
        conditions: Its results after these, conditions on values.
        assumptions: The values of the conditions with which the graph is valid.
        gradients: Canonical name of a parameter -> its gradient.
        input_gradients: Index of a batch input that requires grad -> its gradient.
        buffer_updates: Canonical name of a buffer -> its new value.
        input_updates: Index of a batch input that is changed in place -> its new value.
        symbols: The symbolic sizes.
        left: The number of outputs, at the end, that a run leaves outside.
        index_ranges: The ranges that operators allow for inputs used as indices.
    """

    module: torch.fx.GraphModule
    state: dict[torch.fx.Node, str]
    constants: dict[torch.fx.Node, torch.Tensor]
    batch: dict[torch.fx.Node, int]
    tangents: dict[torch.fx.Node, int]
    outputs: list[torch.fx.Node]
    gradients: dict[str, torch.fx.Node]
    input_gradients: dict[int, torch.fx.Node]
    buffer_updates: dict[str, torch.fx.Node]
    input_updates: dict[int, torch.fx.Node]
    symbols: SymbolTable
    left: int = 0
    conditions: list[torch.fx.Node] = field(default_factory=list)
    assumptions: Sequence[Assumption] = ()
    index_ranges: Sequence[IndexRange] = ()

    @property
    def tangent(self) -> torch.fx.Node | None:
        """The placeholder of a step's loss scale; None for evaluation."""
        return next(iter(self.tangents), None)

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Updates outputs, gradients and other results where the context replaces their nodes."""
        # The graph's output node follows replacements, so it lists all results for the time of the context.
        (end,) = self.module.graph.find_nodes(op="output")
        several = (self.gradients, self.input_gradients, self.buffer_updates, self.input_updates)
        end.args = ((*self.outputs, *self.conditions, *(node for part in several for node in part.values())),)
        yield
        results = iter(end.args[0])
        self.outputs[:] = itertools.islice(results, len(self.outputs))
        self.conditions[:] = itertools.islice(results, len(self.conditions))
        for part in several:
            for key in part:
                part[key] = next(results)  # type: ignore[index]

    def read_sizes_from_batch(self) -> None:
        """Makes the graph read symbolic sizes from batch inputs: reading from an activation would keep it alive."""
        places: dict[sympy.Expr, tuple[torch.fx.Node, int]] = {}
        for size, node, axis in _sizes_of(self.batch):
            places.setdefault(size, (node, axis))
        for size, node in self._reads():
            node.args = places.get(size, node.args)

    def read_sizes_from_needed_inputs(self, outputs: Iterable[torch.fx.Node]) -> None:
        """Reads a size that several inputs have from one whose values all readers of the size need anyway.

        PyTorch may read it from any of them, such as the label, which inference would have to feed only for its size.

        Args:
            outputs: The outputs that may be fetched without the others.
        """
        needed = [reached([output], _read_values) for output in outputs]
        places: dict[sympy.Expr, list[tuple[torch.fx.Node, int]]] = {}
        for size, node, axis in _sizes_of(self.batch):
            places.setdefault(size, []).append((node, axis))
        for size, node in self._reads():
            readers = [nodes for nodes in needed if node in nodes]
            if node.args[0] not in self.batch or all(node.args[0] in nodes for nodes in readers):
                continue
            better = [place for place in places.get(size, ()) if all(place[0] in nodes for nodes in readers)]
            if better:
                node.args = better[0]

    def read_no_strides(self) -> None:
        """Computes strides and offsets of tensors, which ONNX lacks, from the sizes of batch inputs.

        AOTAutograd reads a size from a stride where both are the same expression, as in ``x.reshape(b, -1)``.
        """
        places = {size: (node, axis) for size, node, axis in reversed([*_sizes_of(self.batch)])}
        graph = self.module.graph
        start = next(node for node in graph.nodes if node.op != "placeholder")
        for target in (aten.sym_stride.int, aten.sym_storage_offset.default):
            for node in graph.find_nodes(op="call_function", target=target):
                expression = node.meta["val"].node.expr
                if not expression.free_symbols <= set(places):
                    continue
                last = start.prev  # sympy_interp inserts several nodes behind it, which get their sizes below
                with graph.inserting_before(start):
                    sizes = {
                        symbol: torch.fx.Proxy(graph.call_function(aten.sym_size.int, places[symbol]))
                        for symbol in expression.free_symbols
                    }
                    value = sympy_interp(PythonReferenceAnalysis, sizes, expression).node
                while (last := last.next) is not start:
                    last.meta["val"] = last.target(*torch.fx.map_arg(last.args, lambda source: source.meta["val"]))
                node.replace_all_uses_with(value)
                graph.erase_node(node)

    def _reads(self) -> Iterator[tuple[sympy.Expr, torch.fx.Node]]:
        """Yields the nodes that read symbolic sizes from tensors, each with the size."""
        for node in self.module.graph.find_nodes(op="call_function", target=aten.sym_size.int):
            size = node.meta["val"]
            if isinstance(size, torch.SymInt):
                yield size.node.expr, node


def _read_values(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Returns the nodes whose values a node reads, which are not those that it reads only for their sizes."""
    return [] if node.target == aten.sym_size.int else node.all_input_nodes


def _sizes_of(nodes: Iterable[torch.fx.Node]) -> Iterator[tuple[sympy.Expr, torch.fx.Node, int]]:
    """Yields the symbolic sizes of nodes, each with the node and the axis that have it."""
    for node in nodes:
        for axis, size in enumerate(node.meta["val"].shape):
            if isinstance(size, torch.SymInt):
                yield size.node.expr, node, axis
