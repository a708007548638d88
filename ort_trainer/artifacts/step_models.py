"""Makes the training and the evaluation model of an export from the graphs of a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes
import torch

from ..api.artifact import RandomTensor, StepModel, Tensor
from ..graph import RandomInput, TensorSpec, TrainingGraph
from ..graph.names import Names

__all__ = ["IR_VERSION", "evaluation_model", "training_model"]

IR_VERSION = 10
"""Of all models: the highest that onnxruntime 1.18 and 1.19 read."""
_MAXIMUM_OPSET = 21
_STANDARD = ("", "ai.onnx")
_RESET = "lazy_reset_grad"


def training_model(graph: TrainingGraph, factor: float) -> tuple[ir.Model, StepModel]:
    """Returns a copy of a training graph that keeps its gradients in buffers, and what it says about itself.

    Args:
        graph: The graph.
        factor: What the loss is multiplied by before the backward pass.

    Raises:
        ValueError: If it has operators that not every ONNX Runtime has.
    """
    model = _portable(graph)
    inputs = {value.name: value for value in model.graph.inputs}
    outputs = {value.name: value for value in model.graph.outputs}
    names = Names(ir.convenience.create_value_mapping(model.graph))
    if graph.loss_scale is not None:
        _fix(model.graph, inputs[graph.loss_scale.name], graph.loss_scale, factor)
    reset = ir.Value(name=names.unique(_RESET), type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([1]))
    buffers, results = {}, {}
    for name, output in graph.gradients.items():
        gradient = outputs[output]
        weight = inputs.get(graph.state.get(name, ""), gradient)
        kind, shape = ir.TensorType(weight.dtype or ir.DataType.FLOAT), weight.shape or gradient.shape
        buffer = ir.Value(name=names.unique(f"{name}_grad.accumulation.buffer"), type=kind, shape=shape)
        out = ir.Value(name=names.unique(f"{name}_grad.accumulation.out"), type=kind, shape=shape)
        buffers[name], results[name] = buffer, out
    gradients = {name: outputs[output] for name, output in graph.gradients.items()}
    model.graph.append(_accumulation(reset, gradients, buffers, results, names))
    model.graph.inputs.extend([*buffers.values(), reset])
    kept = [outputs[spec.name] for spec in graph.outputs]
    updates = [outputs[output] for output in graph.buffer_updates.values()]
    for name, value in zip(graph.buffer_updates, updates, strict=True):
        value.shape = inputs[graph.state[name]].shape if name in graph.state else value.shape
    model.graph.outputs.clear()
    model.graph.outputs.extend([*kept, *results.values(), *updates])
    common_passes.RemoveUnusedNodesPass()(model)
    said = StepModel(
        kind="training",
        export="",
        inputs=_tensors(graph.inputs, inputs, True),
        outputs=_tensors(graph.outputs, outputs, False),
        loss=graph.loss,
        state=dict(graph.state),
        gradients={name: (str(buffers[name].name), str(results[name].name)) for name in results},
        buffer_updates=dict(graph.buffer_updates),
        reset=str(reset.name),
        random=tuple(_random(spec, inputs[spec.name]) for spec in graph.random),
        guards=graph.guards,
        fixed=dict(graph.fixed),
    )
    return model, said


def evaluation_model(graph: TrainingGraph) -> tuple[ir.Model, StepModel]:
    """Returns a copy of an evaluation graph, and what it says about itself.

    Raises:
        ValueError: If it has operators that not every ONNX Runtime has.
    """
    model = _portable(graph)
    inputs = {value.name: value for value in model.graph.inputs}
    outputs = {value.name: value for value in model.graph.outputs}
    kept = [outputs[spec.name] for spec in graph.outputs]
    model.graph.outputs.clear()
    model.graph.outputs.extend(kept)
    common_passes.RemoveUnusedNodesPass()(model)
    said = StepModel(
        kind="evaluation",
        export="",
        inputs=_tensors(graph.inputs, inputs, True),
        outputs=_tensors(graph.outputs, outputs, False),
        loss=graph.loss,
        state=dict(graph.state),
        guards=graph.guards,
        fixed=dict(graph.fixed),
    )
    return model, said


def _portable(graph: TrainingGraph) -> ir.Model:
    """Returns a copy of the model of a graph that the oldest supported engine reads."""
    model = graph.model.clone()
    kind = "training" if graph.training else "evaluation"
    found = {f"{node.domain}::{node.op_type}" for node in model.graph.all_nodes() if node.domain not in _STANDARD}
    if found:
        raise ValueError(
            f"the {kind} graph has the operators {sorted(found)}, which are not ONNX's own, so that not every ONNX "
            "Runtime could run the artifacts: leave them out of the model, or of _internal_use.extra_postprocess"
        )
    opset = model.opset_imports[""]
    if opset > _MAXIMUM_OPSET:
        raise ValueError(
            f"the {kind} graph has the operator set {opset}, but ONNX Runtime 1.18 reads no later one than "
            f"{_MAXIMUM_OPSET}: set _internal_use.onnx_opset_version to at most that, or leave it out"
        )
    for domain in [domain for domain in model.opset_imports if domain not in _STANDARD]:
        del model.opset_imports[domain]
    model.ir_version = IR_VERSION
    model.metadata_props.clear()
    return model


def _fix(graph: ir.Graph, value: ir.Value, spec: TensorSpec, number: float) -> None:
    """Makes an input a constant."""
    dtype = (value.dtype or ir.DataType.FLOAT).numpy()
    shape = [int(size) for size in spec.shape or ()]
    graph.inputs.remove(value)
    constant = ir.node("Constant", [], {"value": ir.tensor(np.full(shape, number, dtype))}, num_outputs=1)
    ir.convenience.replace_all_uses_with(value, constant.outputs[0])
    constant.outputs[0].name, value.name = value.name, None
    constant.outputs[0].type, constant.outputs[0].shape = value.type, value.shape
    graph.insert_before(graph[0], constant)


def _accumulation(
    reset: ir.Value,
    gradients: Mapping[str, ir.Value],
    buffers: Mapping[str, ir.Value],
    results: Mapping[str, ir.Value],
    names: Names,
) -> ir.Node:
    """Returns the node that begins the gradient buffers anew, or adds to them.

    One condition over all of them: a choice by arithmetic would cost a pass over each, and a NaN would stay.
    """
    branches = {}
    for branch, op_type in (("then_branch", "Identity"), ("else_branch", "Add")):
        nodes = []
        for name, gradient in gradients.items():
            operands = [gradient] if op_type == "Identity" else [buffers[name], gradient]
            out = results[name]
            value = ir.Value(name=names.unique(f"{out.name}.{branch}"), type=out.type, shape=out.shape)
            nodes.append(ir.node(op_type, operands, outputs=[value]))
        branches[branch] = ir.Graph([], [node.outputs[0] for node in nodes], nodes=nodes, name=branch)
    return ir.node("If", [reset], branches, outputs=list(results.values()), name="accumulate_gradients")


def _tensors(specs: tuple[TensorSpec, ...], values: Mapping[Any, ir.Value], described: bool) -> tuple[Tensor, ...]:
    return tuple(
        Tensor(spec.name, _dtype(values[spec.name], spec.dtype), spec.described if described else spec.shape)
        for spec in specs
    )


def _random(spec: RandomInput, value: ir.Value) -> RandomTensor:
    return RandomTensor(spec.name, spec.kind, _dtype(value, spec.dtype), spec.shape, spec.parameters)


def _dtype(value: ir.Value, declared: torch.dtype) -> str:
    """Returns NumPy's name of what a graph takes or gives, which for a bfloat16 tensor is fp32."""
    dtype = value.dtype or ir.tensor_adapters.from_torch_dtype(declared)
    return str(np.dtype(dtype.numpy()))
