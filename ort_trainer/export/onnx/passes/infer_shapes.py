"""Infers the shapes of a whole model; new nodes get types and shapes when they are emitted."""

from __future__ import annotations

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from ....core.errors import ExportError
from ....engine.ort import infer_symbolic_shapes

__all__ = ["InferShapesPass", "SymbolicShapesPass", "infer_shapes"]

_REDUCTIONS = frozenset(
    f"Reduce{kind}" for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
)


def infer_shapes(model: ir.Model) -> None:
    """Writes the types and shapes that ONNX infers into a model."""
    InferShapesPass()(model)


class InferShapesPass(ir.passes.InPlacePass):
    """Writes the types and shapes that ONNX infers into a model.

    onnx_ir's own pass turns sequences into tensors.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        _take_over(model, onnx.shape_inference.infer_shapes(ir.to_proto(model), data_prop=True))
        return ir.passes.PassResult(model, modified=True)


class SymbolicShapesPass(ir.passes.InPlacePass):
    """Writes the shapes from ONNX Runtime's symbolic shape inference into a model.

    Raises:
        ExportError: If it fails.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        # It supports only initializers and tensors as constants.
        plain = common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(
            model.clone()
        ).model
        for node in plain.graph.all_nodes():
            # Since opset 18 axes are an input, which it reads only for ReduceSum. For other reductions it loses even
            # the rank and fails with a TypeError at the next node. Their shapes are those of ReduceSum.
            if not node.domain and node.op_type in _REDUCTIONS:
                node.op_type = "ReduceSum"
            # An empty list of axes means all of them, but it assumes none.
            if not node.domain and node.op_type == "ReduceSum" and _reduces_all(node):
                node.resize_inputs(1)
        try:
            _take_over(model, infer_symbolic_shapes(ir.to_proto(plain)))
        except Exception as error:  # its errors have no separate class
            raise ExportError(
                "utils.run_symbolic_shape_infer: ONNX Runtime's symbolic shape inference fails for this ONNX model: "
                f"{error}. Leave the option out: then ONNX infers shapes, and shapes that it can't infer are measured"
            ) from error
        return ir.passes.PassResult(model, modified=True)


def _reduces_all(node: ir.Node) -> bool:
    """Returns whether a reduction has an empty list of axes, which means that it reduces all of them."""
    axes = ir.convenience.get_const_tensor(node.inputs[1]) if len(node.inputs) > 1 and node.inputs[1] else None
    noop = node.attributes.get_int("noop_with_empty_axes", 0)
    return axes is not None and axes.size == 0 and not noop


def _take_over(model: ir.Model, inferred: onnx.ModelProto) -> None:
    values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
    for info in (*inferred.graph.output, *inferred.graph.value_info):
        if info.name in values:
            ir.serde.deserialize_value_info_proto(info, values[info.name])
