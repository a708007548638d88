"""What must be equal in all processes that train a model together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..core.optimizer_keys import CONFIGS
from ..export.model import ModelSource
from ..optim import OptimizerConfig
from ..options import ORTTrainerOptions
from .step_graphs import StepGraphs

# Sections of the options, and keys of `distributed`, that may differ between processes.
_OF_ONE_PROCESS = ("device", "debug", "session_options", "provider_options")
_RANKS = ("world_rank", "local_rank")


def traits_of(
    source: ModelSource, config: OptimizerConfig, options: ORTTrainerOptions, graphs: StepGraphs
) -> dict[str, Any]:
    """Returns the settings that must be equal in all processes, as JSON values by their names in messages."""
    tensors = {**source.parameters, **source.buffers}
    aliases = source.names_of_trainable()
    settings: dict[str, Any] = {**options.to_dict()}
    shared = {name: value for name, value in settings.items() if name not in _OF_ONE_PROCESS}
    shared["distributed"] = {name: value for name, value in shared["distributed"].items() if name not in _RANKS}
    described = bool(graphs.output_names)  # otherwise the description is derived from the first batch
    return {
        "the parameters and buffers": {
            name: f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}" for name, value in tensors.items()
        },
        "the parameters that are trained": dict.fromkeys(aliases, "trained"),
        "the optimizer": CONFIGS.get(config.name, config.name),
        "the learning rates": config.learning_rates,
        "the hyper-parameters": {
            name: _json(config.hyper_parameters(config.group_of(*names))) for name, names in aliases.items()
        },
        "the options": _json(shared),
        "the inputs of the model": graphs.description.input_names if described else None,
        "the outputs of the model": list(graphs.output_names) or None,
    }


def _json(value: Any) -> Any:
    """Converts a value to JSON types; an object becomes the name of its class or function."""
    if isinstance(value, Mapping):
        return {str(key): _json(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(inner) for inner in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return getattr(value, "__qualname__", type(value).__qualname__)
