"""``OnnxGraphBuilder``: makes training and evaluation graphs of an ONNX model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx import helper, numpy_helper

from ...errors import ExportError
from ...graph import RandomInput, TensorSpec, TrainingGraph
from ...graph.postprocess import postprocessed
from ...options import ModelDescription
from ...runtime.engine import infer_symbolic_shapes
from ..torch import LossFunction
from .gradient import differentiate
from .load import OnnxModel
from .loss import merge_loss, with_loss_scale
from .lower import lower
from .measure import measure_shapes
from .modes import autocast, to_evaluation, to_training
from .nodes import (
    SizeNeededError,
    Values,
    attributes_of,
    dims,
    named_symbols,
    names_in,
    names_inside,
    replace_all,
    torch_type,
)

__all__ = ["OnnxGraphBuilder", "OnnxStep", "check_description", "describe_onnx"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OnnxStep:
    """What is trained.

    Attributes:
        model: The forward pass and its weights.
        description: The model description.
        loss_fn: The loss of (first output of the model, label), or None where the loss is an output.
        trainable: Names of the weights to train.
        autocast: dtype of mixed precision, or None.
        symbolic_shapes: Whether ONNX Runtime's symbolic shape inference looks at the model, besides ONNX's own.
    """

    model: OnnxModel
    description: ModelDescription
    loss_fn: LossFunction | None
    trainable: tuple[str, ...]
    autocast: torch.dtype | None = None
    symbolic_shapes: bool = False


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
            raise ValueError("with a loss_fn the first output of model_desc is the loss")
        if label in names_in(model.proto.graph):
            raise ValueError(f"the label's name {label!r} is taken by a value of the ONNX model: choose another")
    outputs = description.output_names if loss_fn is None else description.output_names[1:]
    unknown = [name for name in outputs if name not in model.outputs]
    if unknown:
        raise ValueError(
            f"model_desc has the outputs {unknown}, which the ONNX model does not have: it has {list(model.outputs)}"
        )
    if loss_fn is not None and description.loss.name in names_in(model.proto.graph):
        raise ValueError(f"the loss's name {description.loss.name!r} is taken by a value of the ONNX model")


def describe_onnx(
    model: OnnxModel, loss_fn: LossFunction | None, batch: Mapping[str, Any], loss: str = ""
) -> ModelDescription:
    """Returns the description that an ONNX model itself has: its inputs, outputs and their named dimensions.

    Args:
        model: The model.
        loss_fn: The loss function; then the label is the entry of the batch that is no input of the model.
        batch: A sample, which tells the shape of the label.
        loss: Name of the output that is the loss; empty to find it.

    Raises:
        ValueError: If there is no such output, or it is not clear which output is the loss or which entry the label.
    """
    values = Values(model.proto)

    def shape(name: str) -> list[int | str]:
        return [size or f"{name}_{axis}" for axis, size in enumerate(values.shape(name) or ())]

    inputs = [(name, shape(name)) for name in model.inputs]
    outputs: list[tuple[Any, ...]]
    if loss_fn is not None:
        labels = [name for name in batch if name not in model.inputs]
        if len(labels) != 1:
            raise ValueError(
                f"model_desc='auto' with a loss_fn: one entry of the batch must be the label, but {labels} are no "
                f"inputs of the ONNX model, which has {list(model.inputs)}"
            )
        sizes = list(batch[labels[0]].shape)
        first = inputs[0][1][0] if inputs[0][1] else None
        if sizes and isinstance(first, str) and sizes[0] == batch[inputs[0][0]].shape[0]:
            sizes[0] = first
        inputs.append((labels[0], sizes))
        outputs = [("loss", [], True), *((name, shape(name)) for name in model.outputs)]
        return ModelDescription({"inputs": inputs, "outputs": outputs})
    scalars = [name for name in model.outputs if not shape(name) or shape(name) == [1]]
    if loss and loss not in model.outputs:
        raise ValueError(f"the loss {loss!r} is no output of the ONNX model: it has {list(model.outputs)}")
    if loss or "loss" in scalars:
        scalars = [loss or "loss"]
    if len(scalars) != 1:
        raise ValueError(
            f"model_desc='auto': it is not clear which output of the ONNX model is the loss. Its outputs are "
            f"{ {name: shape(name) for name in model.outputs} }: write a model_desc that marks one, or give a loss_fn"
        )
    outputs = [(name, shape(name), name == scalars[0]) for name in model.outputs]
    return ModelDescription({"inputs": inputs, "outputs": outputs})


@dataclass(frozen=True)
class OnnxGraphBuilder:
    """Builds training and evaluation graphs of one step.

    Attributes:
        step: What is trained.
        postprocess: The user's own pass over the ONNX model, or None.
        losses: The loss function as exported before, for every description of its inputs.
    """

    step: OnnxStep
    postprocess: Callable[[onnx.ModelProto], onnx.ModelProto | None] | None = None
    losses: dict[Any, onnx.ModelProto] = field(default_factory=dict, repr=False, compare=False)

    def build(self, batch: Mapping[str, torch.Tensor], training: bool) -> TrainingGraph:
        """Builds a graph for a batch; symbolic dimensions stay free unless a rewrite needs a number.

        Args:
            batch: A sample of every input.
            training: Whether to build the graph with the backward pass, or the one for evaluation.

        Raises:
            ExportError: If the model can't be differentiated, or its values are not as described.
        """
        start = time.perf_counter()
        sizes = self.step.description.sizes({name: tuple(value.shape) for name, value in batch.items()})
        measured, fixed = False, self._sizes_of_the_model(sizes)
        while True:
            try:
                graph = self._assemble(batch, training, fixed, measured)
                break
            except SizeNeededError as reason:
                needed = {reason.symbol, *named_symbols(reason.symbol or "")} & (sizes.keys() - fixed.keys())
                if needed:
                    fixed |= {symbol: sizes[symbol] for symbol in needed if symbol is not None}
                elif not measured:
                    measured = True
                elif len(fixed) < len(sizes):
                    fixed = sizes
                else:
                    raise ExportError(
                        f"shapes of the ONNX model are not known, for batches of {sizes}: {reason}"
                    ) from reason
        for symbol, size in fixed.items():
            _log.warning("the ONNX model asks for dimension %r as a number, %d: each other size is built", symbol, size)
        kind = "training" if training else "evaluation"
        _log.info("built the %s graph in %.1f s: %d nodes", kind, time.perf_counter() - start, len(graph.model.graph))
        return graph if self.postprocess is None else postprocessed(graph, self.postprocess)

    def _sizes_of_the_model(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Returns the dimensions that the description leaves open, but the model itself does not."""
        fixed: dict[str, int] = {}
        inputs = {value.name: value.type.tensor_type.shape.dim for value in self.step.model.proto.graph.input}
        for entry in self.step.description.inputs:
            for described, size in zip(entry.shape, inputs.get(entry.name, ()), strict=False):
                if isinstance(described, str) and size.dim_value:
                    if sizes[described] != size.dim_value:
                        raise ExportError(
                            f"dimension {described!r} of input {entry.name!r} is {sizes[described]}, but the ONNX "
                            f"model was exported for {size.dim_value} only"
                        )
                    fixed[described] = size.dim_value
        return fixed

    def reference(self, batch: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor]:
        """There is nothing to compare with: the model is the graph."""
        raise TypeError("an ONNX model has no other form that its graph could be compared with")

    def _assemble(
        self, batch: Mapping[str, torch.Tensor], training: bool, fixed: Mapping[str, int], measured: bool
    ) -> TrainingGraph:
        step, description = self.step, self.step.description
        model = onnx.ModelProto()
        model.CopyFrom(step.model.proto)
        _check_dtypes(model, batch)
        _set_input_shapes(model, description, fixed)
        if step.symbolic_shapes:
            model = _inferred(model)
        state = {**step.model.parameters, **step.model.buffers}
        known = measure_shapes(model, description, batch, state, fixed) if measured else set()
        if step.loss_fn is not None:
            merge_loss(model, step.loss_fn, description, _prediction(step), batch, fixed, self.losses)
        keep = description.output_names
        graph_outputs = {value.name: value for value in model.graph.output}
        del model.graph.output[:]
        model.graph.output.extend(graph_outputs[name] for name in keep)
        symbols = {symbol for entry in description.inputs for symbol in entry.shape if isinstance(symbol, str)}
        random: list[RandomInput] = []
        updates: dict[str, str] = {}
        gradients: dict[str, str] = {}
        if training:
            random, updates = to_training(model, symbols, step.model.buffers, measured or step.symbolic_shapes)
        else:
            to_evaluation(model)
        if step.autocast is not None:
            autocast(model, ir.DataType.from_numpy(torch.empty(0, dtype=step.autocast).numpy().dtype))
        loss_scale = None
        if training:
            model, loss_scale, scaled = with_loss_scale(model, description.loss.name)
            model, refused = lower(model, step.trainable, scaled)
            model, gradients = differentiate(model, step.trainable, description.loss.name, scaled, refused)
        values = Values(model)
        outputs = tuple(_output(entry, values, symbols) for entry in description.outputs)
        del model.graph.output[:]
        for name in (*keep, *gradients.values(), *updates.values()):
            model.graph.output.append(helper.make_tensor_value_info(name, values.type(name), None))
        # What was measured is no promise to the engine.
        replace_all(model.graph.value_info, [value for value in model.graph.value_info if value.name not in known])
        _drop_unused(model, description.input_names)
        used = {value.name for value in model.graph.input}
        found = ir.from_proto(model)
        described = {entry.name: entry.shape for entry in description.inputs}
        described |= {entry.name: entry.shape for entry in description.outputs}
        for value in (*found.graph.inputs, *found.graph.outputs):
            if value.name in described:
                value.shape = ir.Shape(described[value.name])
        specs = tuple(
            TensorSpec(entry.name, batch[entry.name].dtype, dims(values.shape(entry.name), symbols), entry.shape)
            for entry in description.inputs
            if entry.name in used
        )
        return TrainingGraph(
            model=found,
            training=training,
            inputs=specs,
            outputs=outputs,
            loss=description.loss.name,
            state={name: name for name in state if name in used},
            gradients=gradients,
            buffer_updates=updates,
            loss_scale=loss_scale,
            random=tuple(random),
            fixed=dict(fixed),
        )


