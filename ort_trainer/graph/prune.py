"""Cuts a model down to some of its outputs."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

__all__ = ["prune"]


def prune(model: ir.Model, outputs: Collection[str]) -> ir.Model:
    """Returns a copy of a model that computes some of its outputs only, without the inputs that they do not need."""
    pruned = model.clone()
    graph = pruned.graph
    kept = [value for value in graph.outputs if value.name in outputs]
    graph.outputs.clear()
    graph.outputs.extend(kept)
    common_passes.RemoveUnusedNodesPass()(pruned)
    used = [value for value in graph.inputs if value.uses() or value.is_graph_output()]
    graph.inputs.clear()
    graph.inputs.extend(used)
    return pruned
