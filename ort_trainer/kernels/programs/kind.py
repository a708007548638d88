"""PyTorch's kernels: a graph as programs of its operators. Imports that only exports need are lazy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from ...capture.step_module import ExportedStep
from ...engine.programs.processor import slow_halves, slow_mkl
from ...graph.kernels import Kernels, Lowered

if TYPE_CHECKING:
    from ...graph.flat_graph import FlatGraph
    from ...graph.named_graph import NamedGraph

aten = torch.ops.aten
Node = torch.fx.Node


class ProgramKernels(Kernels):
    """PyTorch's kernels, called one after another."""

    name = "pytorch"
    title = "PyTorch's kernels"
    of_pytorch = True
    reads_shapes = True
    _compiled = False

    def key(self, device: torch.device) -> str:
        """Returns which products are slow on this processor, and are computed otherwise."""
        return f"slow {slow_halves()} {slow_mkl()}"

    def rewrite_forward(self, graph: torch.fx.Graph) -> None:
        """Speeds up a graph before it is differentiated; see the base class."""
        from .rewrites import rewrite_forward

        rewrite_forward(graph, self._compiled)

    def rewrite_call(self, flat: FlatGraph) -> None:
        """Speeds up the joint graph of a call; see the base class."""
        from .rewrites import rewrite

        with flat.following():
            rewrite(flat.module.graph, self._compiled, divided=True)
        if not self.reads_shapes:
            flat.read_sizes_from_batch()

    def rewrite_step(self, flat: FlatGraph, graph: NamedGraph, mask: Node | None) -> None:
        """Makes all inputs and results fp32 or wider, leaves out padding, and speeds up; see the base class."""
        from .masks import open_masks
        from .padding import remove_padding
        from .rewrites import rewrite

        nodes = graph.module.graph
        _widen_interface(nodes, [node for node, _ in graph.inputs])
        (end,) = nodes.find_nodes(op="output")
        end.args = (tuple(_widened(node, end) for node, _ in graph.results),)
        flat.read_sizes_from_batch()
        if mask is not None:
            open_masks(nodes)
            seeds = [node for node, _ in graph.inputs if node not in flat.batch]
            graph.sizes = {**graph.sizes, **remove_padding(nodes, flat.symbols, mask, seeds)}
        rewrite(nodes, self._compiled, unfetched=graph.unfetched)
        graph.results = [(node, name) for node, (_, name) in zip(end.args[0], graph.results, strict=True)]

    def lower(self, graph: NamedGraph, step: ExportedStep, stage: Callable[[str], None]) -> Lowered:
        """Returns the graph as programs; see the base class."""
        from .build import ProgramBuilder

        stage("translate")
        builder = ProgramBuilder(graph)
        return {"programs": builder.build()}, builder.operators


def _widen_interface(graph: torch.fx.Graph, inputs: Sequence[Node]) -> None:
    """Makes bfloat16 inputs fp32 and casts them back: NumPy, and so the other kind of kernels, lacks bfloat16."""
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
