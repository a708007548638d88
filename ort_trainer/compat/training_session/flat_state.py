"""The flat state dict of the older functions: weights by name, with keys such as ``Moment_1_<weight>`` beside them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ...core.errors import MissingStateWarning
from ...core.optimizer_keys import SHARED, STEP, UPDATE_COUNT
from ...trainer import ORTTrainer


def flat_state_dict(trainer: ORTTrainer, include_optimizer_state: bool) -> dict[str, torch.Tensor]:
    """Returns all weights and buffers, and the optimizer's state, in one flat dict of tensors on the CPU.

    Args:
        trainer: The trainer.
        include_optimizer_state: Whether to add ``Moment_1_<weight>``, ``Moment_2_<weight>``, ``Update_Count_<weight>``
            (Adam) and ``Step`` (LAMB).

    Returns:
        The dict; empty, with a warning, before the first step.
    """
    if trainer.session is None:
        warnings.warn(
            "there is no state yet: call train_step or eval_step at least once first", UserWarning, stacklevel=3
        )
        return {}
    flat = trainer.state_dict(pytorch_format=True)
    if not include_optimizer_state:
        return flat
    for name, entries in trainer.state_dict()["optimizer"].items():
        for key, value in entries.items():
            flat[key if name == SHARED else f"{key}_{name}"] = torch.from_numpy(value)
    return flat


def load_flat_state_dict(trainer: ORTTrainer, state_dict: Mapping[str, Any], strict: bool) -> None:
    """Restores what :func:`flat_state_dict` returned; works before the first step, too.

    The trainer's counters are unchanged, because the flat dict has none.

    Args:
        trainer: The trainer.
        state_dict: The flat dict, or the nested one of ``ORTTrainer.state_dict``.
        strict: Whether names must match exactly.

    Raises:
        RuntimeError: If names differ and ``strict`` is True.
        TypeError, ValueError: If a value has the wrong type or is invalid. Nothing has changed then.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a dict, but a {type(state_dict).__name__} was given")
    if any(isinstance(value, Mapping) for value in state_dict.values()):
        trainer.load_state_dict(state_dict, strict)
        return
    rule = trainer.optim_config.rule
    kept = (*rule.slots, UPDATE_COUNT)
    weights: dict[str, Any] = {}
    optimizer: dict[str, dict[str, Any]] = {}
    for name, value in state_dict.items():
        # A weight's name may start like a moment's; but a moment's weight is in the dict, too.
        key = next((k for k in kept if name.startswith(f"{k}_") and name[len(k) + 1 :] in state_dict), None)
        if key is not None:
            optimizer.setdefault(name[len(key) + 1 :], {})[key] = value
        elif name == STEP and rule.shares_count:
            optimizer[SHARED] = {STEP: value}
        else:
            weights[name] = value
    info = trainer.train_step_info
    nested: dict[str, Any] = {
        "model": {"full_precision": weights},
        "trainer_options": {"optimizer_name": trainer.optim_config.name},
        "train_step_info": {"step": info.step, "optimization_step": info.optimization_step},
    }
    if optimizer:
        nested["optimizer"] = optimizer
    with warnings.catch_warnings():
        # The caller chose to save without the optimizer's state, the only part that may be missing here.
        warnings.simplefilter("ignore", MissingStateWarning)
        trainer.load_state_dict(nested, strict)
