"""Prunes a model to some of its outputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

__all__ = ["KeepOutputsPass", "RemoveUnusedPass", "prune"]


class KeepOutputsPass(ir.passes.InPlacePass):
    """Keeps only some of a model's outputs, in the given order.

    Args:
        outputs: Names of the outputs; unknown names are ignored.
    """

    def __init__(self, outputs: Sequence[str]) -> None:
        self._outputs = outputs

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Runs the pass."""
        before = list(model.graph.outputs)
        values = {value.name: value for value in before}
        kept = [values[name] for name in self._outputs if name in values]
        model.graph.outputs.clear()
        model.graph.outputs.extend(kept)
        return ir.passes.PassResult(model, kept != before)


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


def prune(model: ir.Model, outputs: Sequence[str]) -> ir.Model:
    """Returns a copy of a model with only the given outputs, in this order, and the inputs that they need."""
    return ir.passes.Sequential(KeepOutputsPass(outputs), RemoveUnusedPass())(model.clone()).model
