"""Uses the user's model for a moment, and leaves it as it was found."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["borrowed"]


@contextlib.contextmanager
def borrowed(
    module: nn.Module, trainable: Collection[str], training: bool, modes: Mapping[nn.Module, bool] | None = None
) -> Iterator[None]:
    """Puts a module into training or evaluation mode with only some parameters trainable, and puts everything back.

    A forward pass may do to its modules what it likes: afterwards each has the attributes that it had, the lists, dicts
    and sets among them their content, and the buffers their values.

    Args:
        module: The module.
        trainable: Names of the parameters that shall require grad, as ``module.named_parameters()`` has them: of a tied
            parameter the first.
        training: The mode.
        modes: Submodules with a separate mode.
    """
    attributes = [(part.__dict__, _kept(part.__dict__)) for part in module.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    flags = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    try:
        module.train(training)
        for part, mode in (modes or {}).items():
            part.training = mode
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in trainable)
        yield
    finally:
        for now, before in attributes:
            _put_back(now, before)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)


def _kept(attributes: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns every attribute with its content, where it has one that can change."""
    return {
        key: (value, value.copy() if type(value) in (dict, list, set, deque) else None)
        for key, value in attributes.items()
    }


def _put_back(attributes: dict[str, Any], before: Mapping[str, tuple[Any, Any]]) -> None:
    for key in attributes.keys() - before.keys():
        del attributes[key]
    for key, (value, content) in before.items():
        attributes[key] = value
        if content is None or _is_same(value, content):
            continue
        value.clear()
        if isinstance(value, (dict, set)):
            value.update(content)
        else:
            value.extend(content)


def _is_same(value: Any, content: Any) -> bool:
    """Returns whether two containers hold the same objects; tensors have no other equality."""
    if isinstance(value, dict) and list(map(id, value.values())) != list(map(id, content.values())):
        return False
    return list(map(id, value)) == list(map(id, content))
