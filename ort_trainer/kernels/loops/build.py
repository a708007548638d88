"""Builds a graph of programs, some of which are compiled loops."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch.fx.node import map_arg

from ...engine.programs import Program
from ...engine.programs.program import Order
from ...fx.symbols import SymbolTable
from ...fx.values import Node, call, is_view, needed_for, tensors_of
from ...graph.divide import part_of
from ...graph.named_graph import NamedGraph
from ..programs.build import ProgramBuilder, WritesProgram
from .compile import Loops, compiled
from .divide import divide_for_loops

aten = torch.ops.aten

# The memory order of an input may differ from the one in which the graph was captured.
_VIEWS = (aten.view.default, aten._unsafe_view.default)
_CONTIGUOUS = {"memory_format": torch.contiguous_format}


class LoopBuilder(ProgramBuilder):
    """Compiles what lies between PyTorch's kernels to loops; see the base class."""

    def __init__(self, graph: NamedGraph) -> None:
        super().__init__(graph)
        fetched = [node for place, (node, _) in enumerate(graph.results) if place not in graph.unfetched]
        needed = needed_for(fetched, sizes=True)
        nodes = [node for program in self._programs for node in program]
        divided = divide_for_loops(
            nodes, {node for node in nodes if node not in needed}, graph.checked, self._sizes.creators
        )
        self._programs = [program for program, _ in divided]
        self._loops = {node for program, of_loops in divided if of_loops for node in program}
        self._uncompiled: dict[str, torch.fx.GraphModule] = {}

    def _finished(self) -> Mapping[str, Program]:
        assert isinstance(self._named.symbols, SymbolTable)
        loops = compiled(self._uncompiled, self._named.symbols)
        programs = {key: _with_loops(program, loops) for key, program in self._written.items()}
        called = {call.name: programs[call.program] for call in self._calls}
        self.operators |= {name: [None] * len(program.steps) for name, program in called.items() if program.loops}
        return programs

    def _encoder(self, nodes: Sequence[Node]) -> WritesProgram:
        if self._loops.isdisjoint(nodes):
            return super()._encoder(nodes)
        return _LoopsEncoder(self._graph, self._named.sizes, self._orders, self._values, self._uncompiled)


def _with_loops(program: Program, loops: Mapping[str, Loops]) -> Program:
    """Returns a program with its loops in place of their key."""
    if not program.loops:
        return program
    attributes = loops[program.loops]
    orders = [order for _, order in program.results]
    results = [*zip(attributes["results"], orders, strict=True)]
    return dataclasses.replace(program, **{**attributes, "results": results})


class _LoopsEncoder:
    """Writes a program that runs compiled loops; it takes the place of ``encode.Encoder``.

    Args:
        graph: The graph.
        sizes: Symbolic size -> an input and an axis that have it.
        orders: Value that is passed between programs -> its memory order.
        available: What the program may take: inputs of the graph, and results of other programs.
        uncompiled: Gets the graph that is to be compiled, by the key that the program has instead.

    Attributes:
        inputs: The nodes that the program takes.
        operators: The node that each of its steps computes; empty until it is compiled.
    """

    def __init__(
        self,
        graph: torch.fx.Graph,
        sizes: Mapping[str, tuple[Node, int]],
        orders: Mapping[Node, Order],
        available: Iterable[Node],
        uncompiled: dict[str, torch.fx.GraphModule],
    ) -> None:
        self._graph, self._orders, self._available = graph, orders, set(available)
        self._uncompiled = uncompiled
        self._sources = {source for source, _ in sizes.values()}
        self.inputs: list[Node] = []
        self.operators: list[Node | None] = []

    def write(self, nodes: Sequence[Node], results: Sequence[Node]) -> Program:
        """Returns the program of some operators.

        Args:
            nodes: The operators.
            results: What the program returns: some of the operators, or views of them or of inputs.
        """
        within = needed_for(results, self._available, sizes=True)
        nodes = [node for node in self._graph.nodes if node in within]
        operators = [node for node in nodes if tensors_of(node)]
        # In the order in which operators read them, which is the same in equal layers.
        sources = (source for node in [*operators, *nodes] for source in node.all_input_nodes)
        read = dict.fromkeys(source for source in sources if source in self._available)
        # Loops read sizes from their inputs, too.
        self.inputs = [*read, *(node for node in self._graph.nodes if node in self._sources and node not in read)]
        part = part_of(self._graph, within, self.inputs, results, first=dict.fromkeys(operators))
        (end,) = part.module.graph.find_nodes(op="output")
        end.args = (tuple(map(_in_memory_of_its_own, end.args[0], map(self._orders.get, results))),)
        for node in part.module.graph.nodes:
            if node.target in _VIEWS:
                node.target = aten.reshape.default
        part.module.recompile()
        orders = [self._orders.get(node) for node in self.inputs]
        for node, order in zip(part.inputs.values(), orders, strict=True):
            node.meta["val"] = _laid_out(node.meta["val"], order)
        key = _key(part.module.graph)
        self._uncompiled[key] = part.module
        return Program(orders, results=[(0, self._orders.get(node)) for node in results], loops=key)


def _in_memory_of_its_own(node: Node, order: Order) -> Node:
    """Returns a result that is no view, in its memory order."""
    if not is_view(node) and node.op != "placeholder":
        return node
    (end,) = node.graph.find_nodes(op="output")
    with node.graph.inserting_before(end), node.meta["val"].fake_mode:
        return call(node.graph, aten.clone.default, node, **({} if order else _CONTIGUOUS))


def _laid_out(value: torch.Tensor, order: Order) -> torch.Tensor:
    """Returns a fake tensor as the program gets it: contiguous, unless it has an order in memory of its own."""
    with value.fake_mode:  # type: ignore[attr-defined]
        return value if order is not None else torch.empty(value.shape, dtype=value.dtype, device=value.device)


def _key(graph: torch.fx.Graph) -> str:
    """Returns what equal graphs have in common: operators with their arguments, and inputs as they lie in memory."""
    numbers = {node: number for number, node in enumerate(graph.nodes)}
    lines = []
    for node in graph.nodes:
        called = node.target if node.op == "call_function" else _described(node.meta["val"]) if not node.args else ""
        lines.append(f"{node.op} {called} {map_arg((node.args, node.kwargs), lambda value: f'%{numbers[value]}')}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _described(value: torch.Tensor) -> str:
    return f"{value.dtype} {value.device} {[*value.shape]} {[*value.stride()]}"
