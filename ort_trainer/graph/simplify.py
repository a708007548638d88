"""Folds constants, removes what nobody reads and computes what is there twice only once."""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import onnxscript.optimizer
from onnxscript.rewriter import RewritePass
from onnxscript.rewriter.rules import common as rules

from .names import Names
from .neutral import NEUTRAL_RULES

__all__ = ["SimplifyPass", "convert_opset"]

# onnxscript's own choice also has a rule for pairs of slices, which looks through the whole graph at every node (half
# of an export's time), rules that fuse clips, which leave unnamed constants behind, and rules that drop an addition of
# almost nothing, as if it were nothing.
_RULES = (
    *NEUTRAL_RULES,
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
    """Simplifies a freshly translated model; what it computes stays the same.

    The weights are inputs of the model, so none can be folded into a constant.

    Args:
        thoroughly: False only brings it into the form that everything after this expects: no functions, and each value
            with its own name.
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
    """Gives dropouts that stay on in evaluation separate seeds: two of one value would be merged.

    ONNX Runtime counts a node's seed up by 1 for each run, so the seeds are far apart.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        dropouts = [node for node in model.graph.all_nodes() if node.op_type == "Dropout"]
        for number, node in enumerate(dropouts, start=1):
            node.attributes.add(ir.AttrInt64("seed", number * 1_000_003))
        return ir.passes.PassResult(model, bool(dropouts))


class _RegisterLostConstantsPass(ir.passes.InPlacePass):
    """Makes every constant an initializer: a rewriting rule names new ones after a value, so that two can share a name.

    Then only the last of them is one of the graph's (a value that is reshaped twice).
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


def convert_opset(model: ir.Model, opset: int) -> None:
    """Raises the operator set of a model in place."""
    if model.opset_imports[""] < opset:
        import onnxscript.version_converter

        onnxscript.version_converter.convert_version(model, opset, fallback=True)
