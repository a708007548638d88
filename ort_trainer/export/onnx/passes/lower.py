"""Makes everything between trained weights and the loss differentiable."""

from __future__ import annotations

import functools
from collections.abc import Collection

import onnx_ir as ir

from ....step.emitter import Names, infer_node
from ..gradient import differentiable, gradient_path, has_user_gradient
from ..rewrite import Rule, rewrite
from ..rewrites import RULES
from ..rewrites.indexing import split
from .found import Found
from .inline_definitions import InlineDefinitionsPass, has_definition

__all__ = ["LowerPass"]

# Definitions are nested a few levels deep.
_MAXIMUM_ROUNDS = 16
# Number of outputs that the gradient requires, though a model may omit some.
_ALL_OUTPUTS = {"LayerNormalization": 3, "SimplifiedLayerNormalization": 2, "SoftmaxCrossEntropyLoss": 2}


class LowerPass(ir.passes.InPlacePass):
    """Rewrites operators that the gradient builder can't differentiate, where gradient flows, into ones that it can.

    1. Operators with a rule in :mod:`..rewrites` are replaced, repeatedly.
    2. Other operators without a gradient are replaced by ONNX's definition, if there is one.
    3. Outputs that a gradient requires get a name.

    Args:
        trained: Inputs that need a gradient.
        found: Names the scaled loss to differentiate. Receives the nodes that can't be rewritten.

    Raises:
        SizeNeededError: If a rewrite needs a size that is unknown.
    """

    def __init__(self, trained: Collection[str], found: Found) -> None:
        self._trained, self._found = trained, found

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        opset = model.opset_imports[""]
        loss = next(value for value in model.graph.outputs if value.name == self._found.scaled_loss)
        modified = False
        for _ in range(_MAXIMUM_ROUNDS):
            path = list(gradient_path(model.graph, self._trained, loss))
            wanted = {node.inputs[index] for node, inputs in path for index in inputs if index >= 0} | {loss}
            along = {node for node, _ in path if node not in self._found.refused}
            with_gradient = {value for node, _ in path for value in node.outputs if value in wanted}
            rules: dict[str, Rule] = {**RULES, "Split": functools.partial(split, wanted=with_gradient)}
            if rewrite(model, rules, along, self._found.refused):
                modified = True
                continue
            defined = [node for node, _ in path if _asks_for_definition(node, wanted) and has_definition(node, opset)]
            if not defined:
                break
            InlineDefinitionsPass(defined)(model)
            modified = True
        return ir.passes.PassResult(model, _complete(model) or modified)


def _asks_for_definition(node: ir.Node, wanted: Collection[ir.Value | None]) -> bool:
    """Returns whether a node needs its definition, because it or one of its wanted outputs has no gradient."""
    if has_user_gradient(node):
        return False
    more = node.op_type in _ALL_OUTPUTS and any(value in wanted for value in node.outputs[1:])
    return more or (not differentiable(node) and node.op_type not in RULES)


def _complete(model: ir.Model) -> bool:
    """Names omitted outputs that a gradient requires."""
    names = Names(ir.convenience.create_value_mapping(model.graph))
    modified = False
    for node in model.graph:
        count = _ALL_OUTPUTS.get(node.op_type, 0)
        if sum(bool(value.name) for value in node.outputs) < count:
            node.resize_outputs(count)
            for value in node.outputs:
                value.name = value.name or names.unique(f"{node.name or node.op_type}.unused")
            infer_node(node, model.opset_imports)
            modified = True
    return modified
