"""Builds a graph of programs, some of which are compiled loops."""

from __future__ import annotations

from collections.abc import Sequence

from ...fx.values import Node
from ...graph.divide import needed_for
from ..programs.build import ProgramBuilder, WritesProgram
from .compile import LoopsEncoder, divide_for_loops

__all__ = ["LoopBuilder"]


class LoopBuilder(ProgramBuilder):
    """Compiles what lies between PyTorch's kernels to loops; see the base class."""

    def _divided(self) -> list[list[Node]]:
        graph = self._named
        fetched = [node for place, (node, _) in enumerate(graph.results) if place not in graph.unfetched]
        needed = needed_for(fetched)
        nodes = [node for program in super()._divided() for node in program]
        divided = divide_for_loops(nodes, {node for node in nodes if node not in needed}, graph.checked)
        self._loops = {node for program, compiled in divided if compiled for node in program}
        return [program for program, _ in divided]

    def _encoder(self, nodes: Sequence[Node]) -> WritesProgram:
        if self._loops.isdisjoint(nodes):
            return super()._encoder(nodes)
        return LoopsEncoder(self._graph, self._named.sizes, self._orders, self._values)
