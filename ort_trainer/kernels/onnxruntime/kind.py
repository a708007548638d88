"""ONNX Runtime's kernels. Imports that only exports need are lazy: the translator takes seconds and 100 MB."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...capture.step_module import ExportedStep
from ...engine.ort import lacks_provider
from ...fx.operator_table import Operator
from ...graph.kernels import Kernels, Lowered

if TYPE_CHECKING:
    import onnx_ir as ir

    from ...graph.named_graph import NamedGraph


class OnnxRuntimeKernels(Kernels):
    """ONNX Runtime's kernels, on any device that it has kernels for."""

    name = "onnxruntime"
    title = "ONNX Runtime's kernels"
    of_pytorch = False

    def objection(self, device: torch.device) -> str:
        """Returns why they can't run on a device; see the base class."""
        return lacks_provider(device)

    @contextlib.contextmanager
    def decompositions(self) -> Iterator[Mapping[Operator, Any]]:
        """Decomposes what torch.onnx can't translate; see the base class."""
        from ...operators.recurrent import layers_for_onnx
        from .translate import decomposition_table

        with layers_for_onnx():
            yield decomposition_table()

    def lower(self, graph: NamedGraph, step: ExportedStep, stage: Callable[[str], None]) -> Lowered:
        """Returns the graph as an ONNX model; see the base class."""
        import onnx_ir as ir

        from .translate import to_onnx

        model, operators = to_onnx(
            graph.module, graph.inputs, graph.results, graph.constants, step.opset, step.simplified, stage
        )
        if graph.shapes:
            _describe_shapes(model, graph.shapes)
        return {"stored": bytes(ir.to_proto(model).SerializeToString())}, operators


def _describe_shapes(model: ir.Model, shapes: Mapping[str, Sequence[int | str]]) -> None:
    """Gives batch inputs and outputs the dimension names of the description, and removes the exporter's names.

    ONNX Runtime infers intermediate shapes itself; names that it does not know would only cause warnings.
    """
    import onnx_ir as ir

    for node in model.graph.all_nodes():
        for value in node.outputs:
            if value.shape is not None and not value.shape.is_static():
                value.shape = None
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.name is not None and value.name in shapes:
            value.shape = ir.Shape(shapes[value.name])
