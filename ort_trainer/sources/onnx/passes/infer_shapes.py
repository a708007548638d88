"""Shape inference of a whole model; new nodes get types and shapes when they are written."""

from __future__ import annotations

import logging

import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from ....runtime.engine import infer_symbolic_shapes

__all__ = ["InferShapesPass", "SymbolicShapesPass"]

_log = logging.getLogger(__name__)


class InferShapesPass(ir.passes.InPlacePass):
    """Writes types and shapes into a model, as ONNX infers them.

    onnx_ir's own pass makes tensors of sequences.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        _take_over(model, onnx.shape_inference.infer_shapes(ir.to_proto(model), data_prop=True))
        return ir.passes.PassResult(model, modified=True)


class SymbolicShapesPass(ir.passes.InPlacePass):
    """Writes what ONNX Runtime's symbolic shape inference finds into a model; nothing where it fails."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        # It knows no constants but initializers and tensors.
        plain = common_passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(
            model.clone()
        ).model
        try:
            _take_over(model, infer_symbolic_shapes(ir.to_proto(plain)))
        except Exception as error:  # its errors have no separate class
            _log.warning("ONNX Runtime's symbolic shape inference fails: %s", error)
            return ir.passes.PassResult(model, modified=False)
        return ir.passes.PassResult(model, modified=True)


def _take_over(model: ir.Model, inferred: onnx.ModelProto) -> None:
    values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
    for info in (*inferred.graph.output, *inferred.graph.value_info):
        if info.name in values:
            ir.serde.deserialize_value_info_proto(info, values[info.name])
