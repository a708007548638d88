"""Makes the updated running statistics of batch norms outputs of a model."""

from __future__ import annotations

from collections.abc import Collection

import onnx_ir as ir

from ....step.emitter import Names
from .found import Found

__all__ = ["RunningStatisticsPass"]


class RunningStatisticsPass(ir.passes.InPlacePass):
    """Makes the updated running statistics of batch norms in training mode outputs of the graph.

    Args:
        buffers: Names of the running statistics.
        found: Receives the outputs.
    """

    def __init__(self, buffers: Collection[str], found: Found) -> None:
        self._buffers, self._found = buffers, found

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        names = Names(ir.convenience.create_value_mapping(model.graph))
        for node in model.graph:
            if node.op_type != "BatchNormalization" or not node.attributes.get_int("training_mode", 0):
                continue
            node.resize_outputs(3)
            for value, buffer in zip(node.outputs[1:], node.inputs[3:5], strict=True):
                value.name = value.name or names.unique(f"{node.name or node.op_type}.updated")
                if buffer is not None and buffer.name in self._buffers:
                    value.type, value.shape = ir.TensorType(buffer.dtype or ir.DataType.FLOAT), buffer.shape
                    if not value.is_graph_output():
                        model.graph.outputs.append(value)
                    self._found.buffer_updates[str(buffer.name)] = value.name
        return ir.passes.PassResult(model, bool(self._found.buffer_updates))