def _check_dtypes(model: onnx.ModelProto, batch: Mapping[str, torch.Tensor]) -> None:
    for value in model.graph.input:
        if value.name in batch:
            wanted = torch_type(value.type.tensor_type.elem_type)
            if batch[value.name].dtype != wanted:
                raise TypeError(
                    f"input {value.name!r} has dtype {batch[value.name].dtype}, but the ONNX model takes {wanted}: use "
                    f".to({wanted})"
                )


def _set_input_shapes(model: onnx.ModelProto, description: ModelDescription, fixed: Mapping[str, int]) -> None:
    entries = {entry.name: entry for entry in description.inputs}
    for value in model.graph.input:
        if value.name in entries:
            shape = [fixed.get(size, size) if isinstance(size, str) else size for size in entries[value.name].shape]
            known = value.type.tensor_type
            if known.HasField("shape") and len(known.shape.dim) != len(shape):
                raise ExportError(
                    f"input {value.name!r} has {len(known.shape.dim)} dimensions in the ONNX model, but model_desc "
                    f"says {len(shape)}: {list(entries[value.name].shape)}"
                )
            value.CopyFrom(helper.make_tensor_value_info(value.name, known.elem_type, shape))
    # What the file says of other shapes may contradict the description's names.
    del model.graph.value_info[:]
    for value in model.graph.output:
        value.type.tensor_type.ClearField("shape")


