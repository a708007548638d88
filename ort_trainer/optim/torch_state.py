"""The state of a PyTorch optimizer for checkpoints, by parameter names instead of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..core.errors import shown
from .torch_optimizer import TorchOptimizerConfig

__all__ = ["collect", "restore"]


def collect(config: TorchOptimizerConfig, copy: bool = True) -> dict[str, Any]:
    """Returns the state: ``state`` by parameter name, and ``param_groups`` with names under ``params``.

    Args:
        config: The optimizer's config.
        copy: Whether to copy the tensors; if False, they are the optimizer's own.
    """
    names, found = _names(config), config.optimizer.state_dict()
    groups = [{**group, "params": own} for group, own in zip(found["param_groups"], config.names, strict=True)]
    return {
        "state": {names[number]: _plain(values, copy) for number, values in found["state"].items()},
        "param_groups": [_plain({k: v for k, v in g.items() if k != "param_names"}, copy) for g in groups],
    }


def restore(config: TorchOptimizerConfig, given: Mapping[str, Any]) -> None:
    """Loads a state into the optimizer.

    Args:
        config: The optimizer's config.
        given: A state from :func:`collect`.

    Raises:
        RuntimeError: If the state belongs to other parameter groups.
        ValueError: If the optimizer refuses the state; its own is then unchanged.
    """
    where = "state_dict[torch_optimizer]"
    groups, states = given.get("param_groups"), given.get("state")
    if not isinstance(groups, list) or not isinstance(states, Mapping):
        raise ValueError(f"{where} must have 'state', a dict, and 'param_groups', a list, but it is {shown(given)}")
    if [list(group["params"]) for group in groups] != config.names:
        raise RuntimeError(f"{where} has other parameter groups than the trainer's {type(config.optimizer).__name__}")
    before = config.optimizer.state_dict()
    numbers = {name: number for number, name in _names(config).items()}
    unknown = [name for name in states if name not in numbers]
    if unknown:
        raise RuntimeError(f"Unexpected keys: {unknown} in {where}[state]")
    new_groups = [
        {key: tuple(value) if isinstance(own.get(key), tuple) else value for key, value in group.items()}
        | {key: own[key] for key in ("params", "param_names") if key in own}
        for group, own in zip(groups, before["param_groups"], strict=True)
    ]
    try:
        config.optimizer.load_state_dict(
            {
                "state": {numbers[name]: _plain(values, True) for name, values in states.items()},
                "param_groups": new_groups,
            }
        )
    except Exception as error:
        config.optimizer.load_state_dict(before)
        raise ValueError(f"{where} does not fit {type(config.optimizer).__name__}: {error!r}") from error


def _names(config: TorchOptimizerConfig) -> dict[int, str]:
    """Returns parameter names by their numbers in PyTorch's state dicts."""
    return dict(enumerate(name for names in config.names for name in names))


def _plain(value: Any, copy: bool) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return value.clone() if copy else value
    if isinstance(value, Mapping):
        return {str(key): _plain(entry, copy) for key, entry in value.items()}
    return [_plain(entry, copy) for entry in value] if isinstance(value, (list, tuple)) else value
