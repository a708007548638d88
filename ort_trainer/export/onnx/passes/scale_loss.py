"""Adds the loss scale."""

from __future__ import annotations

import onnx_ir as ir

from ....core.errors import ExportError
from ....step.emitter import Emitter, Names
from ..nodes import dtype_of, shape_of
from .found import Found

__all__ = ["ScaleLossPass"]


class ScaleLossPass(ir.passes.InPlacePass):
    """Multiplies the loss by an input of the graph, and makes the product an output.

    Args:
        loss: Name of the loss, an output.
        found: Receives the names of the input and the product.

    Raises:
        ExportError: If the loss is not a floating-point scalar.
    """

    def __init__(self, loss: str, found: Found) -> None:
        self._loss, self._found = loss, found

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        loss = next(value for value in graph.outputs if value.name == self._loss)
        if not dtype_of(loss).is_floating_point():
            kind = ir.tensor_adapters.to_torch_dtype(dtype_of(loss))
            raise ExportError(f"the loss {self._loss!r} must be a floating-point number, but its dtype is {kind}")
        shape = shape_of(loss)
        if shape not in (None, (), (1,)):
            raise ExportError(
                f"the loss {self._loss!r} must be a scalar, but its shape is {list(shape or ())}: reduce it"
            )
        names = Names(ir.convenience.create_value_mapping(graph))
        scale = ir.val(names.unique("loss_scale"), ir.DataType.FLOAT, [])
        graph.inputs.append(scale)
        e = Emitter(model.opset_imports, names, "scaled_loss")
        # The gradient builder starts from an fp32 gradient.
        scaled = e("Mul", e("Cast", loss, to=ir.DataType.FLOAT), scale)
        graph.extend(e.nodes)
        graph.outputs.append(scaled)
        self._found.loss_scale, self._found.scaled_loss = str(scale.name), str(scaled.name)
        return ir.passes.PassResult(model, modified=True)
