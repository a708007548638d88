"""Adds the backward pass, with ONNX Runtime's gradient builder."""

from __future__ import annotations

from collections.abc import Collection

import onnx
import onnx_ir as ir

from ....core.errors import ExportError
from ....engine.ort import training_bindings
from ..gradient import gradient_path, has_gradient
from .found import Found

__all__ = ["DifferentiatePass", "serialized"]


class DifferentiatePass(ir.passes.FunctionalPass):
    """Adds the backward pass to a model, and makes the gradients its last outputs.

    Args:
        trained: Inputs of the graph that need a gradient; those that the loss does not depend on get none.
        loss: Name of the loss.
        found: Names the scaled loss to differentiate, which is no longer an output afterwards. Receives the gradients.

    Raises:
        ExportError: If operators have no gradient. The message names all of them.
    """

    def __init__(self, trained: Collection[str], loss: str, found: Found) -> None:
        self._trained, self._loss, self._found = trained, loss, found

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        differentiated = self._found.scaled_loss
        reachable = self._reachable(model.graph)
        bindings = training_bindings()
        options = bindings.SessionOptions()
        options.log_severity_level = 4
        try:
            builder = bindings.GradientGraphBuilder(
                serialized(model), {differentiated}, reachable, differentiated, options
            )
            builder.build()
        except Exception as error:
            raise ExportError(f"ONNX Runtime's gradient builder can't differentiate the model: {error}") from error
        self._found.gradients.update({name: f"{name}_grad" for name in self._trained if name in reachable})
        result = ir.from_proto(onnx.load_from_string(builder.get_model()))
        weights = {value.name: value for value in model.graph.inputs}
        like = {value.name: value for value in model.graph.outputs if value.name != differentiated}
        like |= {output: weights[name] for name, output in self._found.gradients.items()}
        values = ir.convenience.create_value_mapping(result.graph, include_subgraphs=False)
        result.graph.outputs.clear()
        for name, known in like.items():
            values[str(name)].type = ir.TensorType(known.dtype or ir.DataType.FLOAT)
            result.graph.outputs.append(values[str(name)])
        return ir.passes.PassResult(result, modified=True)

    def _reachable(self, graph: ir.Graph) -> set[str]:
        """Returns the weights that the loss depends on, after checking that all operators between have gradients."""
        loss = next(value for value in graph.outputs if value.name == self._found.scaled_loss)
        path = list(gradient_path(graph, self._trained, loss))
        missing = [node for node, inputs in path if not has_gradient(node, inputs)]
        if missing:
            places = "; ".join(
                self._found.refused.get(n) or f"{n.op_type} (node {n.name!r}, output {n.outputs[0].name!r})"
                for n in reversed(missing)
            )
            raise ExportError(
                f"ONNX Runtime has no gradient for these operators between a trained weight and the loss "
                f"{self._loss!r}: {places}. Register one with ort_trainer.sources.onnx.register_gradient, export the "
                "model with other operators, or freeze the weights before them with utils.frozen_weights"
            )
        wanted = {value.name for node, inputs in path for i in inputs if i >= 0 and (value := node.inputs[i])}
        reachable = {name for name in self._trained if name in wanted}
        if not reachable:
            raise ExportError(f"the loss {self._loss!r} depends on none of the trained weights {sorted(self._trained)}")
        return reachable


def serialized(model: ir.Model) -> bytes:
    """Serializes a model for ONNX Runtime without inferred shapes: it infers its own and rejects other symbol names."""
    proto = ir.to_proto(model)
    del proto.graph.value_info[:]
    return bytes(proto.SerializeToString())
