"""Turns a captured graph with names for every input and result into a clean ONNX model with these names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import torch

from ...step.names import Names
from ...step.simplify import SimplifyPass, convert_opset
from .operators.execution_order import lower_after
from .source_lines import drop_source, operator_of
from .translate import translate

__all__ = ["to_onnx"]

Named = Sequence[tuple[torch.fx.Node, str]]


def to_onnx(
    module: torch.fx.GraphModule,
    inputs: Named,
    results: Named,
    constants: Mapping[torch.fx.Node, torch.Tensor],
    opset: int,
    thoroughly: bool = True,
    stage: Callable[[str], None] = lambda _: None,
) -> ir.Model:
    """Translates a captured graph.

    Args:
        module: The graph; it is consumed.
        inputs: Placeholders with the names of the model's inputs, in order. A placeholder in neither ``inputs`` nor
            ``constants`` must have no users.
        results: Nodes with the names of the model's outputs, in order.
        constants: Placeholders that become constants of the model.
        opset: ONNX operator set.
        thoroughly: Whether to simplify the model.
        stage: Called with the name of each stage when it begins.

    Returns:
        The model; its nodes still have metadata on their operators and lines of the user's code.
    """
    stage("translate")
    placeholders = module.graph.find_nodes(op="placeholder")
    model = translate(module, [node for node, _ in results])
    operators = {node.name: str(node.meta.get("original_aten", node.target)) for node in module.graph.nodes}
    values = dict(zip(placeholders, model.graph.inputs, strict=True))
    model.graph.inputs.clear()
    model.graph.inputs.extend(values[node] for node, _ in inputs)
    for node, tensor in constants.items():
        if values[node].uses() or values[node].is_graph_output():
            values[node].const_value = ir.tensor(tensor.detach().cpu().contiguous(), name=values[node].name)
            model.graph.register_initializer(values[node])
    # One value can be two results, or an input and a result, but ONNX requires separate values.
    common_passes.OutputFixPass()(model)
    stage("simplify")
    SimplifyPass(thoroughly)(model)
    lower_after(model)
    convert_opset(model, opset)
    _name_nodes(model, operators)
    _rename(model, [name for _, name in inputs], [name for _, name in results])
    drop_source(model, keep_lines=True)
    return model


def _name_nodes(model: ir.Model, operators: Mapping[str, str]) -> None:
    """Names every node after its operator: ONNX Runtime's errors show only the node's name."""
    for number, node in enumerate(model.graph.all_nodes()):
        operator = operators.get(operator_of(node) or "")
        node.name = f"{node.op_type}_{number}" if operator is None else f"{operator}/{node.op_type}_{number}"


def _rename(model: ir.Model, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    graph = model.graph
    named = {id(value): name for value, name in zip(graph.inputs, inputs, strict=True)}
    named |= {id(value): name for value, name in zip(graph.outputs, outputs, strict=True)}
    names = Names([*inputs, *outputs])
    others = [value for node in graph.all_nodes() for value in node.outputs if id(value) not in named]
    others += [value for value in graph.initializers.values() if id(value) not in named]
    others += [value for body in graph.subgraphs() for value in body.inputs]
    for value in others:
        value.name = names.unique(value.name or "value")
    # First temporary names: values of a graph must never share a name, not even temporarily.
    for value in (*graph.inputs, *graph.outputs):
        value.name = names.unique("interface")
    for value in (*graph.inputs, *graph.outputs):
        value.name = named[id(value)]


def set_shapes(model: ir.Model, described: Mapping[str, Sequence[int | str]]) -> None:
    """Gives batch inputs and outputs the dimension names of the model description, and removes the exporter's names.

    ONNX Runtime infers intermediate shapes itself; unknown names there would only cause warnings.
    """
    for node in model.graph.all_nodes():
        for value in node.outputs:
            if value.shape is not None and not value.shape.is_static():
                value.shape = None
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.name is not None and value.name in described:
            value.shape = ir.Shape(described[value.name])
