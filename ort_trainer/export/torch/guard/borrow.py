"""Uses the user's model temporarily, and restores it."""

from __future__ import annotations

import contextlib
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import nn

from ....core.errors import ExportError

__all__ = ["borrowed"]

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)  # OrderedDict: hooks of modules


@contextlib.contextmanager
def borrowed(
    module: nn.Module, trainable: Collection[str], training: bool, modes: Mapping[nn.Module, bool] | None = None
) -> Iterator[None]:
    """Puts a module into training or evaluation mode with only some parameters trainable, and restores it afterwards.

    A forward pass may change its modules: afterwards the attributes, the contents of lists, dicts and sets among them,
    and the values of buffers are restored. So are the random generators of Python and NumPy.

    Args:
        module: The module.
        trainable: Names of the parameters that are to require grad, as in ``module.named_parameters()``: for a tied
            parameter, its first name.
        training: The mode.
        modes: Submodules with a separate mode.

    Raises:
        ExportError: If a forward pass has changed the size of a buffer.
    """
    attributes = [(part.__dict__, _kept(part.__dict__)) for part in module.modules()]
    buffers = [(name, buffer, buffer.detach().clone()) for name, buffer in module.named_buffers()]
    flags = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    generators = random.getstate(), numpy.random.get_state()
    try:
        module.train(training)
        for part, mode in (modes or {}).items():
            part.training = mode
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in trainable)
        yield
    finally:
        random.setstate(generators[0])
        numpy.random.set_state(generators[1])
        for now, before in attributes:
            _put_back(now, before)
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        resized = [name for name, buffer, value in buffers if buffer.shape != value.shape]
        with torch.no_grad():
            for name, buffer, value in buffers:
                if name in resized:
                    buffer.resize_(value.shape)
                buffer.copy_(value)
    if resized:
        raise ExportError(
            f"forward() changes the size of the buffers {resized}, which a graph can't do: if only its first call does "
            "so, as with observers of torch.ao.quantization, call the model once before making the trainer"
        )


def _kept(attributes: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns every attribute, with a copy of its content if it is a container."""
    return {key: (value, value.copy() if type(value) in _CONTAINERS else None) for key, value in attributes.items()}


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
    """Returns whether two containers hold the same objects; == of tensors compares elements, so identity is used."""
    if isinstance(value, dict) and list(map(id, value.values())) != list(map(id, content.values())):
        return False
    return list(map(id, value)) == list(map(id, content))
