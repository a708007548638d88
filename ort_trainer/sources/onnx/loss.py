"""The loss of an ONNX model: a loss function that is merged into it, and the scale that its gradient gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx.compose
import onnx_ir as ir
import torch
from onnx import TensorProto, helper
from torch import nn

from ...errors import ExportError
from ...graph import TensorSpec
from ...graph.names import Names
from ...options import ModelDescription
from ...runtime.engine import InferenceSession, session_options
from ..torch import ExportedStep, GraphBuilder, LossFunction
from .gradient import differentiate
from .lower import lower
from .nodes import SizeNeededError, Values, names_in, torch_type

__all__ = ["merge_loss", "with_loss_scale"]

_LOSS_PREFIX = "loss_fn."


class _Prediction(nn.Module):
    """Stands for the ONNX model when the loss function is exported."""

    def forward(self, prediction: torch.Tensor) -> torch.Tensor:
        return prediction


def merge_loss(
    model: onnx.ModelProto,
    loss_fn: LossFunction,
    description: ModelDescription,
    prediction: str,
    batch: Mapping[str, torch.Tensor],
    fixed: Mapping[str, int],
    exported: dict[Any, onnx.ModelProto],
) -> None:
    """Exports a loss function and puts it behind an output of a model, in place.

    Args:
        model: The forward pass.
        loss_fn: The loss of (prediction, label).
        description: The model description, with the label as last input.
        prediction: The output that the loss function takes.
        batch: A sample of every input.
        fixed: Dimension -> the only size that it has.
        exported: The loss function as exported before, for every description of its inputs; grows. A model is built
            several times, and an export takes seconds.

    Raises:
        SizeNeededError: If the shape of the prediction is not known.
        ExportError: If the loss function can't be exported, or its gradient is not that of its graph.
    """
    label = description.inputs[-1]
    values = Values(model)
    sizes = description.sizes({name: tuple(value.shape) for name, value in batch.items()})
    # The user's word counts where inference finds no more than a symbol of its own.
    described = next((entry.shape for entry in description.outputs if entry.name == prediction), (None,))
    is_known = all(isinstance(size, int) or size in sizes for size in described)
    found = described if is_known else values.shape(prediction) or (None,)
    found = tuple(fixed.get(size, size) if isinstance(size, str) else size for size in found)
    shape = [size for size in found if isinstance(size, int) or size in sizes]
    if len(shape) < len(found):
        raise SizeNeededError(f"the shape of the prediction {prediction!r} is {found}")
    sample = {
        "prediction": torch.zeros(
            [sizes[size] if isinstance(size, str) else size for size in shape],
            dtype=torch_type(values.type(prediction)),
        ),
        label.name: batch[label.name],
    }
    label_shape = [fixed.get(size, size) if isinstance(size, str) else size for size in label.shape]
    key = (tuple(shape), tuple(label_shape), sample["prediction"].dtype, batch[label.name].dtype)
    if key in exported:
        proto = exported[key]
    else:
        inner = ModelDescription(
            {
                "inputs": [("prediction", shape), (label.name, label_shape)],
                "outputs": [(description.loss.name, [], True)],
            }
        )
        (opset,) = (entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx"))
        step = ExportedStep(_Prediction(), inner, loss_fn, frozenset(), opset=opset)
        proto = ir.to_proto(GraphBuilder(step).build(sample, training=False).model)
        if _check_gradient_of_loss(proto, loss_fn, sample, label.name, description.loss.name):
            exported[key] = proto
    loss = onnx.compose.add_prefix(proto, _LOSS_PREFIX)
    renamed = {
        f"{_LOSS_PREFIX}prediction": prediction,
        f"{_LOSS_PREFIX}{label.name}": label.name,
        f"{_LOSS_PREFIX}{description.loss.name}": description.loss.name,
    }
    for node in loss.graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
    model.graph.node.extend(loss.graph.node)
    model.graph.initializer.extend(loss.graph.initializer)
    elem_type = helper.np_dtype_to_tensor_dtype(batch[label.name].cpu().numpy().dtype)
    model.graph.input.append(helper.make_tensor_value_info(label.name, elem_type, label_shape))
    model.graph.output.append(helper.make_tensor_value_info(description.loss.name, TensorProto.FLOAT, []))
    known = {entry.domain for entry in model.opset_import}
    model.opset_import.extend(entry for entry in loss.opset_import if entry.domain not in known | {"", "ai.onnx"})


def _check_gradient_of_loss(
    proto: onnx.ModelProto, loss_fn: Any, sample: Mapping[str, torch.Tensor], label: str, loss: str
) -> bool:
    """Compares the gradient of an exported loss function with PyTorch's.

    A graph of the forward pass does not know of ``detach()``, ``no_grad()`` and functions with a gradient of their own.

    Returns:
        Whether the sample could tell; one without any label that counts has no gradient to compare.
    """
    if not sample["prediction"].is_floating_point():
        raise ExportError(
            f"the prediction, of {sample['prediction'].dtype}, has no gradient: it must be floating-point"
        )
    draw = torch.Generator().manual_seed(0)
    given = torch.rand(sample["prediction"].shape, generator=draw, dtype=torch.float32).to(sample["prediction"].dtype)
    prediction = given.to(sample[label].device, copy=True).requires_grad_()
    modules = [(module, module.training) for module in loss_fn.modules()] if isinstance(loss_fn, nn.Module) else []
    for module, _ in modules:
        module.training = False
    try:
        with torch.enable_grad():
            value = loss_fn(prediction, sample[label])
            expected = torch.autograd.grad(value, prediction, allow_unused=True)[0] if value.requires_grad else None
    finally:
        for module, training in modules:
            module.training = training
    if expected is None:
        raise ExportError("the loss that loss_fn returns does not depend on the prediction, or is detached from it")
    if not torch.isfinite(expected).all():
        return False
    model = onnx.ModelProto()
    model.CopyFrom(proto)
    model, spec, scaled = with_loss_scale(model, loss)
    model, refused = lower(model, ["prediction"], scaled)
    model, gradients = differentiate(model, ["prediction"], loss, scaled, refused)
    del model.graph.output[:]
    model.graph.output.append(helper.make_tensor_value_info(gradients["prediction"], TensorProto.FLOAT, None))
    feed = {"prediction": given.numpy(), label: sample[label].cpu().numpy(), spec.name: np.ones((), np.float32)}
    names = {entry.name for entry in model.graph.input}
    session = InferenceSession(
        model.SerializeToString(), session_options(None, False), providers=["CPUExecutionProvider"]
    )
    found = torch.from_numpy(session.run(None, {name: value for name, value in feed.items() if name in names})[0])
    expected = expected.cpu()
    difference = (found.double() - expected.double()).norm().item()
    if not difference <= 1e-3 * max(expected.double().norm().item(), 1e-6):
        raise ExportError(
            "the gradient of loss_fn is not that of the numbers that it returns (off by "
            f"{difference / max(expected.double().norm().item(), 1e-6):.2g}): it has detach(), no_grad() or a function "
            "with a gradient of its own, which the ONNX graph of a loss can't have. Train the PyTorch model instead of "
            "an ONNX model"
        )
    return True


def with_loss_scale(model: onnx.ModelProto, loss: str) -> tuple[onnx.ModelProto, TensorSpec, str]:
    """Multiplies the loss by an input of the graph; the gradient is that of the product."""
    values = Values(model)
    if not values.is_float(loss):
        raise ExportError(
            f"the loss {loss!r} must be a floating-point number, but its type is {torch_type(values.type(loss))}"
        )
    shape = values.shape(loss)
    if shape not in (None, (), (1,)):
        raise ExportError(f"the loss {loss!r} must be a scalar, but its shape is {list(shape or ())}: reduce it")
    names = Names(names_in(model.graph))
    name, scaled, single = (names.unique(hint) for hint in ("loss_scale", "scaled_loss", "single_loss"))
    model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, []))
    # The gradient builder begins with a gradient of fp32.
    model.graph.node.append(helper.make_node("Cast", [loss], [single], name=single, to=TensorProto.FLOAT))
    model.graph.node.append(helper.make_node("Mul", [single, name], [scaled], name=scaled))
    return model, TensorSpec(name, torch.float32, ()), scaled
