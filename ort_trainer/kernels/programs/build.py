"""Builds the graph of programs that computes a captured graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from ...engine.programs import Program
from ...engine.programs.program import Order
from ...fx.values import Node, base_of, memory_order
from ...graph.named_graph import NamedGraph
from ...step import ProgramGraph, dtype_name
from ...step.names import Names
from ...step.program_graph import Constant, ProgramCall
from .encode import Encoder
from .partition import partition
from .sizes_of_values import SizesOfValues


class WritesProgram(Protocol):
    """Writes one program.

    Attributes:
        inputs: The nodes that the program takes.
        operators: The node that each of its steps computes; None for many.
    """

    inputs: list[Node]
    operators: list[Node | None]

    def write(self, nodes: Sequence[Node], results: Sequence[Node]) -> Program:
        """Returns the program of some operators."""


class ProgramBuilder:
    """Builds the programs that compute a graph as it is.

    Args:
        graph: The graph.

    Attributes:
        operators: Name of a node -> the operator that each step of its program computes; None if it computes many.

    Raises:
        ExportError: If a program can't run an operator of the graph.
    """

    def __init__(self, graph: NamedGraph) -> None:
        self._named, self._graph = graph, graph.module.graph
        self._sizes = SizesOfValues(graph)
        apart = [node for node, _ in graph.results] if graph.separable else ()
        # The operators of each, in order.
        self._programs: list[list[Node]] = partition(self._graph, apart, self._sizes.creators)
        self._names = Names([name for _, name in (*graph.inputs, *graph.results)])
        self._values: dict[Node, str] = {}
        self._orders: dict[Node, Order] = {
            node: memory_order(node.meta["val"]) for node, _ in graph.inputs if node in graph.ordered
        }
        self.operators: dict[str, Sequence[Node | None]] = {}
        self._written: dict[str, Program] = {}  # by key
        self._calls: list[ProgramCall] = []
        self._returned: set[str] = set()  # names of the results that a program returns

    def build(self) -> ProgramGraph:
        """Returns the graph."""
        self._values.update(self._named.inputs)
        constants: dict[str, Constant] = {}
        for node, tensor in self._named.constants.items():
            name = self._values[node] = self._names.unique(node.name)
            constants[name] = _constant(tensor)
        results = self._assign_results()
        for program, out in zip(self._programs, self._coming_out(results), strict=True):
            if out:  # a program of views alone has none: who reads a view computes it
                self._add(program, out, results)
        for node, name in self._named.results:
            if name not in self._returned:  # no program returns it: it is an input, a view of one, or a duplicate
                self._add([], [node], {node: name})
        texts = {key: program.to_text() for key, program in self._finished().items()}
        return ProgramGraph(texts, tuple(self._calls), constants)

    def _finished(self) -> Mapping[str, Program]:
        """Returns the programs by key, after all of them have been written."""
        return self._written

    def _assign_results(self) -> dict[Node, str]:
        """Returns the nodes that a program returns as an output of the model, each under one name."""
        produced = {node for program in self._programs for node in program}
        results: dict[Node, str] = {}
        for node, name in self._named.results:
            if node not in results and base_of(node) in produced and not self._sizes.read_by(node):
                results[node] = name
        return results

    def _coming_out(self, results: Mapping[Node, str]) -> list[list[Node]]:
        """Returns what each program returns to later ones or to the caller, which may be views of what it computes."""
        # A result with a second name (the gradient of two biases that are added) is copied after all programs.
        copied = [node for node, name in self._named.results if results.get(node) != name]
        later = {*map(base_of, copied), *self._sizes.sources(copied)}
        outputs: list[list[Node]] = []
        for program in reversed(self._programs):
            within = set(program)
            outputs.append([node for node in program if node in later or node in results])
            outputs[-1] += [node for node in results if node not in within and base_of(node) in within]
            later |= {base_of(operand) for node in program for operand in node.all_input_nodes}
            later |= self._sizes.sources(program)
        return outputs[::-1]

    def _add(self, nodes: Sequence[Node], results: Sequence[Node], names: Mapping[Node, str]) -> None:
        """Adds the node of a program."""
        for node in results:
            keeps = node not in names or node in self._named.ordered
            self._orders[node] = memory_order(node.meta["val"]) if keeps else None
        encoder = self._encoder(nodes)
        program = encoder.write(nodes, results)
        outputs = tuple(names.get(node) or self._names.unique(node.name) for node in results)
        inputs = tuple(self._values[node] for node in encoder.inputs)
        self._written[program.key] = program
        name = f"{outputs[0]}_node"
        self.operators[name] = encoder.operators
        self._calls.append(ProgramCall(name, program.key, inputs, outputs))
        for node, output in zip(results, outputs, strict=True):
            self._values.setdefault(node, output)
        self._returned.update(outputs)

    def _encoder(self, nodes: Sequence[Node]) -> WritesProgram:
        """Returns what writes the program of some operators."""
        batch = {node for node, name in self._named.inputs if self._named.separable and name in self._named.shapes}
        return Encoder(self._sizes.symbols, self._sizes.places, self._orders, batch)


def _constant(tensor: torch.Tensor) -> Constant:
    value = tensor.detach().cpu().contiguous()
    return Constant(dtype_name(value.dtype), tuple(value.shape), value.reshape(-1).view(torch.uint8).numpy().tobytes())
