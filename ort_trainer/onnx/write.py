"""Writes a loaded model again, node for node, with other weights."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence

import onnx_ir as ir
import torch

from ..step.onnx_file import WEIGHTS, recorded_weights
from ..step.prune import RemoveUnusedPass, prune
from .load import OnnxModel


def with_weights(
    loaded: OnnxModel, values: Mapping[str, torch.Tensor], trained: Collection[str], outputs: Sequence[str] | None
) -> ir.Model:
    """Returns the model with other weights.

    Args:
        loaded: The model; it is not changed.
        values: The weights and running statistics by name, of any floating-point dtype.
        trained: Names of the weights that are trained.
        outputs: Names of outputs, to return a model in inference form with only these outputs and the nodes and inputs
            that they need. None for the whole model, whose nodes keep their modes.
    """
    model = loaded.file.clone()
    model.ir_version = max(model.ir_version or 0, 4)  # before, initializers had to be inputs too
    graph = model.graph
    frozen = [name for name in loaded.parameters if name not in trained]
    buffers = dict.fromkeys([*loaded.buffers, *recorded_weights(model)["buffers"]])
    model.metadata_props[WEIGHTS] = json.dumps({"trained": list(trained), "frozen": frozen, "buffers": list(buffers)})
    weights = [value for value in graph.inputs if value.name in values]
    batch_inputs = [value for value in graph.inputs if value.name not in values]
    graph.inputs.clear()
    graph.inputs.extend(batch_inputs)
    dtypes = {name: tensor.dtype for name, tensor in [*loaded.parameters.items(), *loaded.buffers.items()]}
    for value in weights:
        name = str(value.name)
        tensor = values[name].detach().cpu().to(dtypes[name])
        value.const_value = ir.tensor_adapters.TorchTensor(tensor, name=name)
        graph.register_initializer(value)
    for name in loaded.order:
        graph.initializers[name] = graph.initializers.pop(name)
    nodes = [node for node in graph if node.op_type != "Constant"]
    for name, (index, attribute) in loaded.coefficients.items():
        nodes[index].attributes[attribute] = ir.AttrFloat32s(attribute, values[name].flatten().tolist())
    if outputs is None:
        return model
    _add_outputs(graph, [value for value in loaded.model.graph.outputs if value.name in outputs])
    model = prune(model, outputs)
    graph = model.graph
    for node in [*graph.all_nodes(), *(node for function in model.functions.values() for node in function.all_nodes())]:
        _to_inference_form(node)
    return RemoveUnusedPass()(model).model


def _add_outputs(graph: ir.Graph, described: Sequence[ir.Value]) -> None:
    """Makes the tensors outputs that the file passes to a ZipMap, whose map was its output."""
    values = ir.convenience.create_value_mapping(graph)
    for output in described:
        value = values[str(output.name)]
        if not value.is_graph_output():
            value.type, value.shape = output.type, output.shape
            graph.outputs.append(value)


def _to_inference_form(node: ir.Node) -> None:
    """Switches a Dropout or BatchNormalization to inference, in place.

    The outputs of new running statistics are replaced by the statistics themselves: inputs 3 and 4, mean and variance.
    """
    if node.domain not in ("", "ai.onnx"):
        return
    if node.op_type == "Dropout" and len(node.inputs) > 2:
        node.resize_inputs(2)
    if node.op_type == "BatchNormalization":
        node.attributes.pop("training_mode", None)
        for output, value in enumerate(node.outputs[1:]):
            statistic = node.inputs[3 + output % 2]
            assert statistic is not None
            if value.is_graph_output():
                named = ir.Value(name=value.name, type=value.type, shape=value.shape)
                assert node.graph is not None
                node.graph.insert_after(node, ir.node("Identity", [statistic], outputs=[named]))
                statistic = named
            ir.convenience.replace_all_uses_with(value, statistic, replace_graph_outputs=True)
        node.resize_outputs(1)
