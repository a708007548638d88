"""Translates :class:`~ort_trainer.TrainingParameters` to the trainer's optimizer and options."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...amp import LossScaler
from ...core.errors import shown, warn
from ...engine.ort import SessionOptions, available_providers, has_cuda, known_providers
from ...export.onnx import OnnxModel
from ...optim import OptimizerConfig
from ...optim.rules import CONFIGS
from ...trainer import ORTTrainer
from .parameters import TrainingParameters

__all__ = [
    "check_initial_state",
    "check_rate_name",
    "feed_of",
    "frozen_of",
    "number_of",
    "optimizer_of",
    "options_of",
    "providers_of",
]

_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


def providers_of(providers: Any, provider_options: Any) -> tuple[str, dict[str, dict[str, Any]]]:
    """Returns the device that a list of providers selects, and the options of each provider used.

    Skips providers that can't be used here, with a warning. The CPU supports every node, so providers after it are
    ignored.

    Raises:
        TypeError, ValueError: If the list or the options are invalid, or a provider is unknown to ONNX Runtime.
    """
    if providers is None and provider_options is None:
        return "", {}
    entries = _entries(available_providers() if providers is None else providers, provider_options)
    settings: dict[str, dict[str, Any]] = {}
    for name, options in _usable(entries):
        settings[name] = dict(options)
        if name == _CPU:
            break
    return ("cpu" if _CUDA not in settings else _cuda_device(settings[_CUDA])), settings


def _entries(providers: Any, provider_options: Any) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the providers with their options."""
    if not isinstance(providers, (list, tuple)):
        raise TypeError(f"providers must be a list of names, but {shown(providers)} was given")
    pairs = [(entry, {}) if isinstance(entry, str) else entry for entry in providers]
    wrong = [
        entry
        for entry in pairs
        if not (isinstance(entry, tuple) and len(entry) == 2)
        or not (isinstance(entry[0], str) and isinstance(entry[1], Mapping))
    ]
    if wrong:
        raise TypeError(f"providers must be names or pairs (name, dict of options), but {shown(wrong)} were given")
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise ValueError(f"providers must not repeat a provider, but {names} were given")
    if provider_options is None:
        return pairs
    if not isinstance(provider_options, (list, tuple)) or not all(isinstance(o, Mapping) for o in provider_options):
        raise TypeError(
            f"provider_options must be a list of dicts, one for each of providers, but {shown(provider_options)} was "
            "given"
        )
    if any(options for _, options in pairs):
        raise ValueError("provider_options must not be given when providers already has options")
    if len(provider_options) != len(pairs):
        raise ValueError(f"there are {len(names)} providers, {names}, but {len(provider_options)} provider_options")
    return [(name, options) for (name, _), options in zip(pairs, provider_options, strict=True)]


def _usable(entries: Sequence[tuple[str, Mapping[str, Any]]]) -> list[tuple[str, Mapping[str, Any]]]:
    """Returns the providers that can be used here."""
    known, available = known_providers(), available_providers()
    unknown = [name for name, _ in entries if name not in known]
    if unknown:
        raise ValueError(f"providers has {unknown}, unknown to ONNX Runtime: choose from {available}")
    skipped = [name for name, _ in entries if name not in available or (name == _CUDA and not has_cuda())]
    if skipped:
        warn(
            f"skipping the providers {skipped}, which can't be used here: the installed ONNX Runtime has {available}, "
            f"and torch.cuda.is_available() is {torch.cuda.is_available()}"
        )
    return [(name, options) for name, options in entries if name not in skipped]


def _cuda_device(options: Mapping[str, Any]) -> str:
    """Returns the device selected by the options of the CUDA provider."""
    index, count = str(options.get("device_id", 0)), torch.cuda.device_count()
    if not index.isdecimal() or int(index) >= count:
        raise ValueError(f"providers has {_CUDA} with device_id {shown(index)}, but there are {count} CUDA devices")
    return f"cuda:{index}"


