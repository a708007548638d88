"""A PyTorch model as a source of training graphs."""

from __future__ import annotations

import types
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ..capture.borrow import BORROWED
from ..capture.describe import describe, name_sample
from ..capture.nested import Layout
from ..capture.step_module import (
    ExportedStep,
    LossFunction,
    RecomputeOptions,
    canonical_names,
    check_signature,
)
from ..core.signatures import signature_of
from ..engine.ort import maximum_opset
from ..engine.ownership import shared_groups
from ..engine.torch_memory import divided, freed_storages, sparse
from ..graph.kernels import Kernels
from ..guard.guard import Guard
from ..guard.memory import ModelMemory, Named
from ..kernels.kinds import ONNX_RUNTIME, PROGRAMS, choose, kinds, undetermined
from ..optim import OptimizerConfig
from ..optim.torch_optimizer import TorchOptimizerConfig
from ..options import ModelDescription, ORTTrainerOptions
from ..options.trainer_options import MINIMUM_OPSET
from .builder import GraphBuilder

if TYPE_CHECKING:
    import onnx_ir as ir

Layouts = Sequence[tuple[str, Layout]]

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_SHARD_OUTSIDE = (
    "the trainer has a whole model in each process. To divide it, use ORTModule in your own loop, "
    "torch.distributed.fsdp.fully_shard(ORTModule(layer))"
)


