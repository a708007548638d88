"""Uses the user's model and PyTorch for an export, and restores them: what a forward pass reads, changes and keeps."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import nn

from ...core.errors import ExportError

__all__ = [
    "BORROWED",
    "assignments_as_updates",
    "borrowed",
    "quiet",
]

BORROWED = threading.RLock()
"""Held while a model's tensors are read or it is exported: an export changes it, and PyTorch, for a while."""

_CONTAINERS = (dict, OrderedDict, defaultdict, list, set, deque)  # OrderedDict: hooks of modules
# They log every step, print whole graphs when an export fails, and warn about irrelevant packages.
_LOGGERS = ("torch", "torch.export", "torch.fx", "torch.onnx", "torch._functorch", "onnxscript", "onnx_ir")
_WARNINGS = (
    # Modules such as LSTM keep lists of their weights, which an export reassigns.
    "The tensor attributes? .*_flat_weights.* (was|were) assigned during export",
    ".*isinstance\\(treespec, LeafSpec\\).*",
    # The conversion raises its own error afterwards.
    "Converting a tensor with requires_grad=True to a scalar.*",
)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Mutes the libraries while the block runs; errors still raise."""
    loggers = [(logging.getLogger(name), logging.getLogger(name).level) for name in _LOGGERS]
    try:
        for logger, _ in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            for message in _WARNINGS:
                warnings.filterwarnings("ignore", message=message)
            yield
    finally:
        for logger, level in loggers:
            logger.setLevel(level)


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


@contextlib.contextmanager
def assignments_as_updates(model: nn.Module) -> Iterator[None]:
    """Turns ``self.buffer = value`` in forward() into an in-place update, because the exporter drops assignments.

    Args:
        model: The model, whose forward() runs in the context.

    Raises:
        ExportError: If a buffer is assigned a value of another shape or dtype.
    """
    before = [(m, key, value) for m in model.modules() for key, value in m._buffers.items() if value is not None]
    assigned: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor | None]] = []
    try:
        yield
    finally:
        for owner, key, old in before:
            if owner._buffers[key] is not old:
                assigned.append((owner, key, old, owner._buffers[key]))
                owner._buffers[key] = old
    for owner, key, old, new in assigned:
        if new is None or new.shape != old.shape or new.dtype != old.dtype:
            raise ExportError(
                f"forward() of {type(owner).__name__} assigns a value of another shape or dtype to its buffer {key!r}, "
                "which a graph can't do: keep the buffer's shape and dtype"
            )
    # A value may be another of these buffers, so all are copied before any is changed.
    values = [new.detach().clone() for _, _, _, new in assigned if new is not None]
    for (_, _, old, _), value in zip(assigned, values, strict=True):
        old.copy_(value)
