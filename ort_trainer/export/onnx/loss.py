"""Exports a loss function of an ONNX model's prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from ...core.dims import symbols_of
from ...core.errors import ExportError
from ...core.indices import IndexRange
from ...engine.ort import InferenceSession, session_options
from ...options import ModelDescription
from ...step.emitter import run_passes
from ..torch import ExportedStep, GraphBuilder, LossFunction
from .nodes import SizeNeededError, dtype_of, shape_of, with_sizes
from .passes.differentiate import DifferentiatePass, serialized
from .passes.found import Found
from .passes.lower import LowerPass
from .passes.scale_loss import ScaleLossPass

__all__ = ["LossExport"]


class _Prediction(nn.Module):
    """Stands in for the ONNX model when the loss function is exported."""

    def forward(self, prediction: torch.Tensor) -> torch.Tensor:
        return prediction


@dataclass(frozen=True)
class LossExport:
    """Exports a loss function.

    Attributes:
        loss_fn: The loss of (prediction, label).
        description: The model description, with the label as last input.
        batch: A sample of every input.
        fixed: Dimension -> its fixed size.
        exported: Cache of the exported loss function, by the description of its inputs, because a model is built
            several times and an export takes seconds.
        found: Receives the valid range of a label that the loss function uses as index.
    """

    loss_fn: LossFunction
    description: ModelDescription
    batch: Mapping[str, torch.Tensor]
    fixed: Mapping[str, int]
    exported: dict[Any, tuple[ir.Model, tuple[IndexRange, ...]]]
    found: Found

    @property
    def label(self) -> ir.Value:
        """The graph value of the label."""
        entry = self.description.inputs[-1]
        dtype = ir.tensor_adapters.from_torch_dtype(self.batch[entry.name].dtype)
        return ir.val(entry.name, dtype, with_sizes(entry.shape, self.fixed))

    def __call__(self, prediction: ir.Value, opset: int) -> ir.Model:
        """Returns the graph of the loss of ``prediction`` and the label.

        Args:
            prediction: The prediction.
            opset: ONNX opset.

        Raises:
            SizeNeededError: If the shape of the prediction is unknown.
            ExportError: If the loss function can't be exported, or its gradient differs from that of its graph.
        """
        description, batch = self.description, self.batch
        label = description.inputs[-1]
        sizes = description.sizes({name: tuple(value.shape) for name, value in batch.items()})
        # The description takes precedence over inference, which may find only a symbol.
        described = next((entry.shape for entry in description.outputs if entry.name == prediction.name), (None,))
        is_known = all(isinstance(size, int) or size in sizes for size in described)
        found = with_sizes(described if is_known else shape_of(prediction) or (None,), self.fixed)
        shape = [size for size in found if isinstance(size, int) or size in sizes]
        if len(shape) < len(found):
            raise SizeNeededError(f"the shape of the prediction {prediction.name!r} is {tuple(found)}")
        dtype = ir.tensor_adapters.to_torch_dtype(dtype_of(prediction))
        label_shape = with_sizes(label.shape, self.fixed)
        key = (tuple(shape), label_shape, dtype, batch[label.name].dtype)
        if key in self.exported:
            model, self.found.index_ranges = self.exported[key]
            return model.clone()
        sample = {
            "prediction": torch.zeros([sizes[size] if isinstance(size, str) else size for size in shape], dtype=dtype),
            label.name: batch[label.name],
        }
        inner = ModelDescription(
            {
                "inputs": [("prediction", shape), (label.name, list(label_shape))],
                "outputs": [(description.loss.name, [], True)],
            }
        )
        step = ExportedStep(_Prediction(), inner, self.loss_fn, frozenset(), opset=opset)
        built = GraphBuilder(step).build(sample, training=False)
        self.found.index_ranges = tuple(entry for entry in built.index_ranges if symbols_of(entry.size) <= sizes.keys())
        if _check_gradient_of_loss(built.model, self.loss_fn, sample, label.name, description.loss.name):
            self.exported[key] = built.model.clone(), self.found.index_ranges
        return built.model


def _check_gradient_of_loss(
    graph: ir.Model, loss_fn: Any, sample: Mapping[str, torch.Tensor], label: str, loss: str
) -> bool:
    """Checks the gradient of an exported loss function against PyTorch's.

    The graph of the forward pass loses ``detach()``, ``no_grad()`` and functions with their own gradient.

    Returns:
        Whether the sample was conclusive: without a finite gradient, for example if every label is ignored, it is not.
    """
    if not sample["prediction"].is_floating_point():
        raise ExportError(
            f"the prediction must be floating-point to have a gradient, but its dtype is {sample['prediction'].dtype}"
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
        raise ExportError("the loss from loss_fn does not depend on the prediction, or is detached from it")
    if not torch.isfinite(expected).all():
        return False
    found = Found()
    differentiated = run_passes(
        graph.clone(),
        ScaleLossPass(loss, found),
        LowerPass(["prediction"], found),
        DifferentiatePass(["prediction"], loss, found),
    )
    feed = {"prediction": given.numpy(), label: sample[label].cpu().numpy(), found.loss_scale: np.ones((), np.float32)}
    names = {value.name for value in differentiated.graph.inputs}
    session = InferenceSession(
        serialized(differentiated), session_options(None, False), providers=["CPUExecutionProvider"]
    )
    feed = {name: value for name, value in feed.items() if name in names}
    gradient = torch.from_numpy(session.run([found.gradients["prediction"]], feed)[0])
    expected = expected.cpu()
    difference = (gradient.double() - expected.double()).norm().item()
    if not difference <= 1e-3 * max(expected.double().norm().item(), 1e-6):
        raise ExportError(
            "the gradient of loss_fn differs from the derivative of its value (relative error "
            f"{difference / max(expected.double().norm().item(), 1e-6):.2g}): it uses detach(), no_grad() or a "
            "function with its own gradient, which the ONNX graph of a loss can't express. Train the PyTorch model "
            "instead of an ONNX model"
        )
    return True
