"""Appends the graph of a loss function to an output of a model."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

__all__ = ["MergeLossPass"]

_PREFIX = "loss_fn."


class MergeLossPass(ir.passes.InPlacePass):
    """Appends the graph of a loss function to a model; its label becomes an input, and its loss an output.

    Args:
        export: Returns the graph of the loss of a prediction, for an opset; the pass consumes it. Its inputs are named
            ``prediction`` and like the label; unused ones may be missing.
        prediction: The output of the model that the loss takes.
        label: The label.
    """

    def __init__(self, export: Callable[[ir.Value, int], ir.Model], prediction: str, label: ir.Value) -> None:
        self._export, self._prediction, self._label = export, prediction, label

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        prediction = next(value for value in graph.outputs if value.name == self._prediction)
        exported = self._export(prediction, model.opset_imports[""])
        loss = exported.graph
        given = {"prediction": prediction, self._label.name: self._label}
        graph.inputs.append(self._label)
        interface = {*loss.inputs, *loss.outputs}
        inner = [value for value in ir.convenience.create_value_mapping(loss).values() if value not in interface]
        ir.convenience.rename_values(inner, [f"{_PREFIX}{value.name}" for value in inner])
        for value in loss.inputs:
            value.replace_all_uses_with(given[value.name])
        nodes, outputs, initializers = list(loss), list(loss.outputs), list(loss.initializers.values())
        for held in (loss.inputs, loss.outputs, loss.initializers):
            held.clear()
        loss.remove(nodes)
        for node in nodes:
            node.name = f"{_PREFIX}{node.name}"
        graph.extend(nodes)
        graph.outputs.extend(outputs)
        for value in initializers:
            graph.register_initializer(value)
        for domain, version in exported.opset_imports.items():
            model.opset_imports.setdefault(domain, version)
        return ir.passes.PassResult(model, modified=True)
