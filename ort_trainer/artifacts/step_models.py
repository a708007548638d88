"""Converts the graphs of a trainer to the training and evaluation models of an export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from ..core.indices import IndexRange
from ..step import Step, TensorSpec
from ..step.accumulate import ACCUMULATED, BUFFER, RESET, accumulate
from ..step.contract import IR_VERSION
from ..step.names import Names

# The newest opset that the oldest supported engine reads.
_MAXIMUM_OPSET = 21
Values = Mapping[Any, ir.Value]
_STANDARD = ("", "ai.onnx")


def training_model(graph: Step, factor: float) -> tuple[ir.Model, Step]:
    """Returns a copy of a training graph that accumulates its gradients in buffers, and its description.

    Args:
        graph: The graph.
        factor: Factor for the loss before the backward pass.

    Raises:
        ValueError: If it has operators that some supported version of ONNX Runtime lacks.
    """
    model = _portable(graph)
    inputs = {value.name: value for value in model.graph.inputs}
    outputs = {value.name: value for value in model.graph.outputs}
    names = Names(ir.convenience.create_value_mapping(model.graph))
    if graph.loss_scale is not None:
        _fix(model.graph, inputs[graph.loss_scale.name], graph.loss_scale, factor)
    reset = ir.Value(name=names.unique(RESET), type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([1]))
    buffers, results = {}, {}
    for name, output in graph.gradients.items():
        gradient = outputs[output]
        weight = inputs.get(graph.state.get(name, ""), gradient)
        kind, shape = ir.TensorType(weight.dtype or ir.DataType.FLOAT), weight.shape or gradient.shape
        buffer = ir.Value(name=names.unique(BUFFER.format(name)), type=kind, shape=shape)
        out = ir.Value(name=names.unique(ACCUMULATED.format(name)), type=kind, shape=shape)
        buffers[name], results[name] = buffer, out
    gradients = {name: outputs[output] for name, output in graph.gradients.items()}
    model.graph.extend(accumulate(reset, gradients, buffers, results, names))
    model.graph.inputs.extend([*buffers.values(), reset])
    _batch_first(graph, model)
    step_outputs = [outputs[spec.name] for spec in graph.outputs]
    updates = [outputs[output] for output in graph.buffer_updates.values()]
    for name, value in zip(graph.buffer_updates, updates, strict=True):
        value.shape = inputs[graph.state[name]].shape if name in graph.state else value.shape
    model.graph.outputs.clear()
    model.graph.outputs.extend([*step_outputs, *results.values(), *updates])
    common_passes.RemoveUnusedNodesPass()(model)
    description = replace(
        _described(graph, inputs, outputs),
        gradients={name: str(value.name) for name, value in results.items()},
        sums={name: str(value.name) for name, value in buffers.items()},
        reset=str(reset.name),
    )
    return model, description


def evaluation_model(graph: Step) -> tuple[ir.Model, Step]:
    """Returns a copy of an evaluation graph, and its description.

    Raises:
        ValueError: If it has operators that some supported version of ONNX Runtime lacks.
    """
    model = _portable(graph)
    inputs = {value.name: value for value in model.graph.inputs}
    outputs = {value.name: value for value in model.graph.outputs}
    step_outputs = [outputs[spec.name] for spec in graph.outputs]
    _batch_first(graph, model)
    model.graph.outputs.clear()
    model.graph.outputs.extend(step_outputs)
    common_passes.RemoveUnusedNodesPass()(model)
    return model, _described(graph, inputs, outputs)


def _batch_first(graph: Step, model: ir.Model) -> None:
    """Puts the batch before all other inputs, as in upstream's models."""
    order = {spec.name: place for place, spec in enumerate(graph.inputs)}
    ordered = sorted(model.graph.inputs, key=lambda value: order.get(str(value.name), len(order)))
    model.graph.inputs.clear()
    model.graph.inputs.extend(ordered)


def _described(graph: Step, inputs: Values, outputs: Values) -> Step:
    """Returns the description of a model, with the element types of its graph: float32 for a bfloat16 tensor."""
    return replace(
        graph,
        inputs=tuple(spec._replace(dtype=_dtype(inputs[spec.name], spec.dtype)) for spec in graph.inputs),
        outputs=tuple(spec._replace(dtype=_dtype(outputs[spec.name], spec.dtype)) for spec in graph.outputs),
        random=tuple(spec._replace(dtype=_dtype(inputs[spec.name], spec.dtype), order=()) for spec in graph.random),
        index_ranges=_index_ranges(graph),
        loss_scale=None,
        origins="",
    )


def _index_ranges(graph: Step) -> tuple[IndexRange, ...]:
    """Returns the ranges to check in a step, without the source lines, which belong to the user's files."""
    output_names = {spec.name for spec in graph.outputs}
    needed = (entry for entry in graph.index_ranges if graph.training or not output_names.isdisjoint(entry.outputs))
    return tuple(dict.fromkeys(entry._replace(source="", outputs=()) for entry in needed))


def _portable(graph: Step) -> ir.Model:
    """Returns a copy of a graph's model that the oldest supported engine can read."""
    check_portable(graph)
    model = graph.model.clone()
    for domain in [domain for domain in model.opset_imports if domain not in _STANDARD]:
        del model.opset_imports[domain]
    model.ir_version = IR_VERSION
    model.metadata_props.clear()
    return model


def check_portable(graph: Step) -> None:
    """Checks that every supported version of ONNX Runtime can run a graph.

    Raises:
        ValueError: If it has operators, or an opset, that some supported version of ONNX Runtime lacks.
    """
    model = graph.model
    kind = "training" if graph.training else "evaluation"
    custom = {f"{node.domain}::{node.op_type}" for node in model.graph.all_nodes() if node.domain not in _STANDARD}
    if custom:
        raise ValueError(
            f"the {kind} graph has the operators {sorted(custom)}, which are not standard ONNX, so some ONNX Runtimes "
            "could not run the artifacts: remove them from the model or from _internal_use.extra_postprocess"
        )
    opset = model.opset_imports[""]
    if opset > _MAXIMUM_OPSET:
        raise ValueError(
            f"the {kind} graph has opset {opset}, but ONNX Runtime 1.19 reads at most opset {_MAXIMUM_OPSET}: set "
            f"_internal_use.onnx_opset_version to at most {_MAXIMUM_OPSET}, or leave it out"
        )


def _fix(graph: ir.Graph, value: ir.Value, spec: TensorSpec, number: float) -> None:
    """Replaces an input with a constant."""
    dtype = (value.dtype or ir.DataType.FLOAT).numpy()
    shape = [int(size) for size in spec.shape or ()]
    graph.inputs.remove(value)
    constant = ir.node("Constant", [], {"value": ir.tensor(np.full(shape, number, dtype))}, num_outputs=1)
    ir.convenience.replace_all_uses_with(value, constant.outputs[0])
    constant.outputs[0].name, value.name = value.name, None
    constant.outputs[0].type, constant.outputs[0].shape = value.type, value.shape
    graph.insert_before(graph[0], constant)


def _dtype(value: ir.Value, declared: str) -> str:
    return declared if value.dtype is None else str(value.dtype.numpy().name)
