"""Methods of a module beside ``forward``: as graphs, or with a warning that PyTorch runs them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..core.errors import shown
from .fallback import Fallback, own_methods


class Method(nn.Module):
    """A method of a module, as a module whose ``forward`` it is.

    Args:
        module: The module.
        name: The method's name.

    Attributes:
        module: As given.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        self.module, self._name = module, name
        self.training = module.training

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]
        """The method."""
        method: Callable[..., Any] = getattr(self.module, self._name)
        return method

    def _get_name(self) -> str:
        return f"{type(self.module).__name__}.{self._name}"


def checked_methods(module: nn.Module, names: Iterable[str]) -> list[str]:
    """Returns names of methods, after checking them.

    Args:
        module: The module.
        names: As given.

    Raises:
        TypeError: If it is a string instead of a list of them.
        ValueError: If there is no such method, or it is one that all modules have.
    """
    if isinstance(names, str):
        raise TypeError(f"methods must be a list of names, but is the string {names!r}: write [{names!r}]")
    names = [*names]
    for name in names:
        if name == "forward":
            raise ValueError("methods has 'forward', which is a graph in any case: leave it out")
        if not callable(getattr(module, str(name), None)) or hasattr(nn.Module, str(name)):
            raise ValueError(f"methods has {shown(name)}, but {type(module).__name__} has {own_methods(module)}")
    return names


# Wrappers whose forward may never be called, and what says so.
_expected: weakref.WeakKeyDictionary[nn.Module, Fallback] = weakref.WeakKeyDictionary()


def expect_calls(module: nn.Module, fallback: Fallback) -> None:
    """Has an optimizer's step warn if it updates parameters of a wrapper whose ``forward`` was never called.

    Args:
        module: The wrapper.
        fallback: Its fallback.
    """
    _expected[module] = fallback
    _look_at_steps()


@functools.cache
def _look_at_steps() -> None:
    register_optimizer_step_pre_hook(_look)  # of all optimizers


def _look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if all(not group.get("lr", 1.0) for group in optimizer.param_groups):
        return  # to make its state, as torch.distributed.checkpoint does before a run
    if not _expected:
        return
    updated = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for module, fallback in list(_expected.items()):
        if fallback.called:
            del _expected[module]
        elif any(parameter.grad is not None and parameter in updated for parameter in module.parameters()):
            del _expected[module]
            fallback.missed()
