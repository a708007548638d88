"""Cuts a model down to some of its outputs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

__all__ = ["KeepOutputsPass", "RemoveUnusedPass", "prune"]


class KeepOutputsPass(ir.passes.InPlacePass):
    """Leaves a model only some of its outputs, in the given order.

    Args:
        outputs: Their names; others than the model's are left out.
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
    """Removes what no output needs: nodes, initializers and inputs.

    Args:
        inputs: Names of inputs that stay in any case.
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
    """Returns a copy of a model that has some outputs only, in this order, and no inputs that they do not need."""
    return ir.passes.Sequential(KeepOutputsPass(outputs), RemoveUnusedPass())(model.clone()).model
