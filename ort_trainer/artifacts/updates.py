"""Collects how the trainer updates each parameter, and the state of its optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..optim import OptimizerConfig
from ..optim.followed_update import TORCH_NAMES
from ..optim.rule import RULES, Rule
from ..optim.torch_optimizer import TorchOptimizerConfig, equivalent_rule
from ..optim.update_writer import ParameterUpdate
from ..state.state import Array, State, widened
from ..train.loop import TrainingLoop
from .optimizer_model import Updated


def optimizer_name(config: OptimizerConfig) -> str:
    """Returns the name of the rule that updates the weights.

    Raises:
        ValueError: If no rule matches the PyTorch optimizer.
    """
    return _translated(config)[0].name if isinstance(config, TorchOptimizerConfig) else config.name


def _translated(config: TorchOptimizerConfig) -> tuple[Rule, Callable[[Mapping[str, Any]], dict[str, Any]]]:
    """Returns the rule equivalent to a PyTorch optimizer, and a function that translates hyper-parameters."""
    try:
        name, translate = equivalent_rule(config.optimizer)
        return RULES[name], translate
    except ValueError as error:
        raise ValueError(
            f"the update can't be written as an optimizer model: {error}. Use a config of ort_trainer.optim"
        ) from None


def parameter_updates(loop: TrainingLoop, state: State, names: Iterable[str]) -> dict[str, Updated]:
    """Returns how the trainer updates each parameter: its rule, settings, weight and optimizer state.

    Args:
        loop: The training loop, prepared.
        state: Its state.
        names: Parameters that have a gradient.

    Raises:
        ValueError: If no rule matches the optimizer.
    """
    executor, config = loop.executor, loop.config
    assert executor is not None
    optimizer = loop.optimizer
    max_value = loop.options.utils.max_grad_value or math.inf
    trained_names, updates, state_by_parameter = set(names), {}, state.by_parameter()
    rule, translate = _translated(config) if isinstance(config, TorchOptimizerConfig) else (optimizer.rule, None)
    for index, hyper, limit, group_parameters in optimizer.groups:
        if translate is not None:
            hyper = translate(hyper)
        elif config.is_live:
            hyper = config.hyper_parameters(index)
        update = ParameterUpdate(rule, index, hyper, limit, max_value)
        for name in trained_names.intersection(group_parameters):
            weight = executor.parameters[name]
            if isinstance(config, TorchOptimizerConfig):
                slots, count = _torch_state(config, name, update, weight)
            else:
                slots = {slot: widened(state_by_parameter[name][slot]) for slot in update.slots}
                count = int(optimizer.counts.get(name, 0))
            updates[name] = Updated(update, weight, slots, count if update.counts else None)
    return {name: updates[name] for name in names if name in updates}


def _torch_state(
    config: TorchOptimizerConfig, name: str, update: ParameterUpdate, weight: torch.Tensor
) -> tuple[dict[str, Array], int]:
    """Returns the state tensors of a PyTorch optimizer for a parameter, and the number of updates done."""
    state: Mapping[str, Any] = config.optimizer.state.get(config.parameters[name], {})
    slots = {}
    for slot in update.slots:
        tensor = state.get(TORCH_NAMES[slot])
        slots[slot] = (torch.zeros_like(weight) if tensor is None else tensor).numpy(force=True)
    # SGD keeps no count, but has a momentum buffer after its first update.
    return slots, int(state.get("step", state.get("momentum_buffer") is not None))