class ModelSource:
    """A module with its weights, which may change.

    Args:
        model: The module.
        loss_fn: The loss function; None if the model computes its loss.
        optim_config: The optimizer, which says what is trained.
        options: All settings.
        name: Name of the model in error messages; None for that of its class.

    Attributes:
        name: As given.
        fixed: Whether its weights can't be changed from outside.
        inputs: Names of its inputs.
        canonical: Every name of a parameter or buffer -> the first name of the same tensor.
        saved: Tensors in a state dict, including tied names, in order; only their shapes and dtypes are used.
        non_persistent: Tensors not in a state dict; only their shapes and dtypes are used.
        trainable: Canonical names of the parameters to train.
        memory: The tensors that the trainer works on.
        guard: Watches what graphs of the model depend on.
    """

    fixed = False
    inputs: Sequence[str]
    memory: ModelMemory

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFunction | None,
        optim_config: OptimizerConfig,
        options: ORTTrainerOptions,
        name: str | None = None,
    ) -> None:
        self.name = type(model).__name__ if name is None else name
        _check_model(model)
        self.inputs = list(signature_of(model.forward).parameters)
        self._model, self._loss_fn, self._options = model, loss_fn, options
        self._joint = False
        named = dict(model.named_parameters(remove_duplicate=False))
        check_names(list(named), optim_config, options)
        self._check_options(optim_config)
        self.canonical = canonical_names(model)
        frozen = {self.canonical[name] for name in options.utils.frozen_weights}
        frozen |= {name for name in self.parameters if not optim_config.trains(name)}
        self.trainable = [name for name, p in self.parameters.items() if p.requires_grad and name not in frozen]
        self.guard = Guard(model, loss_fn, self.trainable, frozen, options.utils.share_weights)
        shared_groups({**self.parameters, **self.buffers}, self.parameters)
        self.memory = self.guard.memory or ModelMemory(model, self.name)
        tensors = {
            name: torch.empty_like(tensor, device="meta")
            for name, tensor in {**named, **dict(model.named_buffers(remove_duplicate=False))}.items()
        }
        saved = [name for name in model.state_dict() if name in tensors]
        saved += [name for name in named if name not in saved]  # also parameters that a custom state_dict() omits
        self.saved = {name: tensors[name] for name in saved}
        self.non_persistent = {name: value for name, value in tensors.items() if name not in self.saved}

    @property
    def parameters(self) -> Named:
        """The model's current parameters by canonical name, trained or not."""
        return dict(self._model.named_parameters())

    @property
    def buffers(self) -> Named:
        """The model's current buffers by canonical name."""
        return dict(self._model.named_buffers())

    def check_joint(self) -> None:
        """Checks that several processes can train it together, each on its part of the data.

        Raises:
            ValueError: If they can't, because a module communicates with other processes during a pass.
        """
        self._joint = True
        layers = [path for path, module in self._model.named_modules() if isinstance(module, nn.SyncBatchNorm)]
        if layers:
            raise ValueError(
                f"{layers[:3]} of {self.name} are SyncBatchNorm, which exchanges batch statistics with the other "
                "processes during the forward and backward pass, but these run as one graph here: leave out "
                "nn.SyncBatchNorm.convert_sync_batchnorm(), and each process normalizes by its own batch, as PyTorch's "
                "BatchNorm does; or use a normalization without batch statistics (GroupNorm, LayerNorm)"
            )

    def large_constants(self) -> Named:
        """Returns what the model computes with beside parameters and buffers, such as quantized weights in a file."""
        return {}

    def names_of_trainable(self) -> dict[str, list[str]]:
        """Returns the parameters to train, each with all its names."""
        aliases: dict[str, list[str]] = {}
        for name, canonical in self.canonical.items():
            aliases.setdefault(canonical, []).append(name)
        return {name: aliases[name] for name in self.trainable}

    def _check_options(self, optim_config: OptimizerConfig) -> None:
        if isinstance(optim_config, TorchOptimizerConfig) and not self._options.utils.share_weights:
            raise ValueError(
                f"utils.share_weights is False, but {optim_config.name} updates the model itself, not copies: leave "
                "the option out, or use a config of ort_trainer.optim"
            )
        kernels = self._options.utils.kernels
        if not kinds(kernels)[0].checks_indices and not self._options.debug.check_indices:
            raise ValueError(
                f"debug.check_indices is False, but utils.kernels is {kernels!r}: compiled loops end the process at an "
                "index that is out of range, so leave the check on, or set utils.kernels to 'auto'"
            )
        if reason := undetermined(kernels, self._options.debug.deterministic_compute):
            raise ValueError(reason)
        opset = self._options._internal_use.onnx_opset_version
        if opset > MINIMUM_OPSET and opset > maximum_opset():
            raise ValueError(
                f"_internal_use.onnx_opset_version is {opset}, but the installed ONNX Runtime and ONNX support at most "
                f"{maximum_opset()}"
            )

    def _kernels(self) -> str:
        """Returns whose kernels compute the training step.

        Raises:
            ValueError: If the requested kernels can't be used.
        """
        name = self._options.utils.kernels
        usable, reason = choose(name, self._objection)
        if not usable:
            others = [repr(value) for value in ("auto", "onnxruntime") if not all(map(self._objection, kinds(value)))]
            way = f"set it to {' or '.join(others)}" if others else "leave out what requires ONNX operators"
            if name == ONNX_RUNTIME.name:
                way += ", or install a build of ONNX Runtime for this device"
            raise ValueError(f"utils.kernels is {name!r}, but {reason}: {way}")
        return usable

    def _padding_mask(self, description: ModelDescription) -> str:
        """Returns the input that says which places are padded, if they are left out.

        Raises:
            ValueError: If there is no such input, or PyTorch's kernels can't be used.
        """
        name = self._options.utils.remove_padding
        if name and not kinds(self._kernels())[0].of_pytorch:
            reason = self._objection(PROGRAMS) or "utils.kernels is 'onnxruntime'"
            raise ValueError(f"utils.remove_padding is {name!r}, which needs PyTorch's kernels, but {reason}")
        if name and name not in description.input_names:
            raise ValueError(
                f"utils.remove_padding is {name!r}, but the model's inputs are {list(description.input_names)}: name "
                "the attention mask"
            )
        return name

    def _objection(self, kernels: Kernels) -> str:
        """Returns why a kind of kernels can't be used; "" if it can."""
        options = self._options
        objection = kernels.objection(torch.device(options.device.id))
        if objection or not kernels.of_pytorch:
            return objection
        internal = options._internal_use
        set_by_user = {
            "session_options": options.session_options is not None,
            "provider_options": any(options.provider_options.values()),
            "_internal_use.extra_postprocess": internal.extra_postprocess is not None,
            "_internal_use.enable_internal_postprocess False": not internal.enable_internal_postprocess,
        }
        named = [name for name, is_given in set_by_user.items() if is_given]
        require = "requires" if len(named) == 1 else "require"
        return f"{' and '.join(named)} {require} a graph of ONNX operators" if named else ""

    def name_inputs(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], parameters: Collection[str]
    ) -> dict[str, Any]:
        """Returns the arguments of a step by name, before there is a description."""
        return name_sample(self._model, self._loss_fn, args, kwargs, parameters)

    def blank_batch(self, description: ModelDescription) -> dict[str, torch.Tensor]:
        """Returns a batch of zeros, with size 2 for every symbolic dimension, if the model declares its inputs.

        Raises:
            RuntimeError: If only a real batch determines the inputs.
        """
        raise RuntimeError(
            "the model's inputs are unknown before the first batch: call prepare(), train_step() or eval_step() first"
        )

    def describe(
        self, batch: Named, layouts: Mapping[str, Layout], parameters: Mapping[str, torch.Tensor]
    ) -> ModelDescription:
        """Returns a description derived from a sample batch.

        Args:
            batch: The tensors by input name.
            layouts: How the tensors form the arguments.
            parameters: The loss parameters.
        """
        place = next((value.device for value in (*self.parameters.values(), *self.buffers.values())), None)
        with BORROWED:  # before the first step, the model may be elsewhere than training
            batch = {name: value.to(place) for name, value in batch.items()}
            mask = self._options.utils.remove_padding
            return describe(self._model, self._loss_fn, batch, layouts, parameters, mask)

    def own_model(self, tensors: Named, outputs: Sequence[str] | None) -> ir.Model | None:
        """Returns the user's own ONNX model with other weights; None if the user's model is not in ONNX.

        Args:
            tensors: Parameters and buffers by canonical name.
            outputs: Names of outputs, for a model in inference form that has only these. None for the whole model.
        """
        return None

    def builder(
        self,
        description: ModelDescription,
        layouts: Layouts = (),
        parameters: Sequence[str] | None = None,
        portable: bool = False,
    ) -> GraphBuilder:
        """Returns a builder of graphs.

        Args:
            description: The model description.
            layouts: The arguments that are not one tensor, each with its layout.
            parameters: The inputs that are loss parameters; None if not known yet.
            portable: Whether the graphs must run on other engines too, so have only standard ONNX operators.

        Raises:
            ValueError: If the description does not fit the model.
        """
        labels = check_signature(self._model, description, self._loss_fn, dict(layouts), parameters)
        self.guard.check_exportable()
        internal = self._options._internal_use
        step = ExportedStep(
            model=self._model,
            description=description,
            loss_fn=self._loss_fn,
            labels=labels,
            parameters=tuple(parameters or ()),
            layouts=dict(layouts),
            trainable=self.guard.trainable,
            modes=self.guard.modes,
            autocast=autocast_dtype(self._options),
            opset=max(internal.onnx_opset_version, MINIMUM_OPSET),
            simplified=internal.enable_internal_postprocess,
            recompute=recompute_options(self._options),
            kernels=ONNX_RUNTIME.name if portable else self._kernels(),
            fast_random=self._options.utils.random_numbers == "fast",
            padding_mask="" if portable else self._padding_mask(description),
            carries=not portable,
            numbers=frozenset() if portable else frozenset(self.guard.numbers),
            tables=self.guard.tables,
            joint=self._joint,
        )
        return GraphBuilder(
            step,
            internal.extra_postprocess,
            internal.enable_onnx_contrib_ops,
            cached=self._options.utils.cache_exports,
            tolerates=self._options.tolerates,
            depends_on_modes=self.guard.depends_on_modes,
            exchanged=self.guard.take_exchanged_modules,
            noted=self.guard.noted,
        )


