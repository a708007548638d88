"""Reads and replaces individual parameters and gradients of a training loop."""

from __future__ import annotations

from typing import Any

import torch

from ..core.errors import shown
from ..engine import StepSession
from ..engine.ownership import owned_dtype
from ..export import BORROWED
from .batch import to_tensor
from .loop import TrainingLoop

__all__ = ["get_gradient", "get_parameter", "set_gradient", "set_parameter"]


def get_parameter(loop: TrainingLoop, name: str) -> torch.Tensor:
    """Returns a copy of a parameter on the CPU; see ``ORTTrainer.get_parameter``."""
    canonical = _canonical(loop, name)
    if loop.session is not None:
        return loop.session.parameters[canonical].cpu().clone()
    waiting = {} if loop.pending is None else loop.pending.tensors
    with BORROWED:
        value = waiting.get(canonical, loop.source.parameters[canonical]).detach()
        return value.to("cpu", owned_dtype(value.dtype), copy=True)


def set_parameter(loop: TrainingLoop, name: str, value: Any) -> None:
    """Replaces the value of a parameter; see ``ORTTrainer.set_parameter``."""
    canonical = _canonical(loop, name)
    current = _session(loop, "set_parameter").parameters[canonical]
    current.copy_(_like(current, name, value))
    loop.source.memory.publish([canonical])


def get_gradient(loop: TrainingLoop, name: str) -> torch.Tensor | None:
    """Returns a copy of a gradient accumulated in the window so far; see ``ORTTrainer.get_gradient``."""
    canonical = _canonical(loop, name)
    session = loop.session
    if session is None:
        return None
    if loop.window.micro_batches:
        found = session.present_gradients().get(canonical)
        return None if found is None else found.cpu() / loop.window.divisor
    used = session.used_gradients().get(canonical)
    return None if used is None else used.cpu().clone()


def set_gradient(loop: TrainingLoop, name: str, value: Any) -> None:
    """Replaces a gradient accumulated in the window so far; see ``ORTTrainer.set_gradient``."""
    canonical = _canonical(loop, name)
    if canonical not in loop.source.trainable:
        raise ValueError(f"{name!r} is not trained, so it has no gradient")
    session = _session(loop, "set_gradient")
    if not loop.window.micro_batches:
        raise RuntimeError(
            "there are no gradients now: call set_gradient() inside an accumulation window, after its first "
            "micro-batch and before the update"
        )
    checked = _like(session.parameters[canonical], name, value)
    session.restore_gradients({**session.present_gradients(), canonical: checked * loop.window.divisor})


def _canonical(loop: TrainingLoop, name: str) -> str:
    """Returns the canonical (first) name of a parameter."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a parameter must be a str, but {shown(name)} ({type(name).__name__}) was given")
    canonical, parameters = loop.source.canonical, loop.source.parameters
    if canonical.get(name) not in parameters:
        names = sorted(own for own, first in canonical.items() if first in parameters)
        raise ValueError(f"{name!r} is not a parameter of the model, which has {names}")
    return canonical[name]


def _session(loop: TrainingLoop, method: str) -> StepSession:
    if loop.session is None:
        raise RuntimeError(
            f"training has not started: call prepare(), train_step() or eval_step() before {method}(), or change the "
            "model itself"
        )
    return loop.session


def _like(current: torch.Tensor, name: str, value: Any) -> torch.Tensor:
    """Checks the shape and dtype of a value against a parameter's, and moves it to the parameter's device."""
    given = to_tensor(name, value)
    given = given.to(owned_dtype(given.dtype))
    if given.shape != current.shape or given.dtype != current.dtype:
        raise ValueError(
            f"{name!r} has shape {list(current.shape)} and dtype {current.dtype}, but {list(given.shape)} and "
            f"{given.dtype} were given"
        )
    return given.to(current.device)
