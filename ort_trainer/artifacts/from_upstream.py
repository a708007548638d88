"""Converts the models of onnxruntime-training's artifacts to those of ``ort_trainer.api``.

Of a training model only the forward pass is used. The exporter derives the gradients anew, as for any ONNX model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import onnx
import onnx_ir as ir
import torch

from ..core.errors import ExportError
from ..core.foreign import UPSTREAM
from ..core.indices import IndexRange
from ..engine import Request
from ..onnx.describe import describe_onnx
from ..onnx.load import load_onnx_model
from ..onnx.shapes import infer_shapes, known_shapes
from ..optim import AdamConfig, OptimizerConfig, SGDConfig
from ..optim.rule import RULES
from ..optim.update_writer import ParameterUpdate
from ..options import ORTTrainerOptions
from ..sources import model_source
from ..state.state import Array
from ..step import Step, TensorSpec
from ..step.onnx_file import WEIGHTS
from ..upstream.models import ForwardPass, forward_pass, update_settings
from .files import Described
from .optimizer_model import Updated, optimizer_model
from .step_models import training_model

# Upstream clips gradients by the factor max_norm / (norm + epsilon).
_EPSILON = 1e-6


def converted_step(data: bytes, name: str, kind: str, parameters: Mapping[str, Array]) -> Described:
    """Converts upstream's training or evaluation model to a step: the graph and its description.

    Args:
        data: The model.
        name: Its name in error messages.
        kind: ``training`` or ``evaluation``.
        parameters: The tensors of the checkpoint. Inputs of the model with these names are state, the others are the
            batch.

    Raises:
        ValueError: If it is not such a model, or has unsupported operators.
    """
    forward = forward_pass(data, name, kind, parameters)
    shapes = {str(value.name): value.shape for value in forward.model.graph.inputs}
    wrong = [key for key, shape in shapes.items() if shape is None or (key in parameters and not shape.is_static())]
    if wrong:
        raise ValueError(f"{name} does not declare the shapes of its inputs {wrong}: export it with all shapes")
    if kind == "evaluation":
        return forward.model, _described(forward, kind)
    step = _described(forward, kind) if forward.gradients else _differentiated(forward, name, parameters)
    model, described = training_model(step, 1.0)
    return model, _with_all_state(model, replace(described, export=UPSTREAM), forward)


def _differentiated(forward: ForwardPass, name: str, parameters: Mapping[str, Array]) -> Step:
    """Returns the training step of a forward pass."""
    try:
        loaded = load_onnx_model(_with_values(forward, parameters))
        description = describe_onnx(loaded, None, {}, loss=forward.outputs[0])
        source = model_source(loaded, None, SGDConfig(), ORTTrainerOptions({"utils": {"kernels": "onnxruntime"}}))
        builder = source.builder(description, portable=True)
        request = Request(source.blank_batch(description), True, description.output_names)
        return builder.build(request).unchecked()
    except ExportError as error:
        raise ValueError(
            f"{name} can't be converted: {error}. Export the model that it was made from with "
            "ort_trainer.artifacts.generate_artifacts()"
        ) from error


def _with_values(forward: ForwardPass, parameters: Mapping[str, Array]) -> onnx.ModelProto:
    """Returns a forward pass with the parameters as initializers, and marks of those that are trained.

    A nominal checkpoint has no values; they are zeros then.
    """
    graph = forward.model.graph
    statistics: set[str] = set()
    for node in graph:
        if node.op_type == "BatchNormalization" and node.attributes.get_int("training_mode", 0) == 1:
            statistics.update(str(value.name) for value in node.inputs[3:5] if value is not None)
    for value in [value for value in graph.inputs if value.name in forward.parameters]:
        assert value.shape is not None
        stored, shape = parameters[str(value.name)], value.shape.numpy()
        array = stored if stored.shape == shape else np.zeros(shape, stored.dtype)
        graph.inputs.remove(value)
        value.const_value = ir.tensor(array, name=value.name)
        graph.register_initializer(value)
    frozen = [key for key in forward.parameters if key not in forward.trained and key not in statistics]
    forward.model.metadata_props[WEIGHTS] = json.dumps({"trained": list(forward.trained), "frozen": frozen})
    return ir.to_proto(forward.model)


def _described(forward: ForwardPass, kind: str) -> Step:
    """Returns the step of a graph that needs no export: that of an evaluation model, or one that we wrote."""
    model, graph = forward.model, forward.model.graph
    infer_shapes(model)
    shapes = known_shapes(model)
    values = {str(value.name): value for value in (*graph.inputs, *graph.outputs)}

    def spec(name: str) -> TensorSpec:
        sizes = tuple(size or f"{name}_{axis}" for axis, size in enumerate(shapes[name] or ()))
        return TensorSpec(name, str((values[name].dtype or ir.DataType.FLOAT).numpy().name), sizes)

    def output(name: str) -> TensorSpec:
        """Returns a description without a shape, if that depends on sizes that no input has."""
        sizes = spec(name).shape or ()
        is_known = shapes[name] is not None and all(isinstance(size, int) or size in symbols for size in sizes)
        shape = tuple(size if isinstance(size, int) else f"dim({size!r})" for size in sizes)
        return spec(name)._replace(shape=shape if is_known else None)

    inputs = tuple(spec(str(value.name)) for value in graph.inputs if value.name not in forward.parameters)
    symbols = {size for entry in inputs for size in entry.shape or ()}
    return Step(
        kind=kind,
        export=UPSTREAM,
        inputs=inputs,
        outputs=tuple(map(output, forward.outputs)),
        loss=forward.outputs[0],
        state={name: name for name in forward.parameters},
        gradients=forward.gradients,
        buffer_updates=forward.updates,
        index_ranges=tuple(dict.fromkeys(_index_ranges(graph))),
        stored=model,
    )


def _index_ranges(graph: ir.Graph) -> Iterator[IndexRange]:
    """Yields the ranges that embeddings and losses require of integer inputs of a graph."""
    for node in graph:
        if node.op_type not in ("Gather", "SoftmaxCrossEntropyLoss"):
            continue
        data, indices = node.inputs[:2]
        if data is None or data.shape is None or indices is None or not indices.is_graph_input():
            continue
        embeds = node.op_type == "Gather"
        size = data.shape[node.attributes.get_int("axis", 0) if embeds else 1]
        ignored = None if embeds else node.attributes.get_int("ignore_index", None)  # type: ignore[arg-type]
        if isinstance(size, int):
            yield IndexRange(str(indices.name), size, embeds, ignored, node.op_type)


def _with_all_state(model: ir.Model, step: Step, forward: ForwardPass) -> Step:
    """Makes all parameters of upstream's model inputs, in its order, in place.

    A flat buffer has the parameters in this order.
    """
    graph = model.graph
    inputs = {str(value.name): value for value in graph.inputs}
    state = {
        name: inputs.get(step.state.get(name, "")) or ir.Value(name=name, type=value.type, shape=value.shape)
        for name, value in forward.parameters.items()
    }
    others = [value for value in graph.inputs if value not in state.values()]
    graph.inputs.clear()
    graph.inputs.extend([*others[: len(step.inputs)], *state.values(), *others[len(step.inputs) :]])
    return replace(step, state={name: str(value.name) for name, value in state.items()})


def converted_optimizer(data: bytes, name: str, parameters: Mapping[str, Array]) -> Described:
    """Converts upstream's optimizer model to one that updates every trained parameter.

    Args:
        data: The model.
        name: Its name in error messages.
        parameters: The trained parameters, which upstream's model takes as a sequence.

    Raises:
        ValueError: If it is not such a model, or its optimizer is neither AdamW nor SGD.
    """
    settings = update_settings(data, name)
    config: OptimizerConfig = SGDConfig() if settings.adam is None else AdamConfig(**settings.adam)
    limit = math.inf if settings.limit is None else settings.limit
    update = ParameterUpdate(RULES[config.name], 0, config.hyper_parameters(0), limit)
    updates = {
        key: Updated(update, torch.from_numpy(value), dict.fromkeys(update.slots, value), 0 if update.counts else None)
        for key, value in parameters.items()
    }
    model, description, _ = optimizer_model(config.name, updates, 1, norm_epsilon=_EPSILON)
    if settings.fixed_rate is not None:
        given = next(value for value in model.graph.inputs if value.name == description.learning_rate)
        constant = ir.node("Constant", [], {"value": ir.tensor(settings.fixed_rate.reshape(1))}, num_outputs=1)
        ir.convenience.replace_all_uses_with(given, constant.outputs[0])
        model.graph.insert_before(model.graph[0], constant)
    return model, replace(description, export=UPSTREAM)
