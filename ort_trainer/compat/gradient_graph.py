"""``GradientGraphBuilder`` for a stock ONNX Runtime, which lacks onnxruntime-training's class."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import onnx
import torch

from .. import optim
from ..core.atomic import atomic_path
from ..export.onnx import describe_onnx, load_onnx_model
from ..step.onnx_file import WEIGHTS, to_proto, with_weights
from ..step.prune import prune
from ..trainer import ORTTrainer

__all__ = ["GradientGraphBuilder"]


class GradientGraphBuilder:
    """Adds the gradients of a loss to an ONNX model, in ONNX's own operators.

    The result has the model's inputs and outputs, and an output ``<name>_grad`` for each weight: the gradient of the
    loss times the initializer ``<loss>_grad``, which is 1.

    Args:
        model: The serialized model.
        outputs: Names of the outputs to differentiate: only the loss.
        weights: Names of the initializers whose gradients are computed.
        loss: The name of the loss.

    Raises:
        ValueError: If the model lacks one of the weights, or ``outputs`` is not the loss alone.
        ExportError: If the model can't be read or differentiated.
    """

    def __init__(self, model: bytes, outputs: Collection[str], weights: Collection[str], loss: str) -> None:
        self._source = replace(load_onnx_model(model), frozen=frozenset())
        unknown = sorted(set(weights) - set(self._source.parameters))
        if unknown:
            raise ValueError(
                f"gradients of {unknown} were asked for, which are not weights of the model: it has "
                f"{list(self._source.parameters)}"
            )
        if set(outputs) != {loss}:
            raise ValueError(f"only the loss, {loss!r}, is differentiated, but {sorted(outputs)} were given")
        self._weights, self._loss = set(weights), loss
        self._result: onnx.ModelProto | None = None

    def build(self) -> None:
        """Differentiates the model.

        Raises:
            NotImplementedError: If it draws random numbers, which a graph of ONNX's operators gets as inputs.
        """
        description = describe_onnx(self._source, None, {}, self._loss)
        frozen = [name for name in self._source.parameters if name not in self._weights]
        trainer = ORTTrainer(
            self._source,
            description.to_dict(),
            optim.SGDConfig(),
            options={"device": {"id": "cpu"}, "utils": {"kernels": "onnxruntime", "frozen_weights": frozen}},
        )
        trainer.prepare()
        executor = trainer.loop.executor
        assert executor is not None
        step = executor.graphs(True)[0].unchecked()
        if step.random:
            raise NotImplementedError(
                "the model draws random numbers, which only onnxruntime-training's graphs do by themselves: set the "
                "ratio of Dropout to 0, or train the model with ORTTrainer"
            )
        scale, factor = step.loss_scale, f"{self._loss}_grad"
        assert scale is not None
        one = torch.ones([int(size) for size in scale.shape or ()], dtype=getattr(torch, scale.dtype))
        step = replace(step, state={**step.state, factor: scale.name})
        others = {**executor.buffers, **executor.outside, factor: one}
        model = with_weights(step, executor.parameters, others, list(step.gradients))
        model = prune(model, [*(spec.name for spec in step.outputs), *step.gradients.values()])
        del model.metadata_props[WEIGHTS]
        names = {scale.name: factor, **{to: f"{name}_grad" for name, to in step.gradients.items()}}
        for value in [*model.graph.initializers.values(), *model.graph.outputs]:
            value.name = names.get(str(value.name), value.name)
        self._result = to_proto(model)

    def get_model(self) -> bytes:
        """Returns the model with gradients, serialized."""
        return bytes(self._built().SerializeToString())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the model with gradients; replaces an existing file."""
        with atomic_path(Path(path)) as temporary:
            onnx.save(self._built(), temporary)

    def _built(self) -> onnx.ModelProto:
        if self._result is None:
            raise RuntimeError("there are no gradients yet: call build() first")
        return self._result
