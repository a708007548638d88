"""Switches a forward pass to evaluation mode."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ....step.emitter import Emitter
from ..nodes import operand
from ..rewrite import rewrite

__all__ = ["ToEvaluationPass", "keep_all"]


class ToEvaluationPass(ir.passes.InPlacePass):
    """Disables dropout, and makes batch norms use their running statistics."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = rewrite(model, {"Dropout": keep_all})
        for node in model.graph:
            if node.op_type == "BatchNormalization":
                modified |= node.attributes.pop("training_mode", None) is not None
                node.resize_outputs(1)
        return ir.passes.PassResult(model, modified)


def keep_all(node: ir.Node, e: Emitter) -> Sequence[ir.Value | None]:
    """Replaces a dropout with one that drops nothing."""
    mask = len(node.outputs) > 1 and node.outputs[1].name
    x = operand(node)
    return [x, e("Expand", e.constant(True, bool), e("Shape", x)) if mask else None]
