"""Builds a ``TrainingGraph`` from a PyTorch model: the arrow from the user's code to pure data."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir
import torch
from torch import nn

from ..errors import ExportError
from ..graph import TensorSpec, TrainingGraph, evaluate
from ..graph.dims import symbols_of
from ..model_desc import ModelDescription
from .capture import Capture, capture
from .random_inputs import lift_random_numbers
from .step_module import LossFunction, StepModule, borrowed
from .to_onnx import Names, set_shapes, to_onnx

__all__ = ["GraphBuilder", "canonical_names"]

_log = logging.getLogger(__name__)
_LOSS_SCALE = "__loss_scale_input_name"
# Where a sample has size 1 in a symbolic dimension; unlike most sizes that a model has itself.
_STAND_IN_SIZE = 7


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Returns, for every name of a parameter or buffer, the first name of the same tensor: tied weights share one."""
    first: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


@dataclass(frozen=True)
class GraphBuilder:
    """Exports a model, as often as its shapes ask for it.

    Attributes:
        model: The user's model; it is left as it was found.
        description: The model description.
        loss_fn: The loss function, or None where the model returns the loss.
        trainable: Canonical names of the parameters to train.
        autocast: dtype of mixed precision, or None.
        opset: ONNX operator set.
        postprocess: The user's own pass over the ONNX model, or None.
    """

    model: nn.Module
    description: ModelDescription
    loss_fn: LossFunction | None
    trainable: frozenset[str]
    autocast: torch.dtype | None = None
    opset: int = 18
    postprocess: Callable[[onnx.ModelProto], onnx.ModelProto | None] | None = None

    def build(self, batch: Mapping[str, torch.Tensor], training: bool) -> TrainingGraph:
        """Exports the step for a batch's dtypes; symbolic dimensions stay free where the model lets them.

        Args:
            batch: A sample of every input.
            training: Whether to build the joint forward and backward graph, or the one for evaluation.

        Raises:
            ExportError: If the model can't be exported or its outputs are not as described.
        """
        start = time.perf_counter()
        found = self._capture([batch[entry.name] for entry in self.description.inputs], training)
        if training and not found.gradients:
            raise ExportError("the loss depends on no trainable parameter, so there is nothing to train")
        graph = self._assemble(found, training)
        kind = "training" if training else "evaluation"
        seconds = time.perf_counter() - start
        _log.info("exported the %s graph in %.1f s: %d nodes", kind, seconds, len(graph.model.graph))
        for symbol, size in graph.fixed.items():
            reason = found.symbols.reason(symbol)
            _log.warning("the model fixes dimension %r at %d (%s): each other size is exported", symbol, size, reason)
        return graph if self.postprocess is None else _postprocessed(graph, self.postprocess)

    def reference(self, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Returns what PyTorch itself computes for the described outputs in evaluation mode, with the model's weights."""
        step = StepModule(self.model, self.description, self.loss_fn)
        sample = [batch[entry.name] for entry in self.description.inputs]
        with borrowed(step, (), training=False), torch.no_grad(), self._autocast(sample):
            return tuple(step(*sample))

    def _autocast(self, sample: Sequence[torch.Tensor]) -> torch.autocast:
        return torch.autocast(sample[0].device.type, self.autocast or torch.float16, enabled=self.autocast is not None)

    def _capture(self, sample: Sequence[torch.Tensor], training: bool) -> Capture:
        """Captures the step with stand-ins where a symbolic dimension of the sample has size 1.

        The exporter takes a size of 1 for a constant. Where the model itself depends on such a size, the capture is
        repeated with the sample's own.
        """
        inputs = self.description.inputs
        sizes = {
            symbol: size
            for entry, value in zip(inputs, sample, strict=True)
            for symbol, size in zip(entry.shape, value.shape, strict=True)
            if isinstance(symbol, str)
        }
        enlarged = {symbol for symbol, size in sizes.items() if size == 1}
        trainable = {f"model.{name}" for name in self.trainable} if training else set()
        step = StepModule(self.model, self.description, self.loss_fn)
        with borrowed(step, trainable, training):
            while True:
                stand_in = [_enlarge(e.shape, value, enlarged) for e, value in zip(inputs, sample, strict=True)]
                try:
                    found = capture(step, inputs, stand_in, self._autocast(sample))
                except ExportError:
                    if not enlarged:
                        raise
                    enlarged = set()
                    continue
                wrong = enlarged & (set(found.symbols.fixed) | _violated(found, sizes))
                if not wrong:
                    return found
                enlarged -= wrong

    def _assemble(self, found: Capture, training: bool) -> TrainingGraph:
        canonical = canonical_names(self.model)
        description = self.description
        names = Names([*description.input_names, *description.output_names, _LOSS_SCALE])
        outputs = self._outputs(found)
        random = lift_random_numbers(found.module.graph, found.symbols) if training else {}
        random = {node: dataclasses.replace(spec, name=names.unique(spec.name)) for node, spec in random.items()}
        state = {node: canonical[_own(name)] for node, name in found.state.items() if node.users}
        state_names = {name: names.unique(name) for name in state.values()}
        # A gradient without elements changes nothing, and has no memory that could be bound.
        gradients = {canonical[_own(name)]: node for name, node in found.gradients.items() if node.meta["val"].numel()}
        gradient_names = {name: names.unique(f"{name}.grad") for name in gradients}
        updates = {canonical[_own(name)]: node for name, node in found.buffer_updates.items()}
        update_names = {name: names.unique(f"{name}.updated") for name in updates}
        batch = {node: description.inputs[index] for node, index in found.batch.items()}

        inputs = [(node, state_names[name]) for node, name in state.items()]
        inputs += [(node, entry.name) for node, entry in sorted(batch.items(), key=lambda item: found.batch[item[0]])]
        inputs += [(node, spec.name) for node, spec in random.items()]
        loss_scale = None
        if found.tangent is not None:
            fake = found.tangent.meta["val"]
            loss_scale = TensorSpec(_LOSS_SCALE, fake.dtype, tuple(int(size) for size in fake.shape))
            inputs.append((found.tangent, _LOSS_SCALE))
        results = list(zip(found.outputs, description.output_names, strict=True))
        results += [(node, gradient_names[name]) for name, node in gradients.items()]
        results += [(node, update_names[name]) for name, node in updates.items()]
        specs = tuple(
            TensorSpec(entry.name, node.meta["val"].dtype, found.symbols.shape(node.meta["val"]), entry.shape)
            for node, entry in sorted(batch.items(), key=lambda item: found.batch[item[0]])
        )
        model = to_onnx(found.module, inputs, results, found.constants, self.opset)
        set_shapes(model, [*specs, *outputs])
        guards, frozen = found.symbols.guards()
        return TrainingGraph(
            model=model,
            training=training,
            inputs=specs,
            outputs=outputs,
            loss=description.loss.name,
            state=state_names,
            gradients=gradient_names,
            buffer_updates=update_names,
            loss_scale=loss_scale,
            random=tuple(random.values()),
            guards=tuple(guards),
            fixed={**frozen, **found.symbols.fixed},
        )

    def _outputs(self, found: Capture) -> tuple[TensorSpec, ...]:
        """Returns what the outputs are, after a look at whether they are as described."""
        specs = []
        for entry, node in zip(self.description.outputs, found.outputs, strict=True):
            fake = node.meta["val"]
            if fake.dim() != len(entry.shape) and not (entry.is_loss and fake.numel() == 1):
                raise ExportError(
                    f"output {entry.name!r} has {fake.dim()} dimensions, shape {list(fake.shape)}, but model_desc says "
                    f"{len(entry.shape)}: {list(entry.shape)}"
                )
            for axis, (size, described) in enumerate(zip(fake.shape, entry.shape, strict=False)):
                if isinstance(size, int) and isinstance(described, int) and size != described:
                    raise ExportError(
                        f"output {entry.name!r} has size {size} in dimension {axis}, but model_desc says {described}: "
                        f"{list(entry.shape)}"
                    )
            specs.append(TensorSpec(entry.name, fake.dtype, found.symbols.shape(fake), entry.shape))
        return tuple(specs)


def _own(name: str) -> str:
    """Returns a name within the user's model from one within the step module."""
    return name.removeprefix("model.")


def _enlarge(shape: Sequence[int | str], value: torch.Tensor, symbols: Collection[str]) -> torch.Tensor:
    repeats = [_STAND_IN_SIZE if size in symbols else 1 for size in shape]
    return value.repeat(repeats) if any(count > 1 for count in repeats) else value


def _violated(found: Capture, sizes: Mapping[str, int]) -> set[str]:
    """Returns the symbols of all conditions that do not hold for these sizes."""
    conditions, _ = found.symbols.guards()
    return {symbol for guard in conditions if not evaluate(guard, sizes) for symbol in symbols_of(guard)}


def _postprocessed(
    graph: TrainingGraph, postprocess: Callable[[onnx.ModelProto], onnx.ModelProto | None]
) -> TrainingGraph:
    """Applies ``_internal_use.extra_postprocess``, which returns a model or changes the one it gets."""
    proto = ir.to_proto(graph.model)
    result = postprocess(proto)
    result = proto if result is None else result
    if not isinstance(result, onnx.ModelProto):
        raise TypeError(
            f"_internal_use.extra_postprocess must return an onnx.ModelProto or None, but returned {result!r}"
        )
    model = ir.from_proto(result)
    for kind in ("inputs", "outputs"):
        before = [value.name for value in getattr(graph.model.graph, kind)]
        after = [value.name for value in getattr(model.graph, kind)]
        if before != after:
            raise ValueError(
                f"_internal_use.extra_postprocess must keep the {kind} of the model, in order; they were {before} and "
                f"are {after}"
            )
    return dataclasses.replace(graph, model=model)