def _inferred(model: onnx.ModelProto) -> onnx.ModelProto:
    """Returns a model with more shapes, or the same one where ONNX Runtime's symbolic shape inference fails."""
    plain = onnx.ModelProto()
    plain.CopyFrom(model)
    for node in plain.graph.node:
        if node.op_type == "Constant":  # it knows constants as tensors only
            for name, value in attributes_of(node).items():
                if name in ("value_int", "value_ints", "value_float", "value_floats"):
                    array = np.asarray(value, dtype=np.int64 if "int" in name else np.float32)
                    node.ClearField("attribute")
                    node.attribute.append(helper.make_attribute("value", numpy_helper.from_array(array)))
    try:
        return infer_symbolic_shapes(plain)
    except Exception as error:  # its errors have no class of their own
        _log.warning("ONNX Runtime's symbolic shape inference fails: %s", error)
        return model


def _prediction(step: OnnxStep) -> str:
    """Returns the output that the loss function takes: the first one of the description behind the loss."""
    described = step.description.output_names[1:]
    return described[0] if described else step.model.outputs[0]


def _output(entry: Any, values: Values, symbols: set[str]) -> TensorSpec:
    shape = values.shape(entry.name)
    if shape is not None and len(shape) != len(entry.shape) and not entry.is_loss:
        raise ExportError(
            f"output {entry.name!r} has {len(shape)} dimensions, {list(shape)}, but model_desc says "
            f"{len(entry.shape)}: {list(entry.shape)}"
        )
    return TensorSpec(entry.name, torch_type(values.type(entry.name)), dims(shape, symbols), entry.shape)


def _drop_unused(model: onnx.ModelProto, inputs: Collection[str]) -> None:
    """Drops nodes whose results nobody wants, and state, initializers and types that nobody uses; inputs stay."""
    wanted = {value.name for value in model.graph.output}
    kept = []
    for node in reversed(model.graph.node):
        if not wanted.isdisjoint(node.output):
            kept.append(node)
            wanted.update(node.input, names_inside(node))
    replace_all(model.graph.node, kept[::-1])
    produced = {name for node in model.graph.node for name in node.output}
    wanted |= set(inputs)
    wanted &= produced | {value.name for value in (*model.graph.input, *model.graph.initializer)}
    for values in (model.graph.input, model.graph.initializer, model.graph.value_info):
        replace_all(values, [value for value in values if value.name in wanted])
