"""Builds a graph of programs, some of which are compiled loops."""

from __future__ import annotations

from collections.abc import Sequence

from ...fx.values import Node, needed_for
from ...graph.named_graph import NamedGraph
from ..programs.build import ProgramBuilder, WritesProgram
from .compile import LoopsEncoder, divide_for_loops

__all__ = ["LoopBuilder"]


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
        self._loops = {node for program, compiled in divided if compiled for node in program}

    def _encoder(self, nodes: Sequence[Node]) -> WritesProgram:
        if self._loops.isdisjoint(nodes):
            return super()._encoder(nodes)
        return LoopsEncoder(self._graph, self._named.sizes, self._orders, self._values)
