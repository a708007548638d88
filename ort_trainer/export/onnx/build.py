"""``OnnxGraphBuilder``: builds training and evaluation graphs from an ONNX model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx
import onnx_ir as ir
import torch

from ...core.dims import fixed_dimensions
from ...core.errors import ExportError
from ...core.indices import IndexRange
from ...options import ModelDescription
from ...step import Step, TensorSpec, dtype_name
from ...step.emitter import run_passes
from ...step.postprocess import postprocessed
from ...step.prune import KeepOutputsPass, RemoveUnusedPass
from ..torch import LossFunction
from ..torch.borrow import BORROWED
from .index_ranges import label_ranges
from .load import OnnxModel
from .loss import LossExport
from .nodes import SizeNeededError, dims, dtype_of, named_symbols, shape_of, with_sizes
from .passes.autocast import AutocastPass
from .passes.differentiate import DifferentiatePass
from .passes.evaluation import ToEvaluationPass
from .passes.found import Found
from .passes.infer_shapes import InferShapesPass, SymbolicShapesPass
from .passes.lower import LowerPass
from .passes.measure_shapes import MeasureShapesPass
from .passes.merge_loss import MergeLossPass
from .passes.random_numbers import RandomNumbersPass
from .passes.running_statistics import RunningStatisticsPass
from .passes.scale_loss import ScaleLossPass
from .passes.set_interface import SetInterfacePass
from .passes.standard_operators import StandardOperatorsPass

__all__ = ["OnnxGraphBuilder", "OnnxStep"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OnnxStep:
    """A training step of an ONNX model.

    Attributes:
        model: The forward pass and its weights.
        description: The model description.
        loss_fn: The loss of (first output of the model, label), or None if the loss is an output.
        trainable: Names of the weights to train.
        autocast: dtype of mixed precision, or None.
        symbolic_shapes: Whether to run ONNX Runtime's symbolic shape inference besides ONNX's own inference.
    """

    model: OnnxModel
    description: ModelDescription
    loss_fn: LossFunction | None
    trainable: tuple[str, ...]
    autocast: torch.dtype | None = None
    symbolic_shapes: bool = False


@dataclass(frozen=True)
class OnnxGraphBuilder:
    """Builds training and evaluation graphs of one step.

    Attributes:
        step: The step.
        postprocess: The user's own pass over the ONNX model, or None.
        portable: Whether to use only standard ONNX operators, where possible.
        losses: Cache of the exported loss function, by the description of its inputs.
    """

    step: OnnxStep
    postprocess: Callable[[onnx.ModelProto], onnx.ModelProto | None] | None = None
    portable: bool = False
    losses: dict[Any, tuple[ir.Model, tuple[IndexRange, ...]]] = field(default_factory=dict, repr=False, compare=False)

    def build(self, batch: Mapping[str, torch.Tensor], training: bool) -> Step:
        """Builds a graph for a batch; symbolic dimensions stay symbolic unless a rewrite needs a number.

        Args:
            batch: A sample of every input.
            training: Whether to build the training graph, with the backward pass, or the evaluation graph.

        Raises:
            ExportError: If the model can't be differentiated, or does not match its description.
        """
        start = time.perf_counter()
        sizes = self.step.description.sizes({name: tuple(value.shape) for name, value in batch.items()})
        measured, fixed = False, self._sizes_of_the_model(sizes)
        while True:
            try:
                with BORROWED:
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
                        f"shapes of the ONNX model can't be determined for batches of {sizes}: {reason}"
                    ) from reason
        if fixed:
            _log.warning("the ONNX model fixes %s: every other size needs another build", fixed_dimensions(fixed))
        kind = "training" if training else "evaluation"
        _log.info("built the %s graph in %.1f s: %d nodes", kind, time.perf_counter() - start, len(graph.model.graph))
        return graph if self.postprocess is None else postprocessed(graph, self.postprocess)

    def _sizes_of_the_model(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Returns the dimensions that are symbolic in the description but fixed in the model itself."""
        fixed: dict[str, int] = {}
        shapes = {value.name: shape_of(value) for value in self.step.model.model.graph.inputs}
        for entry in self.step.description.inputs:
            for described, size in zip(entry.shape, shapes.get(entry.name) or (), strict=False):
                if isinstance(described, str) and isinstance(size, int) and size:
                    if sizes[described] != size:
                        raise ExportError(
                            f"dimension {described!r} of input {entry.name!r} is {sizes[described]}, but the ONNX "
                            f"model was exported for {size} only"
                        )
                    fixed[described] = size
        return fixed

    def reference(self, batch: Mapping[str, torch.Tensor]) -> Sequence[torch.Tensor]:
        """Raises a TypeError: an ONNX model has no reference other than its graph."""
        raise TypeError("an ONNX model has no reference implementation to compare its graph with")

    def _assemble(
        self, batch: Mapping[str, torch.Tensor], training: bool, fixed: Mapping[str, int], measured: bool
    ) -> Step:
        step, description = self.step, self.step.description
        _check_dtypes(step.model.model, batch)
        symbols, found = _symbols(description), Found()
        passes = self._forward(batch, training, fixed, measured, found)
        forward = run_passes(step.model.model.clone(), *passes)
        outputs = {value.name: value for value in forward.graph.outputs}
        if step.loss_fn is None:
            found.index_ranges = tuple(label_ranges(forward, description.input_names, description.loss.name))
        specs = [_output(entry, outputs[entry.name], symbols) for entry in description.outputs]
        model = run_passes(forward, *self._backward(found)) if training else forward
        model = run_passes(model, StandardOperatorsPass()) if self.portable else model
        described = {entry.name: entry.shape for entry in description.inputs}
        described |= {entry.name: entry.shape for entry in description.outputs}
        model = run_passes(model, RemoveUnusedPass(description.input_names), SetInterfacePass(described))
        used = {value.name for value in model.graph.inputs}
        return Step(
            stored=model,
            kind="training" if training else "evaluation",
            inputs=tuple(
                TensorSpec(entry.name, dtype_name(batch[entry.name].dtype), entry.shape)
                for entry in description.inputs
                if entry.name in used
            ),
            outputs=tuple(specs),
            loss=description.loss.name,
            state={name: name for name in (*step.model.parameters, *step.model.buffers) if name in used},
            gradients=found.gradients,
            buffer_updates=found.buffer_updates,
            loss_scale=TensorSpec(found.loss_scale, "float32", ()) if training else None,
            random=tuple(found.random),
            fixed=dict(fixed),
            index_ranges=tuple(entry for entry in found.index_ranges if entry.input in used),
        )

    def _forward(
        self,
        batch: Mapping[str, torch.Tensor],
        training: bool,
        fixed: Mapping[str, int],
        measured: bool,
        found: Found,
    ) -> Iterator[ir.passes.PassBase]:
        """Yields the passes over the forward pass, in order."""
        step, description = self.step, self.step.description
        yield SetInterfacePass({entry.name: with_sizes(entry.shape, fixed) for entry in description.inputs})
        if step.symbolic_shapes:
            yield SymbolicShapesPass()
        yield InferShapesPass()
        if measured:
            yield MeasureShapesPass(description, batch, {**step.model.parameters, **step.model.buffers}, fixed)
        if step.loss_fn is not None:
            loss = LossExport(step.loss_fn, description, batch, fixed, self.losses, found)
            behind = description.output_names[1:]
            yield MergeLossPass(loss, behind[0] if behind else step.model.outputs[0], loss.label)
        if measured or step.loss_fn is not None:
            yield InferShapesPass()
        yield KeepOutputsPass(description.output_names)
        if training:
            yield RandomNumbersPass(_symbols(description), found, check_shapes=measured or step.symbolic_shapes)
            yield RunningStatisticsPass(step.model.buffers, found)
        else:
            yield ToEvaluationPass()
        if step.autocast is not None:
            yield AutocastPass(ir.tensor_adapters.from_torch_dtype(step.autocast))

    def _backward(self, found: Found) -> Iterator[ir.passes.PassBase]:
        """Yields the passes that add the backward pass, in order."""
        loss, trainable = self.step.description.loss.name, self.step.trainable
        yield ScaleLossPass(loss, found)
        yield LowerPass(trainable, found)
        yield DifferentiatePass(trainable, loss, found)


def _symbols(description: ModelDescription) -> set[str]:
    return {symbol for entry in description.inputs for symbol in entry.shape if isinstance(symbol, str)}


def _check_dtypes(model: ir.Model, batch: Mapping[str, torch.Tensor]) -> None:
    types = {value.name: ir.tensor_adapters.to_torch_dtype(dtype_of(value)) for value in model.graph.inputs}
    for name, value in batch.items():
        wanted = types.get(name, value.dtype)
        if value.dtype != wanted:
            raise TypeError(
                f"input {name!r} has dtype {value.dtype}, but the ONNX model takes {wanted}: use .to({wanted})"
            )


def _output(entry: Any, value: ir.Value, symbols: set[str]) -> TensorSpec:
    shape = shape_of(value)
    if shape is not None and len(shape) != len(entry.shape) and not entry.is_loss:
        raise ExportError(
            f"output {entry.name!r} has {len(shape)} dimensions, {list(shape)}, but model_desc says "
            f"{len(entry.shape)}: {list(entry.shape)}"
        )
    return TensorSpec(entry.name, dtype_of(value).numpy().name, dims(shape, symbols))
