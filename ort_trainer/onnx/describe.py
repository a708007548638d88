"""Derives a model description from an ONNX model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import onnx_ir as ir
import torch

from ..capture.step_module import LossFunction, takes_label
from ..options import ModelDescription
from ..step.names import Names
from .load import OnnxModel
from .shapes import dtype_of, known_shapes


def input_dtypes(model: OnnxModel) -> dict[str, torch.dtype]:
    """Returns the dtypes of a model's inputs by name."""
    types = {str(value.name): dtype_of(value) for value in model.model.graph.inputs}
    return {name: ir.tensor_adapters.to_torch_dtype(types[name]) for name in (*model.inputs, *model.optional)}


def check_inputs(model: OnnxModel, names: Iterable[str]) -> None:
    """Checks that no input of a batch would replace a weight.

    Raises:
        ValueError: If one would.
    """
    fixed = [name for name in names if name in model.fixed]
    if fixed:
        raise ValueError(
            f"the ONNX model has values for its inputs {fixed}, which are weights or names that Python can't use as "
            f"arguments: leave them out of the batch, which has the inputs {[*model.inputs, *model.optional]} and "
            "labels; or remove their initializers from the file"
        )


def describe_onnx(
    model: OnnxModel,
    loss_fn: LossFunction | None,
    batch: Mapping[str, Any],
    loss: str = "",
    outputs: Sequence[str] | None = None,
) -> ModelDescription:
    """Returns a description derived from an ONNX model: its inputs, outputs and their named dimensions.

    Args:
        model: The model.
        loss_fn: The loss function, or None. Its labels are the entries of the batch that are not inputs of the model.
        batch: A sample, which determines the shapes of the labels.
        loss: Name of the output that is the loss; if empty, the output "loss" or the only scalar output.
        outputs: The outputs to describe; None for all.

    Raises:
        ValueError: If the batch has a weight, ``loss`` is not an output, no output or several could be the loss, or
            the batch lacks the label or an input.
    """
    check_inputs(model, batch)
    graph = model.model.graph
    shapes = known_shapes(model.model)

    def shape(name: str) -> list[int | str]:
        return [size or f"{name}_{axis}" for axis, size in enumerate(shapes[name] or ())]

    inputs = [(name, shape(name)) for name in (*model.inputs, *model.optional) if name in (*model.inputs, *batch)]
    names = model.outputs if outputs is None else outputs
    if loss_fn is not None:
        labels = [name for name in batch if name not in (*model.inputs, *model.optional)]
        if not labels and takes_label(loss_fn):
            raise ValueError(
                f"model_desc='auto' with a loss_fn needs the label, beside the inputs {list(model.inputs)} of the ONNX "
                f"model, but the batch has only {list(batch)}"
            )
        missing = [name for name in model.inputs if name not in batch]
        if missing:
            raise ValueError(f"the first batch lacks the inputs {missing} of the ONNX model: it has only {list(batch)}")
        first = inputs[0][1][0] if inputs and inputs[0][1] else None
        for label in labels:
            sizes = list(batch[label].shape)
            # A label of as many rows as the first input shares its named batch dimension.
            if sizes and isinstance(first, str) and sizes[0] == batch[inputs[0][0]].shape[0]:
                sizes[0] = first
            inputs.append((label, sizes))
        first_output = Names(ir.convenience.create_value_mapping(graph)).unique("loss")
        described = [(first_output, [], True), *((name, shape(name)) for name in names)]
        return ModelDescription({"inputs": inputs, "outputs": described})
    scalars = [name for name in names if not shape(name) or shape(name) == [1]]
    if loss and loss not in names:
        raise ValueError(f"the loss {loss!r} is not an output of the ONNX model: it has {list(names)}")
    if loss or "loss" in scalars:
        scalars = [loss or "loss"]
    if len(scalars) != 1:
        raise ValueError(
            f"model_desc='auto' can't tell which output of the ONNX model is the loss. Its outputs are "
            f"{ {name: shape(name) for name in names} }: write a model_desc that marks one, or give a loss_fn"
        )
    marked = [(name, shape(name), name == scalars[0]) for name in names]
    return ModelDescription({"inputs": inputs, "outputs": marked})
