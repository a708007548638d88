"""Folds constants, removes unused values, and merges common subexpressions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import onnxscript.optimizer
from onnxscript.rewriter import RewritePass, RewriteRule
from onnxscript.rewriter.rules import common as rules

from .names import Names


def _rule(pattern: Callable[[Any, Any, Any], Any], neutral: float) -> RewriteRule:
    """Returns a rule that removes an operator whose second operand is exactly the neutral element, a scalar."""

    def condition(context: Any, x: ir.Value, number: ir.Value) -> bool:
        constant = ir.convenience.get_const_tensor(number)
        return constant is not None and constant.numpy().ndim == 0 and bool(constant.numpy() == neutral)

    def replacement(op: Any, x: ir.Value, number: ir.Value) -> Any:
        return op.Identity(x)

    return RewriteRule(pattern, replacement, condition)


# Drop arithmetic with a neutral element. onnxscript's own rules also match constants up to 1e-8 from 0 and up to 1e-5
# from 1, so they would drop the ``eps`` in ``log(x + 1e-8)``.
_NEUTRAL_RULES = (
    _rule(lambda op, x, number: op.Add(x, number), 0),
    _rule(lambda op, x, number: op.Sub(x, number), 0),
    _rule(lambda op, x, number: op.Mul(x, number), 1),
    _rule(lambda op, x, number: op.Div(x, number), 1),
)
# onnxscript's default also has a rule for pairs of slices, which searches the whole graph at every node (half of an
# export's time), rules that fuse clips, which leave unnamed constants behind, and rules that drop additions of tiny
# numbers as if they were 0.
_RULES = (
    *_NEUTRAL_RULES,
    rules.no_op_cast_rule,
    rules.no_op_expand_rule,
    rules.no_op_transpose_rule,
    rules.reshape_reshape_rule,
    rules.transpose_transpose_rule,
    rules.unsqueeze_unsqueeze_rule,
    rules.squeeze_reshape_1d_rule,
    rules.materialize_reshape_shape_rule,
    rules.collapse_slice_rule,
    rules.collapse_slice2_rule,
    rules.cast_constant_of_shape_rule,
    rules.cast_constant_of_shape_without_value_rule,
    rules.one_reshape_matmul_reshape_rule,
    rules.two_reshapes_matmul_reshape_rule,
    rules.no_op_static_scatter_nd_rule,
    rules.no_op_dynamic_scatter_nd_rule,
)


class SimplifyPass(ir.passes.Sequential):
    """Simplifies a newly translated model without changing its results.

    The weights are inputs of the model, so they are not folded into constants.

    Args:
        thoroughly: False does only what later steps require: it inlines functions and makes names unique.
    """

    def __init__(self, thoroughly: bool = True) -> None:
        super().__init__(
            common_passes.InlinePass(),
            _TellDropoutsApartPass(),
            *([_FoldConstantsPass(), RewritePass(_RULES)] if thoroughly else []),
            common_passes.RemoveUnusedNodesPass(),
            common_passes.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
            common_passes.RemoveUnusedOpsetsPass(),
            common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
            common_passes.LiftSubgraphInitializersToMainGraphPass(),
            *([common_passes.DeduplicateInitializersPass()] if thoroughly else []),
            *([common_passes.CommonSubexpressionEliminationPass()] if thoroughly else []),
            common_passes.OutputFixPass(),
            common_passes.NameFixPass(),
            _RegisterLostConstantsPass(),
        )


class _FoldConstantsPass(ir.passes.InPlacePass):
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        return onnxscript.optimizer.fold_constants(model, onnx_shape_inference=False)


class _TellDropoutsApartPass(ir.passes.InPlacePass):
    """Gives dropouts that stay active in evaluation different seeds; otherwise two of the same value would be merged.

    ONNX Runtime increments a node's seed by 1 in each run, so the seeds are far apart.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        dropouts = [node for node in model.graph.all_nodes() if node.op_type == "Dropout"]
        for number, node in enumerate(dropouts, start=1):
            node.attributes.add(ir.AttrInt64("seed", number * 1_000_003))
        return ir.passes.PassResult(model, bool(dropouts))


class _RegisterLostConstantsPass(ir.passes.InPlacePass):
    """Registers every constant as an initializer, under its own name.

    A rewrite rule names new constants after a value, so two can share a name (for a value that is reshaped twice), and
    only the last of them is registered in the graph.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        before = len(graph.initializers)
        names = Names(graph.initializers)
        for value in [value for node in graph.all_nodes() for value in node.inputs]:
            if value is None or value.const_value is None or value.producer() is not None:
                continue
            if not value.is_graph_input() and not value.is_initializer():
                value.name = names.unique(str(value.name))
                value.const_value.name = value.name
                graph.register_initializer(value)
        return ir.passes.PassResult(model, len(graph.initializers) > before)
