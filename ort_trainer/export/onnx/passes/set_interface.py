"""Sets the shapes of a model's inputs and outputs from the model description."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from ....core.errors import ExportError

__all__ = ["SetInterfacePass"]


class SetInterfacePass(ir.passes.InPlacePass):
    """Sets the shapes of inputs and outputs, and drops all shapes in between.

    Other shapes in a file may contradict the description's symbols, and measured shapes are not guaranteed. The engine
    infers shapes itself.

    Args:
        shapes: Name of an input or output -> its sizes. Other outputs get none.

    Raises:
        ExportError: If an input has a different number of dimensions.
    """

    def __init__(self, shapes: Mapping[str, tuple[int | str, ...]]) -> None:
        self._shapes = shapes

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        for node in graph:
            for value in node.outputs:
                value.shape = None
        for value in (*graph.inputs, *graph.outputs):
            wanted = self._shapes.get(str(value.name))
            if wanted is None:
                continue
            if value.shape is not None and len(value.shape) != len(wanted):
                raise ExportError(
                    f"input {value.name!r} has {len(value.shape)} dimensions in the ONNX model, but model_desc says "
                    f"{len(wanted)}: {list(wanted)}"
                )
            value.shape = ir.Shape(wanted)
        return ir.passes.PassResult(model, modified=True)