def frozen_of(parameters: TrainingParameters, model: OnnxModel) -> list[str]:
    """Returns the weights that are not trained."""
    named = {
        "weights_to_train": parameters.weights_to_train,
        "weights_not_to_train": parameters.weights_not_to_train,
        "optimizer_attributes_map": set(parameters.optimizer_attributes_map),
        "optimizer_int_attributes_map": set(parameters.optimizer_int_attributes_map),
    }
    for what, names in named.items():
        unknown = sorted(names - set(model.parameters))
        if unknown:
            raise ValueError(
                f"{what} has {unknown}, which are not weights of the model: it has {list(model.parameters)}"
            )
    trained = set(parameters.weights_to_train or model.parameters) - parameters.weights_not_to_train
    for operator, inputs in parameters.immutable_weights.items():
        plain = isinstance(inputs, Mapping) and all(
            isinstance(position, int) and isinstance(number, (int, float)) for position, number in inputs.items()
        )
        if not plain:
            raise TypeError(
                f"immutable_weights[{operator!r}] must be a dict, input position -> number, but it is {inputs!r}"
            )
    for node in model.model.graph:
        for position, number in parameters.immutable_weights.get(node.op_type, {}).items():
            value = node.inputs[position] if position < len(node.inputs) else None
            name = "" if value is None else str(value.name)
            if name in trained and bool((model.parameters[name] == number).all()):
                trained.discard(name)
    return [name for name in model.parameters if name not in trained]


def optimizer_of(parameters: TrainingParameters, model: OnnxModel) -> OptimizerConfig:
    """Returns the optimizer, with a parameter group for each weight that has attributes.

    Returns SGD if no optimizer is named; its update never runs then.

    Raises:
        TypeError, ValueError: If its name or attributes are invalid.
    """
    name = parameters.training_optimizer_name
    if name not in ("", *CONFIGS):
        raise ValueError(f"training_optimizer_name must be one of {sorted(CONFIGS)} or empty, but {name!r} was given")
    for what in ("optimizer_attributes_map", "optimizer_int_attributes_map"):
        for weight, found in getattr(parameters, what).items():
            if not isinstance(found, Mapping):
                raise TypeError(f"{what}[{weight!r}] must be a dict of attributes, but it is {shown(found)}")
    groups: list[dict[str, Any]] = []
    for weight in model.parameters:
        attributes: dict[str, Any] = dict(parameters.optimizer_attributes_map.get(weight, {}))
        for key, value in parameters.optimizer_int_attributes_map.get(weight, {}).items():
            attributes[key] = bool(value) if key == "do_bias_correction" else value
        if attributes:
            groups.append({"params": [weight], **attributes})
    if not name and groups:
        raise ValueError(f"optimizer attributes {groups} need a training_optimizer_name: set it, or leave them out")
    return CONFIGS[name or "SGDOptimizer"](params=groups)


