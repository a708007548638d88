"""What is trained: a PyTorch model or an ONNX model, behind one face."""

from __future__ import annotations

import inspect
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, Protocol

import onnx
import torch
from torch import nn
from torch.nn import functional as F

from .engine import maximum_opset, training_bindings
from .frontend import (
    ExportedStep,
    GraphBuilder,
    LossFunction,
    ModelWatch,
    RecomputeOptions,
    canonical_names,
    check_model,
    check_signature,
    describe,
    name_sample,
)
from .graph import TrainingGraph
from .model_desc import ModelDescription
from .onnx_model import (
    OnnxGraphBuilder,
    OnnxModel,
    OnnxStep,
    check_description,
    describe_onnx,
    load_onnx_model,
    torch_type,
)
from .optim import _OptimizerConfig
from .options import ORTTrainerOptions
from .ownership import shared_groups

__all__ = ["BORROWED", "LOSSES", "Builder", "ModelSource", "model_source"]

Named = Mapping[str, torch.Tensor]
BORROWED = threading.RLock()
"""Held while a model is looked at or exported: an export changes modes and functions of PyTorch for a while."""
LOSSES: Mapping[str, LossFunction] = {
    "bce_with_logits": F.binary_cross_entropy_with_logits,
    "cross_entropy": F.cross_entropy,
    "huber": F.huber_loss,
    "l1": F.l1_loss,
    "mse": F.mse_loss,
    "nll": F.nll_loss,
    "smooth_l1": F.smooth_l1_loss,
}
"""The losses that ``loss_fn`` can be given by name: functions of torch.nn.functional with their defaults."""


class Builder(Protocol):
    """Builds graphs of one model, loss and description."""

    def build(self, batch: Named, training: bool) -> TrainingGraph:
        """Returns the training or evaluation graph for a sample batch."""
        ...

    def reference(self, batch: Named) -> Sequence[torch.Tensor]:
        """Returns what the model itself computes in evaluation mode."""
        ...


def _recompute_options(options: ORTTrainerOptions) -> RecomputeOptions:
    chosen = options.graph_transformer
    return RecomputeOptions(
        attention_dropout=chosen.attn_dropout_recompute,
        gelu=chosen.gelu_recompute,
        layers=chosen.transformer_layer_recompute,
        layer_count=chosen.number_recompute_layers,
        cheap=options.utils.memory_efficient_gradient,
    )


