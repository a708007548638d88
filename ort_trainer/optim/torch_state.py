"""The state of an optimizer of PyTorch, by parameter names instead of numbers, as a checkpoint keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..errors import shown
from .torch_optimizer import TorchOptimizerConfig

__all__ = ["collect", "restore"]


def collect(config: TorchOptimizerConfig, copy: bool = True) -> dict[str, Any]:
    """Returns the state: ``state`` by parameter name, and ``param_groups`` with names under ``params``.

    Args:
        config: Of the optimizer.
        copy: Whether tensors are copies; if not, they are the optimizer's.
    """
    names, found = _names(config), config.optimizer.state_dict()
    groups = [{**group, "params": own} for group, own in zip(found["param_groups"], config.names, strict=True)]
    return {
        "state": {names[number]: _plain(values, copy) for number, values in found["state"].items()},
        "param_groups": [_plain({k: v for k, v in g.items() if k != "param_names"}, copy) for g in groups],
    }


def restore(config: TorchOptimizerConfig, given: Mapping[str, Any]) -> None:
    """Gives the optimizer a state.

    Args:
        config: Of the optimizer.
        given: What :func:`collect` returned.

    Raises:
        RuntimeError: If it is that of other parameter groups.
        ValueError: If the optimizer refuses it. It is as it was then.
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
    """Returns the number that a state dict of PyTorch has for each parameter, with its name."""
    return dict(enumerate(name for names in config.names for name in names))


def _plain(value: Any, copy: bool) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        return value.clone() if copy else value
    if isinstance(value, Mapping):
        return {str(key): _plain(entry, copy) for key, entry in value.items()}
    return [_plain(entry, copy) for entry in value] if isinstance(value, (list, tuple)) else value