def options_of(
    parameters: TrainingParameters,
    model: OnnxModel,
    device: str,
    provider_options: Mapping[str, Any],
    sess_options: SessionOptions | None,
) -> dict[str, Any]:
    """Returns the parameters as options of a trainer, which reject unsupported settings."""
    p = parameters
    if p.use_fp16_moments:
        raise ValueError("use_fp16_moments is not supported: exact training needs fp32 moments")
    if p.loss_scale < 0:
        raise ValueError(f"loss_scale must be at least 0, but {p.loss_scale} was given")
    return {
        "batch": {"gradient_accumulation_steps": p.gradient_accumulation_steps},
        "device": {"id": device} if device else {},
        "distributed": {
            # Defaults are left out, because several processes may have been launched anyway.
            **({"world_rank": p.world_rank} if p.world_rank else {}),
            **({"world_size": p.world_size} if p.world_size != 1 else {}),
            **({"data_parallel_size": p.data_parallel_size} if p.data_parallel_size != 1 else {}),
            "horizontal_parallel_size": p.horizontal_parallel_size,
            "pipeline_parallel": {
                "pipeline_parallel_size": p.pipeline_parallel_size,
                "num_pipeline_micro_batches": p.num_pipeline_micro_batches,
                "pipeline_cut_info_string": p.pipeline_cut_info_string,
                "sliced_schema": p.sliced_schema,
                "sliced_axes": p.sliced_axes,
                "sliced_tensor_names": p.sliced_tensor_names,
            },
            "allreduce_post_accumulation": p.allreduce_post_accumulation,
            "deepspeed_zero_optimization": {"stage": p.deepspeed_zero_stage},
            "enable_adasum": p.enable_adasum,
        },
        "mixed_precision": {
            "enabled": p.use_mixed_precision,
            "loss_scaler": LossScaler(p.loss_scale or 1.0) if p.use_mixed_precision else None,
        },
        "graph_transformer": {
            "attn_dropout_recompute": p.attn_dropout_recompute,
            "gelu_recompute": p.gelu_recompute,
            "transformer_layer_recompute": p.transformer_layer_recompute,
            "number_recompute_layers": p.number_recompute_layers,
            "propagate_cast_ops_config": {
                "level": p.propagate_cast_ops_level,
                "allow": p.propagate_cast_ops_allow,
            },
        },
        "utils": {
            "frozen_weights": frozen_of(p, model),
            "grad_norm_clip": p.enable_grad_norm_clip,
            "memory_efficient_gradient": p.use_memory_efficient_gradient,
        },
        "debug": {
            "graph_save_paths": {
                "model_after_graph_transforms_path": p.model_after_graph_transforms_path,
                "model_with_gradient_graph_path": p.model_with_gradient_graph_path,
                "model_with_training_graph_path": p.model_with_training_graph_path,
            }
        },
        "provider_options": provider_options,
        "session_options": sess_options,
    }


def check_rate_name(parameters: TrainingParameters, taken: Sequence[str]) -> None:
    """Checks that the learning rate has a unique input name.

    Raises:
        ValueError: If the name is empty or taken.
    """
    name = parameters.lr_params_feed_name
    if parameters.training_optimizer_name and (not name or name in taken):
        raise ValueError(
            f"lr_params_feed_name must be a new input name, but {name!r} was given: {list(taken)} are taken"
        )


def check_initial_state(parameters: TrainingParameters, trainer: ORTTrainer) -> None:
    """Checks the names in the optimizer's initial state.

    Raises:
        ValueError: If a name is unknown, or there is no optimizer.
    """
    if not parameters.training_optimizer_name:
        raise ValueError("set_optimizer_initial_state has no effect without training_optimizer_name: leave it out")
    known = trainer.state_dict()["optimizer"]
    for name, entries in parameters.optimizer_initial_state.items():
        unknown = sorted(set(entries) - set(known.get(name, ())))
        if name not in known or unknown:
            raise ValueError(
                f"set_optimizer_initial_state has {name!r}: {sorted(entries)}, but {trainer.optim_config.name} has "
                f"state for { {weight: sorted(keys) for weight, keys in known.items()} }"
            )


def feed_of(given: Any) -> Mapping[str, Any]:
    """Returns the inputs of a run after checking that they are a dict."""
    if not isinstance(given, Mapping):
        raise TypeError(f"the inputs must be a dict of names and values, but a {type(given).__name__} was given")
    return given


def number_of(name: str, value: torch.Tensor) -> float:
    """Returns a fed learning rate or loss scale as a number."""
    if value.numel() != 1 or not value.is_floating_point():
        raise ValueError(
            f"input {name!r} must be a float32 array of shape [1], but it has shape {list(value.shape)}, {value.dtype}"
        )
    number = float(value.item())
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"input {name!r} must be a finite number, at least 0, but {number} was given")
    return number