def check_names(names: Sequence[str], optim_config: OptimizerConfig, options: ORTTrainerOptions) -> None:
    """Checks that frozen weights and parameter groups name known parameters.

    Raises:
        ValueError: If a name is unknown.
    """
    unknown = [name for name in options.utils.frozen_weights if name not in names]
    if unknown:
        raise ValueError(f"unknown parameters {unknown} in utils.frozen_weights: the model has {sorted(names)}")
    for group in optim_config.params:
        unknown = [name for name in group["params"] if name not in names]
        if unknown:
            raise ValueError(f"unknown parameters {unknown} in a parameter group: the model has {sorted(names)}")


def autocast_dtype(options: ORTTrainerOptions) -> torch.dtype | None:
    """Returns the dtype of mixed precision; None without it."""
    precision = options.mixed_precision
    return getattr(torch, precision.dtype) if precision.enabled else None


def recompute_options(options: ORTTrainerOptions) -> RecomputeOptions:
    """Returns what options ask to compute again in the backward pass."""
    chosen = options.graph_transformer
    return RecomputeOptions(
        attention_dropout=chosen.attn_dropout_recompute,
        gelu=chosen.gelu_recompute,
        layers=chosen.transformer_layer_recompute,
        layer_count=chosen.number_recompute_layers,
        cheap=options.utils.memory_efficient_gradient,
    )


