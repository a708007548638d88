"""``TrainingParameters``, the settings of a :class:`~ort_trainer.TrainingSession`, and their meaning for a trainer."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch

from ...amp import LossScaler
from ...core.errors import shown, warn
from ...engine.ort import SessionOptions, available_providers, has_cuda, known_providers
from ...onnx.load import OnnxModel
from ...optim import OptimizerConfig
from ...optim.rules import CONFIGS
from ...options.schema import leaves, load_schema
from ...trainer import ORTTrainer


@dataclass
class TrainingParameters:
    """Settings of a training session, with ONNX Runtime's names and defaults.

    Assigning a value of the wrong type raises; a setting without effect here raises when the session is created.

    Attributes:
        loss_output_name: The output of the model to minimize.
        training_optimizer_name: ``AdamOptimizer``, ``LambOptimizer``, ``SGDOptimizer``, or empty: then a run computes
            gradients without updates.
        lr_params_feed_name: The name of the input for the learning rate, a float32 of shape [1].
        optimizer_attributes_map: Weight -> its hyper-parameters: ``alpha``, ``beta``, ``lambda``, ``epsilon``,
            ``max_norm_clip``, ``ratio_min``, ``ratio_max``, if the optimizer has them.
        optimizer_int_attributes_map: Weight -> ``do_bias_correction``, ``weight_decay_mode``.
        weights_to_train: Initializers to train; empty for all floating-point ones.
        weights_not_to_train: Initializers not to train.
        immutable_weights: Operator -> input position -> value: an initializer at that input whose elements all have
            this value is a constant and not trained.
        gradient_accumulation_steps: Runs per weight update.
        enable_grad_norm_clip: Whether gradients are clipped to ``max_norm_clip``.
        use_fp16_moments: Whether the optimizer keeps its moments in 16 bits: in bfloat16, which has the range of fp32.
        use_mixed_precision: Whether matrix products and convolutions use fp16.
        loss_scale: The loss scale of mixed precision; 0 if it is fed as an input (``session.loss_scale_input_name``).
        set_gradients_as_graph_outputs: Whether to add the outputs ``<weight>_grad``: the window's gradients so far.
        model_after_graph_transforms_path: Where to write the forward graph.
        model_with_gradient_graph_path: Where to write the graph with the backward pass.
        model_with_training_graph_path: Where to write the graph with the optimizer's nodes.
    """

    allreduce_post_accumulation: bool = False
    attn_dropout_recompute: bool = False
    data_parallel_size: int = 1
    deepspeed_zero_stage: int = 0
    enable_adasum: bool = False
    enable_grad_norm_clip: bool = True
    gelu_recompute: bool = False
    gradient_accumulation_steps: int = 1
    horizontal_parallel_size: int = 1
    immutable_weights: dict[str, dict[int, float]] = field(default_factory=dict)
    loss_output_name: str = ""
    loss_scale: float = 0.0
    lr_params_feed_name: str = "Learning_Rate"
    model_after_graph_transforms_path: str = ""
    model_with_gradient_graph_path: str = ""
    model_with_training_graph_path: str = ""
    num_pipeline_micro_batches: int = 1
    number_recompute_layers: int = 0
    optimizer_attributes_map: dict[str, dict[str, float]] = field(default_factory=dict)
    optimizer_int_attributes_map: dict[str, dict[str, int]] = field(default_factory=dict)
    pipeline_cut_info_string: str = ""
    pipeline_parallel_size: int = 1
    propagate_cast_ops_allow: list[str] = field(default_factory=list)
    propagate_cast_ops_level: int = 1
    set_gradients_as_graph_outputs: bool = False
    sliced_axes: dict[str, int] = field(default_factory=dict)
    sliced_schema: dict[str, list[int]] = field(default_factory=dict)
    sliced_tensor_names: list[str] = field(default_factory=list)
    training_optimizer_name: str = ""
    transformer_layer_recompute: bool = False
    use_fp16_moments: bool = False
    use_memory_efficient_gradient: bool = False
    use_mixed_precision: bool = False
    weights_not_to_train: set[str] = field(default_factory=set)
    weights_to_train: set[str] = field(default_factory=set)
    world_rank: int = 0
    world_size: int = 1
    optimizer_initial_state: dict[str, dict[str, Any]] = field(default_factory=dict, init=False, repr=False)

    def __setattr__(self, name: str, value: Any) -> None:
        kinds = _KINDS.get(name)
        if kinds is None:
            raise AttributeError(f"TrainingParameters has no property {name!r}: choose from {sorted(_KINDS)}")
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise TypeError(f"TrainingParameters.{name} must be a {wanted}, but {shown(value)} was given")
        super().__setattr__(name, _copied(value, kinds[0]))

    def set_optimizer_initial_state(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Sets the initial moments and update counts.

        Args:
            state: Weight -> ``Moment_1``, ``Moment_2`` and, with Adam, ``Update_Count`` (completed updates plus 1), as
                arrays; with LAMB also ``shared_optimizer_state`` -> ``Step``. ``get_optimizer_state`` returns this.

        Raises:
            TypeError: If it is not a dict of dicts.
        """
        if not isinstance(state, Mapping) or not all(isinstance(entry, Mapping) for entry in state.values()):
            raise TypeError(f"the optimizer's initial state must be a dict of dicts, but {state!r} was given")
        self.optimizer_initial_state = {
            name: {key: np.array(value) for key, value in entry.items()} for name, entry in state.items()
        }


