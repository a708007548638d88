"""Checks a model description against an ONNX model, or derives it from the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import onnx_ir as ir

from ...options import ModelDescription
from ...step.emitter import Names
from ..torch import LossFunction
from .load import OnnxModel
from .nodes import shape_of
from .passes.infer_shapes import InferShapesPass

__all__ = ["check_description", "describe_onnx"]


def check_description(model: OnnxModel, description: ModelDescription, loss_fn: LossFunction | None) -> None:
    """Checks a description against the inputs and outputs of a model.

    Raises:
        ValueError: If names do not match.
    """
    names = description.input_names if loss_fn is None else description.input_names[:-1]
    if sorted(names) != sorted(model.inputs):
        raise ValueError(
            f"model_desc has the inputs {names}{'' if loss_fn is None else ' (and a label)'}, but the ONNX model has "
            f"{list(model.inputs)}"
        )
    if loss_fn is not None:
        label = description.input_names[-1]
        if not description.outputs[0].is_loss:
            raise ValueError("with a loss_fn, the first output of model_desc must be the loss")
        if label in ir.convenience.create_value_mapping(model.model.graph):
            raise ValueError(f"the ONNX model already has a value with the label's name {label!r}: choose another name")
    outputs = description.output_names if loss_fn is None else description.output_names[1:]
    unknown = [name for name in outputs if name not in model.outputs]
    if unknown:
        raise ValueError(f"unknown outputs {unknown} in model_desc: the ONNX model has {list(model.outputs)}")
    if loss_fn is not None and description.loss.name in ir.convenience.create_value_mapping(model.model.graph):
        raise ValueError(
            f"the ONNX model already has a value with the loss's name {description.loss.name!r}: choose another name"
        )


def describe_onnx(
    model: OnnxModel, loss_fn: LossFunction | None, batch: Mapping[str, Any], loss: str = ""
) -> ModelDescription:
    """Returns a description derived from an ONNX model: its inputs, outputs and their named dimensions.

    Args:
        model: The model.
        loss_fn: The loss function, or None. With one, the label is the entry of the batch that is not an input.
        batch: A sample, which determines the shape of the label.
        loss: Name of the output that is the loss; empty to find it.

    Raises:
        ValueError: If ``loss`` is not an output, or the loss or the label is ambiguous.
    """
    graph = InferShapesPass()(model.model.clone()).model.graph
    shapes = {value.name: shape_of(value) for value in (*graph.inputs, *graph.outputs)}

    def shape(name: str) -> list[int | str]:
        return [size or f"{name}_{axis}" for axis, size in enumerate(shapes[name] or ())]

    inputs = [(name, shape(name)) for name in model.inputs]
    outputs: list[tuple[Any, ...]]
    if loss_fn is not None:
        labels = [name for name in batch if name not in model.inputs]
        if len(labels) != 1:
            raise ValueError(
                f"model_desc='auto' with a loss_fn needs exactly one entry of the batch as label besides the inputs "
                f"{list(model.inputs)} of the ONNX model, but got {labels}"
            )
        sizes = list(batch[labels[0]].shape)
        first = inputs[0][1][0] if inputs[0][1] else None
        if sizes and isinstance(first, str) and sizes[0] == batch[inputs[0][0]].shape[0]:
            sizes[0] = first
        inputs.append((labels[0], sizes))
        name = Names(ir.convenience.create_value_mapping(graph)).unique("loss")
        outputs = [(name, [], True), *((name, shape(name)) for name in model.outputs)]
        return ModelDescription({"inputs": inputs, "outputs": outputs})
    scalars = [name for name in model.outputs if not shape(name) or shape(name) == [1]]
    if loss and loss not in model.outputs:
        raise ValueError(f"the loss {loss!r} is not an output of the ONNX model: it has {list(model.outputs)}")
    if loss or "loss" in scalars:
        scalars = [loss or "loss"]
    if len(scalars) != 1:
        raise ValueError(
            f"model_desc='auto' can't tell which output of the ONNX model is the loss. Its outputs are "
            f"{ {name: shape(name) for name in model.outputs} }: write a model_desc that marks one, or give a loss_fn"
        )
    outputs = [(name, shape(name), name == scalars[0]) for name in model.outputs]
    return ModelDescription({"inputs": inputs, "outputs": outputs})
