"""Prunes a model to some of its outputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir
import onnx_ir.passes.common as common_passes


class RemoveUnusedPass(ir.passes.InPlacePass):
    """Removes nodes, initializers and inputs that no output needs.

    Args:
        inputs: Names of inputs that are always kept.
    """

    def __init__(self, inputs: Collection[str] = ()) -> None:
        self._inputs = inputs

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Runs the pass."""
        modified = common_passes.RemoveUnusedNodesPass()(model).modified
        inputs = model.graph.inputs
        used = [value for value in inputs if value.uses() or value.is_graph_output() or value.name in self._inputs]
        modified |= len(used) < len(inputs)
        inputs.clear()
        inputs.extend(used)
        return ir.passes.PassResult(model, modified)


def prune(model: ir.Model, outputs: Sequence[str], inputs: Collection[str] = ()) -> ir.Model:
    """Returns a copy of a model with only the given outputs, in order, the inputs that they need, and those named."""
    pruned = model.clone()
    values = {value.name: value for value in pruned.graph.outputs}
    pruned.graph.outputs.clear()
    pruned.graph.outputs.extend(values[name] for name in outputs if name in values)
    return RemoveUnusedPass(inputs)(pruned).model
