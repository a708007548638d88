"""Builds the graph of programs that computes a captured graph."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from .....core.errors import ExportError
from .....engine.programs.program import Order
from .....engine.torch_memory import shaped
from .....options import InputDescription
from .....step import SIZES, ProgramGraph, dtype_name
from .....step.emitter import Names
from .....step.program_graph import Constant, ProgramCall
from ...fx.symbols import SymbolNames
from ...fx.values import Node, base_of, memory_order, tensors_of
from ...graph.differentiate import FlatGraph
from ...graph.divide import needed_for
from .encode import Encoder
from .masks import open_masks
from .padding import remove_padding
from .partition import partition, used_by
from .rewrites import rewrite

if TYPE_CHECKING:
    from ..loops import LoopsEncoder

__all__ = ["ProgramBuilder", "add_sizes", "lower_step", "sizes_of"]

aten = torch.ops.aten
Named = Sequence[tuple[Node, str]]
Sizes = Mapping[str, tuple[Node, int]]


def lower_step(
    found: FlatGraph,
    inputs: Named,
    results: Named,
    batch: Sequence[tuple[Node, InputDescription]],
    unfetched: Collection[int] = (),
    compiled: bool = False,
    mask: Node | None = None,
) -> tuple[ProgramGraph, Mapping[str, Sequence[Node | None]]]:
    """Returns the programs that compute a captured step, and the operators of each of their nodes.

    Args:
        found: The captured step, which is modified.
        inputs: Placeholders with the names of the graph's inputs, in order.
        results: Nodes with the names of the graph's outputs, in order.
        batch: The placeholders of the batch with their descriptions, from which symbolic sizes can be read.
        unfetched: Places of results that are probably not fetched.
        compiled: Whether to compile what lies between PyTorch's kernels to loops.
        mask: The input that says which places are padded, to leave them out; or None.

    Raises:
        ExportError: If a program can't run an operator of the graph, or it can't be compiled.
    """
    graph = found.module.graph
    for node, name in inputs:
        if node in found.state and node.meta["val"].dtype == torch.bfloat16:
            raise ExportError(f"{name!r} is bfloat16, which graphs of PyTorch's kernels don't take")
    _widen_interface(graph, [node for node, _ in inputs])
    (end,) = graph.find_nodes(op="output")
    end.args = (tuple(_widened(node, end) for node, _ in results),)
    found.read_sizes_from_batch()
    sizes = dict(sizes_of((node, entry.shape) for node, entry in batch))
    if mask is not None:
        open_masks(graph)
        seeds = [node for node, _ in inputs if node not in found.batch]
        sizes |= remove_padding(graph, found.symbols, mask, seeds)
    rewrite(graph, compiled, unfetched=unfetched)
    results = [(node, name) for node, (_, name) in zip(end.args[0], results, strict=True)]
    indices = {entry.input for entry in found.index_ranges}
    checked = [node for node, name in inputs if name in indices]
    builder = ProgramBuilder(
        graph, inputs, results, found.constants, found.symbols, sizes, (), compiled, unfetched, checked
    )
    return builder.build(), builder.operators


def sizes_of(batch: Iterable[tuple[Node, Sequence[int | str]]]) -> Sizes:
    """Returns where the symbolic sizes of inputs can be read: size -> an input and an axis that have it.

    Args:
        batch: Inputs with their described shapes.
    """
    found: dict[str, tuple[Node, int]] = {}
    for node, shape in batch:
        for axis, size in enumerate(shape):
            if isinstance(size, str):
                found.setdefault(size, (node, axis))
    return found


def add_sizes(graph: torch.fx.Graph, sizes: Mapping[str, int | torch.SymInt]) -> tuple[Node, Sizes]:
    """Adds the input :data:`~ort_trainer.step.SIZES`; returns it, and the axis that has each of the sizes."""
    with graph.inserting_before(next(iter(graph.nodes))):
        node = graph.placeholder(SIZES)
    with next(value for other in graph.nodes for value in tensors_of(other)).fake_mode:  # type: ignore[attr-defined]
        node.meta["val"] = shaped(sizes.values())
    return node, {name: (node, axis) for axis, name in enumerate(sizes, 1)}


def _widen_interface(graph: torch.fx.Graph, inputs: Sequence[Node]) -> None:
    """Makes bfloat16 inputs fp32 and casts them back: runs on both kinds of kernels take and return NumPy's dtypes."""
    (first, *_) = (node for node in graph.nodes if node.op != "placeholder")
    for node in inputs:
        if node.meta["val"].dtype == torch.bfloat16:
            with graph.inserting_before(first):
                narrow = graph.call_function(aten._to_copy.default, (node,), {"dtype": torch.bfloat16})
            narrow.meta.update(node.meta)
            node.replace_all_uses_with(narrow)
            narrow.args = (node,)
            node.meta["val"] = node.meta["val"].float()


def _widened(result: Node, end: Node) -> Node:
    """Returns a result, or its fp32 copy if it is bfloat16."""
    if result.meta["val"].dtype != torch.bfloat16:
        return result
    with end.graph.inserting_before(end):
        wide = end.graph.call_function(aten._to_copy.default, (result,), {"dtype": torch.float32})
    wide.meta.update(result.meta)
    wide.meta["val"] = result.meta["val"].float()
    return wide


