"""Shape inference of a whole model; new nodes get types and shapes when they are written."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from ....errors import ExportError
from ....runtime.engine import infer_symbolic_shapes

__all__ = ["InferShapesPass", "SymbolicShapesPass", "infer_shapes"]

_REDUCTIONS = frozenset(
    f"Reduce{kind}" for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
)


def infer_shapes(model: ir.Model) -> None:
    """Writes types and shapes into a model, as ONNX infers them."""
    InferShapesPass()(model)


class InferShapesPass(ir.passes.InPlacePass):
    """Writes types and shapes into a model, as ONNX infers them.

    onnx_ir's own pass makes tensors of sequences.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        _take_over(model, onnx.shape_inference.infer_shapes(ir.to_proto(model), data_prop=True))
        return ir.passes.PassResult(model, modified=True)


class SymbolicShapesPass(ir.passes.InPlacePass):
    """Writes what ONNX Runtime's symbolic shape inference finds into a model.

    Raises:
        ExportError: If it fails.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        # It knows no constants but initializers and tensors.
        plain = common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(
            model.clone()
        ).model
        for node in plain.graph.all_nodes():
            # Axes have been an input since operator set 18, which it reads for a ReduceSum only: of the others it loses
            # even the rank, and ends in a TypeError at the next node. The shapes are those of a ReduceSum.
            if not node.domain and node.op_type in _REDUCTIONS:
                node.op_type = "ReduceSum"
            # No axes at all mean every one, which it takes for none.
            if not node.domain and node.op_type == "ReduceSum" and _reduces_all(node):
                node.resize_inputs(1)
        try:
            _take_over(model, infer_symbolic_shapes(ir.to_proto(plain)))
        except Exception as error:  # its errors have no separate class
            raise ExportError(
                "utils.run_symbolic_shape_infer: ONNX Runtime's symbolic shape inference fails for this ONNX model: "
                f"{error}. Leave the option out: shapes are then inferred by ONNX, and measured where that ends"
            ) from error
        return ir.passes.PassResult(model, modified=True)


def _reduces_all(node: ir.Node) -> bool:
    """Returns whether a reduction has a list of axes that is empty, and reduces all of them therefore."""
    axes = ir.convenience.get_const_tensor(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] else None
    noop = node.attributes.get_int("noop_with_empty_axes", 0)
    return axes is not None and axes.size == 0 and not noop


def _take_over(model: ir.Model, inferred: onnx.ModelProto) -> None:
    values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
    for info in (*inferred.graph.output, *inferred.graph.value_info):
        if info.name in values:
            ir.serde.deserialize_value_info_proto(info, values[info.name])
