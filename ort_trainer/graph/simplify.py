"""Folds constants, removes what nobody reads and computes what is there twice only once."""

from __future__ import annotations

import onnx_ir as ir
import onnxscript.optimizer

__all__ = ["convert_opset", "simplify"]


def simplify(model: ir.Model) -> None:
    """Simplifies a freshly translated model in place; what it computes stays the same.

    The weights are inputs of the model, so none can be folded into a constant.
    """
    onnxscript.optimizer.optimize_ir(model, num_iterations=1, onnx_shape_inference=False)
    _register_lost_constants(model.graph)


def _register_lost_constants(graph: ir.Graph) -> None:
    """Makes every constant an initializer: a rewriting rule names new ones after a value, so that two can share a name.

    Then only the last of them is one of the graph's (seen with two clips of one value).
    """
    names = set(graph.initializers)
    for node in graph.all_nodes():
        for value in node.inputs:
            if value is None or value.const_value is None or value.producer() is not None:
                continue
            if not value.is_graph_input() and not value.is_initializer():
                number = 1
                while f"{value.name}_{number}" in names:
                    number += 1
                value.name = f"{value.name}_{number}"
                value.const_value.name = value.name
                names.add(value.name)
                graph.register_initializer(value)


def convert_opset(model: ir.Model, opset: int) -> None:
    """Raises the operator set of a model in place."""
    if model.opset_imports[""] < opset:
        import onnxscript.version_converter

        onnxscript.version_converter.convert_version(model, opset, fallback=True)