class ProgramBuilder:
    """Builds the programs that compute a graph as it is.

    Args:
        graph: The graph.
        inputs: Placeholders with the names of the graph's inputs, in order.
        results: Nodes with the names of the graph's outputs, in order.
        constants: Placeholder -> value, for constants.
        symbols: The symbolic sizes.
        sizes: Symbolic size -> an input and an axis that have it.
        ordered: The inputs and results that keep their order in memory; others are contiguous.
        compiled: Whether to compile what lies between PyTorch's kernels to loops.
        unfetched: Places of results that are probably not fetched.
        checked: The inputs that the caller checks before a run, where they are indices.

    Attributes:
        operators: Name of a node -> the operator that each step of its program computes; None if it computes many.

    Raises:
        ExportError: If a program can't run an operator of the graph.
    """

    def __init__(
        self,
        graph: torch.fx.Graph,
        inputs: Named,
        results: Named,
        constants: Mapping[Node, torch.Tensor],
        symbols: SymbolNames,
        sizes: Sizes,
        ordered: Collection[Node] = (),
        compiled: bool = False,
        unfetched: Collection[int] = (),
        checked: Collection[Node] = (),
    ) -> None:
        self._inputs, self._results, self._constants = inputs, results, constants
        self._symbols, self._sizes, self._ordered = symbols, sizes, ordered
        self._graph = graph
        self._programs = partition(graph)
        self._loops: set[Node] = set()  # the operators that are compiled
        if compiled:
            from ..loops import divide_for_loops  # Inductor takes half a second

            needed = needed_for(node for place, (node, _) in enumerate(results) if place not in unfetched)
            nodes = [node for program in self._programs for node in program]
            divided = divide_for_loops(nodes, {node for node in nodes if node not in needed}, checked)
            self._programs = [program for program, _ in divided]
            self._loops = {node for program, of_loops in divided if of_loops for node in program}
        self._names = Names([name for _, name in (*inputs, *results)])
        self._values: dict[Node, str] = {}
        self._orders: dict[Node, Order] = {
            node: memory_order(node.meta["val"]) for node, _ in inputs if node in ordered
        }
        self.operators: dict[str, Sequence[Node | None]] = {}
        self._texts: dict[str, str] = {}  # key of a program -> program
        self._calls: list[ProgramCall] = []
        self._returned: set[str] = set()  # names of the results that a program returns

    def build(self) -> ProgramGraph:
        """Returns the graph."""
        self._values.update(self._inputs)
        constants: dict[str, Constant] = {}
        for node, tensor in self._constants.items():
            name = self._values[node] = self._names.unique(node.name)
            constants[name] = _constant(tensor)
        results = self._assign_results()
        for program, out in zip(self._programs, self._coming_out(results), strict=True):
            if out:  # a program of views alone has none: who reads a view computes it
                self._add(program, out, results)
        for node, name in self._results:
            if name not in self._returned:  # no program returns it: it is an input, a view of one, or a duplicate
                self._add([], [node], {node: name})
        return ProgramGraph(self._texts, tuple(self._calls), constants)

    def _assign_results(self) -> dict[Node, str]:
        """Returns the nodes that a program returns as an output of the model, each under one name."""
        produced = {node for program in self._programs for node in program}
        found: dict[Node, str] = {}
        for node, name in self._results:
            if node not in found and base_of(node) in produced:
                found[node] = name
        return found

    def _coming_out(self, results: Mapping[Node, str]) -> list[list[Node]]:
        """Returns what each program returns to later ones or to the caller, which may be views of what it computes."""
        # A result with a second name (the gradient of two biases that are added) is copied after all programs.
        later = {base_of(node) for node, name in self._results if results.get(node) != name}
        found: list[list[Node]] = []
        for program in reversed(self._programs):
            within = set(program)
            found.append([node for node in program if node in later or node in results])
            found[-1] += [node for node in results if node not in within and base_of(node) in within]
            later |= {base_of(node) for node in used_by(program)}
        return found[::-1]

    def _add(self, nodes: Sequence[Node], results: Sequence[Node], names: Mapping[Node, str]) -> None:
        """Adds the node of a program."""
        for node in results:
            keeps = node not in names or node in self._ordered
            self._orders[node] = memory_order(node.meta["val"]) if keeps else None
        encoder = self._encoder(nodes)
        program = encoder.write(nodes, results)
        outputs = tuple(names.get(node) or self._names.unique(node.name) for node in results)
        inputs = tuple(self._values[node] for node in encoder.inputs)
        self._texts[program.key] = program.to_text()
        name = f"{outputs[0]}_node"
        self.operators[name] = encoder.operators
        self._calls.append(ProgramCall(name, program.key, inputs, outputs))
        for node, output in zip(results, outputs, strict=True):
            self._values.setdefault(node, output)
        self._returned.update(outputs)

    def _encoder(self, nodes: Sequence[Node]) -> Encoder | LoopsEncoder:
        if self._loops.isdisjoint(nodes):
            return Encoder(self._symbols, self._sizes, self._orders)
        from ..loops import LoopsEncoder

        return LoopsEncoder(self._graph, self._sizes, self._orders, self._values)


def _constant(tensor: torch.Tensor) -> Constant:
    value = tensor.detach().cpu().contiguous()
    return Constant(dtype_name(value.dtype), tuple(value.shape), value.reshape(-1).view(torch.uint8).numpy().tobytes())