class ModelSource(ABC):
    """A model with its weights.

    Attributes:
        name: What messages call it.
        fixed: Whether nobody can change its weights from outside.
        inputs: Names of its inputs.
        canonical: Every name of a parameter or buffer -> the first name of the same tensor.
        saved: What is in a state dict, tied names included, in order.
        transient: What is not.
        trainable: Canonical names of the parameters to train.
    """

    name: str
    fixed: bool
    inputs: Sequence[str]
    canonical: Mapping[str, str]
    saved: Named
    transient: Named
    trainable: list[str]

    @property
    @abstractmethod
    def parameters(self) -> Named:
        """All parameters by canonical name, trained or not, as the model has them now."""

    @property
    @abstractmethod
    def buffers(self) -> Named:
        """All buffers, likewise."""

    def variant(self, training: bool) -> Hashable:
        """Returns what stands for all of the model and loss that graphs depend on; it differs where that has changed.

        Args:
            training: Whether for training graphs.

        Raises:
            RuntimeError: If it has become another model, or has nothing to train.
        """
        self._check_trainable(training, self.trainable)
        return None

    def _check_trainable(self, training: bool, trainable: Collection[str]) -> None:
        if training and not trainable:
            raise RuntimeError(
                f"{self.name} has no parameter to train: all have requires_grad=False or are in utils.frozen_weights; "
                "eval_step works"
            )

    def names_of_trainable(self) -> dict[str, list[str]]:
        """Returns the parameters to train, each with all its names."""
        aliases: dict[str, list[str]] = {}
        for name, canonical in self.canonical.items():
            aliases.setdefault(canonical, []).append(name)
        return {name: aliases[name] for name in self.trainable}

    @abstractmethod
    def name_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of a step by name, where there is no description yet."""

    def blank_batch(self, description: ModelDescription) -> dict[str, torch.Tensor]:
        """Returns a batch of zeros, with 2 for every size that is open, where the model says what it takes.

        Raises:
            RuntimeError: If only a real batch can tell.
        """
        raise RuntimeError(
            "no batch has told yet what the model takes: call prepare(), train_step() or eval_step() before"
        )

    @abstractmethod
    def describe(self, batch: Named) -> ModelDescription:
        """Returns a description that is derived from a sample batch."""

    @abstractmethod
    def builder(self, description: ModelDescription) -> Builder:
        """Returns what builds the graphs.

        Raises:
            ValueError: If the description does not fit the model.
        """


def model_source(
    model: Any, loss_fn: LossFunction | None, optim_config: _OptimizerConfig, options: ORTTrainerOptions
) -> ModelSource:
    """Returns a model behind its face.

    Raises:
        TypeError: If it is no model.
        RuntimeError: If it is an ONNX model, and the installed ONNX Runtime can't differentiate one.
    """
    if isinstance(model, nn.Module):
        return _TorchSource(model, loss_fn, optim_config, options)
    if isinstance(model, (OnnxModel, onnx.ModelProto, str, os.PathLike)):
        return _OnnxSource(model, loss_fn, optim_config, options)
    raise TypeError(
        "model must be a torch.nn.Module, an onnx.ModelProto or the path of an ONNX file, but a "
        f"{type(model).__name__} was given"
    )


def _check_names(names: Sequence[str], optim_config: _OptimizerConfig, options: ORTTrainerOptions) -> None:
    unknown = [name for name in options.utils.frozen_weights if name not in names]
    if unknown:
        raise ValueError(
            f"utils.frozen_weights names {unknown}, which are no parameters of the model; it has {sorted(names)}"
        )
    for group in optim_config.params:
        unknown = [name for name in group["params"] if name not in names]
        if unknown:
            raise ValueError(
                f"a parameter group names {unknown}, which are no parameters of the model; it has {sorted(names)}"
            )


def _autocast(options: ORTTrainerOptions) -> torch.dtype | None:
    precision = options.mixed_precision
    return getattr(torch, precision.dtype) if precision.enabled else None


class _TorchSource(ModelSource):
    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        optim_config: _OptimizerConfig,
        options: ORTTrainerOptions,
    ) -> None:
        self.name, self.fixed = type(model).__name__, False
        check_model(model)
        self.inputs = list(inspect.signature(model.forward).parameters)
        self._model, self._loss_fn, self._options = model, loss_fn, options
        named = dict(model.named_parameters(remove_duplicate=False))
        _check_names(list(named), optim_config, options)
        self._check_options()
        self.canonical = canonical_names(model)
        frozen = {self.canonical[name] for name in options.utils.frozen_weights}
        self.trainable = [name for name, p in self.parameters.items() if p.requires_grad and name not in frozen]
        self._watch = ModelWatch(model, self.trainable, frozen)
        self._watches = [self._watch]
        if isinstance(loss_fn, nn.Module) and not isinstance(loss_fn, torch.jit.ScriptModule):
            self._watches.append(ModelWatch(loss_fn, (), [name for name, _ in loss_fn.named_parameters()]))
        shared_groups({**self.parameters, **self.buffers}, self.parameters)
        tensors = {
            name: tensor.detach()
            for name, tensor in {**named, **dict(model.named_buffers(remove_duplicate=False))}.items()
        }
        saved = [name for name in model.state_dict() if name in tensors]
        saved += [name for name in named if name not in saved]
        self.saved = {name: tensors[name] for name in saved}
        self.transient = {name: value for name, value in tensors.items() if name not in self.saved}

    @property
    def parameters(self) -> Named:
        return dict(self._model.named_parameters())

    @property
    def buffers(self) -> Named:
        return dict(self._model.named_buffers())

    def variant(self, training: bool) -> Hashable:
        variant = tuple(watch.variant(training) for watch in self._watches)
        self._check_trainable(training, self._watch.trainable)
        return variant

    def _check_options(self) -> None:
        if self._options.utils.run_symbolic_shape_infer:
            raise ValueError(
                "utils.run_symbolic_shape_infer is refused for a PyTorch model: it is exported with symbolic shapes, "
                "and nothing is left to infer. Leave it out; it works for ONNX models"
            )
        opset = self._options._internal_use.onnx_opset_version
        if opset > maximum_opset():
            raise ValueError(
                f"_internal_use.onnx_opset_version is {opset}, but the installed ONNX Runtime and ONNX go up to "
                f"{maximum_opset()}"
            )

    def name_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        return name_sample(self._model, self._loss_fn, args, kwargs)

    def describe(self, batch: Named) -> ModelDescription:
        return describe(self._model, self._loss_fn, batch)

    def builder(self, description: ModelDescription) -> Builder:
        check_signature(self._model, description, self._loss_fn)
        self._watch.check_exportable()
        internal = self._options._internal_use
        step = ExportedStep(
            model=self._model,
            description=description,
            loss_fn=self._loss_fn,
            trainable=self._watch.trainable,
            modes={part: mode for watch in self._watches for part, mode in (watch.modes or {}).items()},
            autocast=_autocast(self._options),
            opset=internal.onnx_opset_version,
            simplified=internal.enable_internal_postprocess,
            recompute=_recompute_options(self._options),
        )
        return GraphBuilder(step, internal.extra_postprocess, internal.enable_onnx_contrib_ops)


class _OnnxSource(ModelSource):
    def __init__(
        self,
        model: OnnxModel | onnx.ModelProto | str | os.PathLike[str],
        loss_fn: LossFunction | None,
        optim_config: _OptimizerConfig,
        options: ORTTrainerOptions,
    ) -> None:
        training_bindings()  # raises where there are none
        _refuse_for_onnx(options)
        self.name, self.fixed = "the ONNX model", True
        self._model = model if isinstance(model, OnnxModel) else load_onnx_model(model)
        self._loss_fn, self._options = loss_fn, options
        self.inputs = self._model.inputs
        _check_names(list(self.parameters), optim_config, options)
        self.saved = {**self.parameters, **self.buffers}
        self.transient = {}
        self.canonical = {name: name for name in self.saved}
        frozen = {*options.utils.frozen_weights, *self._model.frozen}
        self.trainable = [name for name in self.parameters if name not in frozen]

    @property
    def parameters(self) -> Named:
        return self._model.parameters

    @property
    def buffers(self) -> Named:
        return self._model.buffers

    def name_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        names = [*self._model.inputs, *([] if self._loss_fn is None else ["label"])]
        if len(args) > len(names):
            raise TypeError(f"{len(args)} inputs were given, but the ONNX model takes {names}")
        return {**dict(zip(names, args, strict=False)), **kwargs}

    def describe(self, batch: Named) -> ModelDescription:
        return describe_onnx(self._model, self._loss_fn, batch)

    def blank_batch(self, description: ModelDescription) -> dict[str, torch.Tensor]:
        if self._loss_fn is not None:  # whose label may be anything
            return super().blank_batch(description)
        types = {value.name: value.type.tensor_type.elem_type for value in self._model.proto.graph.input}
        return {
            entry.name: torch.zeros(
                [size if isinstance(size, int) else 2 for size in entry.shape], dtype=torch_type(types[entry.name])
            )
            for entry in description.inputs
        }

    def builder(self, description: ModelDescription) -> Builder:
        check_description(self._model, description, self._loss_fn)
        step = OnnxStep(
            model=self._model,
            description=description,
            loss_fn=self._loss_fn,
            trainable=tuple(self.trainable),
            autocast=_autocast(self._options),
            symbolic_shapes=self._options.utils.run_symbolic_shape_infer,
        )
        return OnnxGraphBuilder(step, self._options._internal_use.extra_postprocess)


def _refuse_for_onnx(options: ORTTrainerOptions) -> None:
    """Refuses the options that mean nothing where the model is an ONNX model."""
    internal = options._internal_use
    refused = {
        "debug.check_model_export": (
            options.debug.check_model_export,
            "it compares the exported graph with the PyTorch model, and there is none",
        ),
        "mixed_precision.dtype": (
            options.mixed_precision.enabled and options.mixed_precision.dtype != "float16",
            "ONNX models are trained in float16 or fp32; a PyTorch model can be trained in bfloat16",
        ),
        "_internal_use.enable_internal_postprocess": (
            not internal.enable_internal_postprocess,
            "an ONNX model must be rewritten to be differentiated, so the rewrites can't be switched off",
        ),
        "_internal_use.enable_onnx_contrib_ops": (
            not internal.enable_onnx_contrib_ops,
            "ONNX Runtime differentiates with operators of its own",
        ),
        **{
            f"graph_transformer.{name}": (
                value is True,
                "recomputation works on the graph of a PyTorch model. Give the model as one",
            )
            for name, value in options.graph_transformer.to_dict().items()
        },
        "utils.memory_efficient_gradient": (
            options.utils.memory_efficient_gradient,
            "recomputation works on the graph of a PyTorch model. Give the model as one",
        ),
        "_internal_use.onnx_opset_version": (
            options.is_given("_internal_use.onnx_opset_version"),
            "an ONNX model has its operator set already",
        ),
    }
    for path, (wrong, reason) in refused.items():
        if wrong:
            raise ValueError(f"{path} is refused for an ONNX model: {reason}. Leave it out")
