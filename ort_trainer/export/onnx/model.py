"""An ONNX model as a source of training graphs."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import torch

from ...engine.ort import training_bindings
from ...optim import OptimizerConfig
from ...options import ModelDescription, ORTTrainerOptions
from ..model_source import Builder, Layouts, Memory, ModelSource, Named, autocast_dtype, check_names
from ..nested import Layout
from ..torch import LossFunction, takes_label
from ..torch.borrow import BORROWED
from .build import OnnxGraphBuilder, OnnxStep
from .describe import check_description, describe_onnx
from .load import OnnxModel, load_onnx_model
from .nodes import dtype_of

__all__ = ["OnnxSource", "is_onnx_model"]


def is_onnx_model(model: object) -> bool:
    """Returns whether a value is an ONNX model, or can be the path of one."""
    return isinstance(model, (OnnxModel, onnx.ModelProto, str, os.PathLike))


class OnnxSource(ModelSource):
    """An ONNX model as it was loaded; it can't be changed from outside."""

    def __init__(
        self,
        model: OnnxModel | onnx.ModelProto | str | os.PathLike[str],
        loss_fn: LossFunction | None,
        optim_config: OptimizerConfig,
        options: ORTTrainerOptions,
    ) -> None:
        training_bindings()  # raises if unavailable
        _refuse_for_onnx(options)
        if loss_fn is not None and not takes_label(loss_fn):
            raise ValueError(
                "loss_fn takes no label, which only works for PyTorch models: make the loss an output of the ONNX model"
            )
        self.name, self.fixed = "the ONNX model", True
        self._model = model if isinstance(model, OnnxModel) else load_onnx_model(model)
        self._loss_fn, self._options = loss_fn, options
        self.inputs = self._model.inputs
        check_names(list(self.parameters), optim_config, options)
        self.saved = {**self.parameters, **self.buffers}
        self.non_persistent = {}
        self.canonical = {name: name for name in self.saved}
        frozen = {*options.utils.frozen_weights, *self._model.frozen}
        self.trainable = [name for name in self.parameters if name not in frozen]
        self.memory = Memory(self)

    @property
    def parameters(self) -> Named:
        """The model's parameters by canonical name."""
        return self._model.parameters

    @property
    def buffers(self) -> Named:
        """The model's buffers by canonical name."""
        return self._model.buffers

    def name_inputs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], parameters: Collection[str]
    ) -> dict[str, Any]:
        """Returns the arguments of a step by name."""
        names = [*self._model.inputs, *([] if self._loss_fn is None else ["label"])]
        if len(args) > len(names):
            raise TypeError(f"{len(args)} inputs were given, but the ONNX model takes {names}")
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def describe(
        self, batch: Named, layouts: Mapping[str, Layout], parameters: Mapping[str, torch.Tensor]
    ) -> ModelDescription:
        """Returns a description derived from a sample batch."""
        _refuse_for_arguments([entry for entry in layouts.items() if entry[1][0] != "tensor"], list(parameters))
        with BORROWED:
            return describe_onnx(self._model, self._loss_fn, batch)

    def blank_batch(self, description: ModelDescription) -> dict[str, torch.Tensor]:
        """Returns a batch of zeros; see the base class."""
        if self._loss_fn is not None:  # its label can be anything
            return super().blank_batch(description)
        types = {v.name: ir.tensor_adapters.to_torch_dtype(dtype_of(v)) for v in self._model.model.graph.inputs}
        return {
            entry.name: torch.zeros(
                [size if isinstance(size, int) else 2 for size in entry.shape], dtype=types[entry.name]
            )
            for entry in description.inputs
        }

    def builder(
        self,
        description: ModelDescription,
        layouts: Layouts = (),
        parameters: Sequence[str] | None = None,
        portable: bool = False,
    ) -> Builder:
        """Returns a builder of graphs; see the base class."""
        _refuse_for_arguments(layouts, parameters)
        check_description(self._model, description, self._loss_fn)
        step = OnnxStep(
            model=self._model,
            description=description,
            loss_fn=self._loss_fn,
            trainable=tuple(self.trainable),
            autocast=autocast_dtype(self._options),
            symbolic_shapes=self._options.utils.run_symbolic_shape_infer,
        )
        return OnnxGraphBuilder(step, self._options._internal_use.extra_postprocess, portable)


def _refuse_for_arguments(layouts: Layouts, parameters: Sequence[str] | None) -> None:
    if layouts:
        names = [name for name, _ in layouts]
        raise TypeError(f"an ONNX model takes only tensors, but the inputs {names} are not tensors")
    if parameters:
        raise ValueError(
            f"loss_parameters {list(parameters)} are for loss functions of PyTorch models only: make them inputs of "
            "the ONNX model"
        )


def _refuse_for_onnx(options: ORTTrainerOptions) -> None:
    """Refuses options that have no effect on an ONNX model."""
    if options.mixed_precision.enabled and options.mixed_precision.dtype != "float16":
        raise ValueError(
            "mixed_precision.dtype must be 'float16' for an ONNX model: leave it out. PyTorch models can be trained in "
            "bfloat16"
        )
    internal = options._internal_use
    idle = {
        "debug.check_model_export": (
            options.debug.check_model_export,
            "it compares the exported graph with a PyTorch model",
        ),
        "_internal_use.enable_internal_postprocess": (
            not internal.enable_internal_postprocess,
            "differentiating an ONNX model needs the rewrites, so they can't be turned off",
        ),
        "_internal_use.enable_onnx_contrib_ops": (
            not internal.enable_onnx_contrib_ops,
            "ONNX Runtime differentiates with its own operators",
        ),
        "utils.kernels": (
            options.utils.kernels == "pytorch",
            "its graph is computed by ONNX Runtime",
        ),
        "_internal_use.onnx_opset_version": (
            options.is_given("_internal_use.onnx_opset_version"),
            "an ONNX model already has an opset",
        ),
    }
    chosen = options.graph_transformer
    names = ("attn_dropout_recompute", "gelu_recompute", "transformer_layer_recompute")
    recomputed = {f"graph_transformer.{name}": getattr(chosen, name) for name in names}
    recomputed["utils.memory_efficient_gradient"] = options.utils.memory_efficient_gradient
    reason = "recomputation works only on the graph of a PyTorch model"
    idle |= {path: (wrong, reason) for path, wrong in recomputed.items()}
    for path, (wrong, reason) in idle.items():
        if wrong:
            options.refuse(f"{path} has no effect for an ONNX model: {reason}. Leave it out")