def _copied(value: Any, kind: type) -> Any:
    """Returns a value in the type of its property; lists, sets and dicts are copied."""
    if kind in (list, set, dict):
        return kind(copy.deepcopy(value))
    return kind(value)


# Property -> the accepted types; the first is its own type.
_ACCEPTED: dict[type, tuple[type, ...]] = {float: (float, int), list: (list, tuple), set: (set, frozenset, list, tuple)}
_KINDS: dict[str, tuple[type, ...]] = {}
for _field in fields(TrainingParameters):
    _default = _field.default_factory() if callable(_field.default_factory) else _field.default
    _KINDS[_field.name] = _ACCEPTED.get(type(_default), (type(_default),))


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
    all_providers, available = known_providers(), available_providers()
    unknown = [name for name, _ in entries if name not in all_providers]
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


def fallback_providers(providers: Sequence[str]) -> list[str]:
    """Returns the providers for a session whose first provider failed; none if that was the CPU."""
    if not providers or providers[0] == _CPU:
        return []
    return [_CUDA, _CPU] if providers[0] != _CUDA and has_cuda() else [_CPU]


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
        for weight, weight_attributes in getattr(parameters, what).items():
            if not isinstance(weight_attributes, Mapping):
                raise TypeError(
                    f"{what}[{weight!r}] must be a dict of attributes, but it is {shown(weight_attributes)}"
                )
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


# Former name of a setting -> its dotted path among the options; most have the same name there.
_FORMER = {each.name for each in fields(TrainingParameters)}
_PLACES = {
    **{name: path for path, _ in leaves(load_schema("trainer_options")) if (name := path.split(".")[-1]) in _FORMER},
    "deepspeed_zero_stage": "distributed.deepspeed_zero_optimization.stage",
    "enable_grad_norm_clip": "utils.grad_norm_clip",
    "propagate_cast_ops_allow": "graph_transformer.propagate_cast_ops_config.allow",
    "propagate_cast_ops_level": "graph_transformer.propagate_cast_ops_config.level",
    "use_memory_efficient_gradient": "utils.memory_efficient_gradient",
    "use_mixed_precision": "mixed_precision.enabled",
}
_OF_ONE_PROCESS = {"world_rank": 0, "world_size": 1, "data_parallel_size": 1}


def former_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings, by former names or by the dotted paths of options, as a dict of options.

    Omits ranks and sizes of a single process, the former defaults: a launcher may have started several processes.
    """
    options: dict[str, Any] = {}
    for name, value in settings.items():
        if name not in _OF_ONE_PROCESS or value != _OF_ONE_PROCESS[name]:
            *sections, key = _PLACES.get(name, name).split(".")
            section = options
            for part in sections:
                section = section.setdefault(part, {})
            section[key] = value
    return options


def options_of(
    parameters: TrainingParameters,
    model: OnnxModel,
    device: str,
    provider_options: Mapping[str, Any],
    sess_options: SessionOptions | None,
) -> dict[str, Any]:
    """Returns the parameters as options of a trainer, which reject unsupported settings."""
    if parameters.loss_scale < 0:
        raise ValueError(f"loss_scale must be at least 0, but {parameters.loss_scale} was given")
    settings: dict[str, Any] = {name: getattr(parameters, name) for name in _PLACES}
    if parameters.use_mixed_precision:
        settings["mixed_precision.loss_scaler"] = LossScaler(parameters.loss_scale or 1.0)
    if parameters.use_fp16_moments:
        settings["utils.moments"] = "bfloat16"
    if device:
        settings["device.id"] = device
    settings["utils.frozen_weights"] = frozen_of(parameters, model)
    return former_options({**settings, "provider_options": provider_options, "session_options": sess_options})


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


def state_to_begin_with(parameters: TrainingParameters, trainer: ORTTrainer) -> dict[str, Any]:
    """Returns the state of a new trainer with the optimizer's initial state of the parameters.

    Raises:
        ValueError: If a name in it is unknown, or there is no optimizer.
    """
    if not parameters.training_optimizer_name:
        raise ValueError("set_optimizer_initial_state has no effect without training_optimizer_name: leave it out")
    state = trainer.state_dict()
    optimizer = state["optimizer"]
    for name, entries in parameters.optimizer_initial_state.items():
        unknown = sorted(set(entries) - set(optimizer.get(name, ())))
        if name not in optimizer or unknown:
            raise ValueError(
                f"set_optimizer_initial_state has {name!r}: {sorted(entries)}, but {trainer.optim_config.name} has "
                f"state for { {weight: sorted(keys) for weight, keys in optimizer.items()} }"
            )
        optimizer[name].update(entries)
    return state


def feed_of(feed: Any) -> Mapping[str, Any]:
    """Returns the inputs of a run after checking that they are a dict."""
    if not isinstance(feed, Mapping):
        raise TypeError(f"the inputs must be a dict of names and values, but a {type(feed).__name__} was given")
    return feed


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
