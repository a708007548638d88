"""Prepares an ONNX model for an export: its outputs, its description, and a batch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import onnx
import onnx_ir as ir
import torch

from ..capture.step_module import LossFunction
from ..onnx.describe import describe_onnx
from ..onnx.load import OnnxModel, load_onnx_model
from ..onnx.shapes import infer_shapes, known_shapes

_CROSS_ENTROPY = "CrossEntropyLoss"


@dataclass(frozen=True)
class Prepared:
    """The arguments for a trainer.

    Attributes:
        model: The model.
        model_desc: Its description.
        batch: A sample batch.
        parameters: Names of its parameters.
        outputs: The outputs of the artifacts besides the loss; None for all outputs.
    """

    model: Any
    model_desc: Mapping[str, Any] | str
    batch: Any
    parameters: Sequence[str]
    outputs: Sequence[str] | None = None


def is_onnx(model: Any) -> bool:
    """Returns whether a value is an ONNX model, or a possible path of one."""
    return isinstance(model, (onnx.ModelProto, str, os.PathLike))


def prepared(
    model: onnx.ModelProto | str | os.PathLike[str],
    loss_fn: LossFunction | None,
    kind: str | None,
    sample_batch: Any,
    additional: Sequence[str] | None,
    loss_inputs: Sequence[str] | None,
    requires_grad: Sequence[str] | None,
) -> Prepared:
    """Returns the arguments for a trainer of an ONNX model.

    Args:
        model: The model, which is not changed.
        loss_fn: The loss of prediction and label; None if the model computes the loss.
        kind: Name of a predefined loss, which determines its label; None for other losses.
        sample_batch: A batch for the model and the loss function.
        additional: Values to return besides the loss.
        loss_inputs: The output that the loss takes, and optionally the name of the label.
        requires_grad: Parameters to train, even if the file marks them as frozen.

    Raises:
        TypeError, ValueError: If an argument does not fit the model.
    """
    loaded = load_onnx_model(model)
    loaded = replace(loaded, frozen=loaded.frozen - {*(requires_grad or ())})
    model_outputs = loaded.outputs
    _add_outputs(loaded, additional or ())
    parameters = list(loaded.parameters)
    if loss_fn is None:
        if loss_inputs is not None:
            raise ValueError("loss_input_names needs a loss: give a loss, or leave loss_input_names out")
        return Prepared(loaded, describe_onnx(loaded, None, {}).to_dict(), sample_batch, parameters)
    prediction = _prediction(model_outputs, loss_inputs)
    _put_first(loaded.model.graph, prediction)
    name = loss_inputs[1] if loss_inputs is not None and len(loss_inputs) > 1 else None
    if name in (*loaded.inputs, *model_outputs):
        raise ValueError(
            f"loss_input_names gives the label the name {name!r}, which the model already uses for an input or output: "
            "choose another name"
        )
    if kind is not None:
        if sample_batch is not None:
            raise ValueError(f"sample_batch is not needed with {kind}: its label follows from the prediction, omit it")
        batch = _blank_batch(loaded, prediction, kind, name)
    else:
        batch = _named_batch(loaded, sample_batch, name)
    return Prepared(loaded, describe_onnx(loaded, loss_fn, batch).to_dict(), batch, parameters, additional or ())


def _add_outputs(loaded: OnnxModel, names: Sequence[str]) -> None:
    """Makes inner values of the model outputs, after the model's own."""
    infer_shapes(loaded.model)
    graph = loaded.model.graph
    computed = {value.name: value for node in graph for value in node.outputs}
    unknown = [name for name in names if name not in computed]
    if unknown:
        raise ValueError(
            f"unknown additional_output_names {unknown}: no node of the model computes them; its outputs are "
            f"{list(loaded.outputs)}"
        )
    graph.outputs.extend(computed[name] for name in dict.fromkeys(names) if name not in loaded.outputs)


def _prediction(outputs: Sequence[str], loss_inputs: Sequence[str] | None) -> str:
    """Returns the name of the output that the loss takes."""
    if loss_inputs is None:
        if len(outputs) > 1:
            raise ValueError(
                f"the model has the outputs {list(outputs)}: choose one for the loss with loss_input_names"
            )
        return outputs[0]
    if not 1 <= len(loss_inputs) <= 2 or loss_inputs[0] not in outputs:
        raise ValueError(
            f"loss_input_names must be an output of the model, one of {list(outputs)}, and optionally a name for the "
            f"label, but {list(loss_inputs)} was given"
        )
    return loss_inputs[0]


def _put_first(graph: ir.Graph, name: str) -> None:
    """Moves an output to the front: the trainer passes the first output to the loss."""
    ordered = sorted(graph.outputs, key=lambda value: value.name != name)
    graph.outputs.clear()
    graph.outputs.extend(ordered)


def _named_batch(loaded: OnnxModel, sample_batch: Any, name: str | None) -> dict[str, Any]:
    """Returns the user's batch by name; only it determines the label of a loss function."""
    if isinstance(sample_batch, Mapping):
        return dict(sample_batch)
    names = [*loaded.inputs, name or "label"]
    if not isinstance(sample_batch, (tuple, list)) or len(sample_batch) != len(names):
        needed = f"({', '.join([*loaded.inputs, 'label'])})" if loaded.inputs else "(label,)"
        raise ValueError(f"a function as loss needs a batch to determine the label: give sample_batch={needed}")
    return dict(zip(names, sample_batch, strict=True))


def _blank_batch(loaded: OnnxModel, prediction: str, loss: str, name: str | None) -> dict[str, torch.Tensor]:
    """Returns zeros for the inputs and the label, which has the prediction's shape, or that of class indices."""
    graph = loaded.model.graph
    values = {str(value.name): value for value in (*graph.inputs, *graph.outputs)}
    shapes, sizes = known_shapes(loaded.model), dict[str, int]()
    batch = {name: _zeros(values[name], shapes[name] or (), sizes) for name in loaded.inputs}
    like = shapes[prediction]
    if like is None:
        raise ValueError(
            f"the shape of the output {prediction!r} is unknown, so the shape of its label is too: give a function as "
            "loss, and sample_batch"
        )
    label = _zeros(values[prediction], like, sizes)
    if loss == _CROSS_ENTROPY:
        if label.dim() < 2:
            raise ValueError(f"cross entropy needs the classes as second dimension, but {prediction!r} has only one")
        label = torch.zeros([size for axis, size in enumerate(label.shape) if axis != 1], dtype=torch.int64)
    batch[name or ("labels" if loss == _CROSS_ENTROPY else "target")] = label
    return batch


def _zeros(value: ir.Value, described: Sequence[int | str | None], sizes: dict[str, int]) -> torch.Tensor:
    """Returns zeros of a described shape.

    Each symbolic dimension has a different size, recorded in ``sizes``, so that the export can tell them apart.
    """
    shape = []
    for axis, size in enumerate(described):
        symbol = size if isinstance(size, str) else f"{value.name}_{axis}"
        shape.append(size if isinstance(size, int) else sizes.setdefault(symbol, 2 + len(sizes)))
    return torch.zeros(shape, dtype=ir.tensor_adapters.to_torch_dtype(value.dtype or ir.DataType.FLOAT))
