"""Reads and replaces parameters and gradients of a training loop, by the names that the model gives them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..core.errors import shown
from ..engine.ownership import owned_dtype
from .batch import to_tensor

if TYPE_CHECKING:
    from .loop import TrainingLoop


def get_parameter(loop: TrainingLoop, name: str) -> torch.Tensor:
    """Returns a copy of a parameter on the CPU; see ``ORTTrainer.get_parameter``."""
    return loop.started().parameters[_canonical(loop, name)].cpu().clone()


def set_parameter(loop: TrainingLoop, name: str, value: Any) -> None:
    """Replaces the value of a parameter; see ``ORTTrainer.set_parameter``."""
    canonical = _canonical(loop, name)
    current = loop.started().parameters[canonical]
    current.copy_(_fitting(current, name, value))
    loop.source.memory.publish([canonical])


def get_gradient(loop: TrainingLoop, name: str) -> torch.Tensor | None:
    """Returns a copy of a gradient accumulated in the window so far; see ``ORTTrainer.get_gradient``."""
    canonical, executor = _canonical(loop, name), loop.started()
    if loop.window.micro_batches:
        gradient = executor.gradients.present().get(canonical)
        return None if gradient is None else gradient.cpu() / loop.window.divisor
    used = executor.gradients.used().get(canonical)
    return None if used is None else used.cpu().clone()


def set_gradient(loop: TrainingLoop, name: str, value: Any) -> None:
    """Replaces a gradient accumulated in the window so far; see ``ORTTrainer.set_gradient``."""
    canonical = _canonical(loop, name)
    if canonical not in loop.source.trainable:
        raise ValueError(f"{name!r} is not trained, so it has no gradient")
    executor = loop.started()
    if not loop.window.micro_batches:
        raise RuntimeError(
            "there are no gradients now: call set_gradient() inside an accumulation window, after its first "
            "micro-batch and before the update"
        )
    checked = _fitting(executor.parameters[canonical], name, value)
    executor.gradients.restore({**executor.gradients.present(), canonical: checked * loop.window.divisor})


def _canonical(loop: TrainingLoop, name: str) -> str:
    """Returns the canonical (first) name of a parameter."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a parameter must be a str, but {shown(name)} ({type(name).__name__}) was given")
    canonical, parameters = loop.source.canonical, loop.source.parameters
    if canonical.get(name) not in parameters:
        names = sorted(alias for alias, first in canonical.items() if first in parameters)
        raise ValueError(f"{name!r} is not a parameter of the model, which has {names}")
    return canonical[name]


def _fitting(current: torch.Tensor, name: str, value: Any) -> torch.Tensor:
    """Checks the shape and dtype of a value against a parameter's, and moves it to the parameter's device."""
    replacement = to_tensor(name, value)
    replacement = replacement.to(owned_dtype(replacement.dtype))
    if replacement.shape != current.shape or replacement.dtype != current.dtype:
        raise ValueError(
            f"{name!r} has shape {list(current.shape)} and dtype {current.dtype}, but {list(replacement.shape)} and "
            f"{replacement.dtype} were given"
        )
    return replacement.to(current.device)