def _check_model(model: nn.Module) -> None:
    """Checks that a model is a plain module with values.

    Raises:
        TypeError: If the model is wrapped, compiled or divided among processes, or has no ``forward``.
        ValueError: If its parameters or buffers have no values yet, or can't be changed.
    """
    if model.forward == types.MethodType(nn.Module.forward, model):
        raise TypeError(
            f"{type(model).__name__} defines no forward(), which the trainer calls: for other methods, such as act(), "
            'use ORTModule(model, methods=["act"]) in a loop of your own'
        )
    for path, module in model.named_modules():
        where, kind = f"model.{path}" if path else "model", type(module).__name__
        if isinstance(module, _WRAPPERS):
            raise TypeError(
                f"{where} is a {kind}, but the trainer itself averages the gradients of several processes: use the "
                f"module inside, {where}.module, and start one process per device"
            )
        if kind == "FullyShardedDataParallel":
            raise TypeError(f"{where} is a {kind}: {_SHARD_OUTSIDE}")
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(f"{where} is a TorchScript module, which can't be exported: use the original module")
        if not path and kind == "OptimizedModule" and hasattr(module, "_orig_mod"):
            raise TypeError(
                f"{where} is the result of torch.compile(), which can't be exported: use the module inside, "
                f"{where}._orig_mod"
            )
    if any(kind.__name__ == "ORTModule" for kind in type(model).__mro__):
        raise TypeError("model is an ORTModule, whose loop is the user's: use the module inside, model.module")
    if type(model).__name__ == "_FabricModule":
        raise TypeError(
            "model was returned by Fabric.setup(), and its forward casts and moves its inputs: use the module inside, "
            "model.module; the trainer has options for devices and mixed precision"
        )
    name = type(model).__name__
    tensors = [*model.named_parameters(), *model.named_buffers()]
    parts = divided(name, tensors)
    if parts:
        raise TypeError(f"{parts}: {_SHARD_OUTSIDE}")
    made_of_others = [key for key, tensor in tensors if hasattr(tensor, "__tensor_flatten__")]
    if made_of_others:
        raise TypeError(
            f"{made_of_others[:3]} of {name} consist of other tensors, as quantized weights do: train in your own "
            "loop, with ORTModule(model)"
        )
    without_strides = sparse(name, tensors)
    if without_strides:
        raise ValueError(
            f"{without_strides}: register them as to_dense(), or train in your own loop with ORTModule(model), which "
            "PyTorch runs then"
        )
    lazy = [key for key, tensor in tensors if is_lazy(tensor)]  # type: ignore[no-untyped-call]
    if lazy:
        raise ValueError(
            f"parameters {lazy[:3]} of {name} are lazy and have no shape yet: run the model once on a batch, model(x), "
            "before you pass it to the trainer"
        )
    meta = [key for key, tensor in tensors if tensor.is_meta]
    if meta:
        raise ValueError(
            f"{meta[:3]} of {name} are on the meta device and have no values yet: initialize the model first, with "
            "model.to_empty(device='cpu') and its initialization, or model.load_state_dict(..., assign=True)"
        )
    freed = freed_storages(name, tensors)
    if freed:
        raise ValueError(f"{freed}: give the trainer a model with all its values")
    frozen = [key for key, tensor in tensors if tensor.is_inference()]
    if frozen:
        raise ValueError(
            f"{frozen[:3]} of {name} were made under torch.inference_mode() and can't be differentiated: make the "
            "model outside of it"
        )
