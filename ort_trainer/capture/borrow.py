"""Borrows the user's model and PyTorch's settings for an export, and restores them afterwards."""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Collection, Iterator, Mapping
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ..core.errors import ExportError

BORROWED = threading.RLock()
"""Held while a model's tensors are read or it is exported: an export changes it, and PyTorch, for a while."""

# These libraries log every step, print whole graphs when an export fails, and warn about irrelevant packages.
_LOGGERS = ("torch", "torch.export", "torch.fx", "torch.onnx", "torch._functorch", "onnxscript", "onnx_ir")
_WARNINGS = (
    # Modules such as LSTM keep lists of their weights, which an export reassigns.
    "The tensor attributes? .*_flat_weights.* (was|were) assigned during export",
    ".*isinstance\\(treespec, LeafSpec\\).*",
    # The export finds out whether gradients go there.
    "A model attribute .* requires gradient.? but it's not properly registered",
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

    The values of buffers are restored as well. A :class:`~.outside.recorder.Recorder` restores everything else that a
    forward pass changes. The caller's hooks of saved tensors, such as those of ``torch.utils.checkpoint``, which counts
    tensors, do not see what is saved meanwhile.

    Args:
        module: The module.
        trainable: Names of the parameters that are to require grad, as in ``module.named_parameters()``: for a tied
            parameter, its first name.
        training: The mode.
        modes: Modules that keep modes of their own.

    Raises:
        ExportError: If a forward pass has changed the size of a buffer.
    """
    modes_before = [(part, part.training) for part in module.modules()]
    buffers = [(name, buffer, buffer.detach().clone()) for name, buffer in module.named_buffers()]
    flags = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    memory = [(parameter, parameter.data) for parameter in module.parameters() if type(parameter) is nn.Parameter]
    try:
        module.train(training)
        for part, mode in (modes or {}).items():
            part.training = mode
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in trainable)
        with saved_tensors_hooks(_as_it_is, _as_it_is), _without_hooks_of_leaves():
            yield
    finally:
        for part, mode in modes_before:
            part.training = mode
        for parameter, flag in flags:
            parameter.requires_grad_(flag)
        for parameter, data in memory:
            if parameter.data_ptr() != data.data_ptr():  # of a forward pass that assigns to .data
                parameter.data = data
        resized = [name for name, buffer, value in buffers if buffer.shape != value.shape]
        with torch.no_grad():
            for name, buffer, value in buffers:
                if name in resized:
                    buffer.resize_(value.shape)
                # Even a copy of equal values would count as a change for graphs of autograd that have saved the buffer.
                if not buffer.is_meta and not torch.equal(buffer, value):
                    buffer.copy_(value)
    if resized:
        resized = [name.removeprefix("model.") for name in resized]
        raise ExportError(
            f"forward() changes the size of the buffers {resized}, which a graph can't do: if only its first call does "
            "so, as with observers of torch.ao.quantization, call the model once before making the trainer"
        )


@contextlib.contextmanager
def _without_hooks_of_leaves() -> Iterator[None]:
    """Refuses hooks that a forward pass registers on parameters or arguments, where they would stay."""
    with contextlib.ExitStack() as stack:
        for name in ("register_hook", "register_post_accumulate_grad_hook"):
            register: Any = getattr(torch.Tensor, name)

            def watched(tensor: torch.Tensor, hook: Any, register: Any = register) -> Any:
                if tensor.is_leaf:
                    raise ExportError(
                        "forward() registers a hook on a parameter or an argument, which would stay there, and get "
                        "gradients from elsewhere, too: register it before the call"
                    )
                return register(tensor, hook)

            stack.enter_context(mock.patch.object(torch.Tensor, name, watched))
        yield


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class AssignedBuffers:
    """The buffers of a module that its forward() replaces by others, instead of changing them in place.

    An exporter drops such assignments, so they become changes in place. From the second run on, the model reads a copy
    of each of them, so that the backward pass finds the value from before.

    Args:
        module: The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._assigned: set[tuple[nn.Module, str]] = set()
        self._are_copied: set[tuple[nn.Module, str]] = set()

    @property
    def are_new(self) -> bool:
        """Whether the last run has assigned a buffer that it has not read as a copy."""
        return not self._assigned <= self._are_copied

    @contextlib.contextmanager
    def as_updates(self) -> Iterator[None]:
        """Turns ``self.buffer = value`` in the context into an update in place.

        Raises:
            ExportError: If a buffer is assigned a value of another shape or dtype.
        """
        buffers = [
            (part, key, value)
            for part in self._module.modules()
            for key, value in part._buffers.items()
            if value is not None
        ]
        self._are_copied = set(self._assigned)
        read = {(part, key): value.clone() if (part, key) in self._assigned else value for part, key, value in buffers}
        assigned: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor | None]] = []
        for (part, key), value in read.items():
            part._buffers[key] = value
        try:
            yield
        finally:
            for part, key, value in buffers:
                if part._buffers.get(key) is not read[part, key]:
                    assigned.append((part, key, value, part._buffers.get(key)))
                part._buffers[key] = value
        for part, key, old, new in assigned:
            self._assigned.add((part, key))
            if new is None or new.shape != old.shape or new.dtype != old.dtype:
                raise ExportError(
                    f"forward() of {type(part).__name__} assigns a value of another shape or dtype to its buffer "
                    f"{key!r}, which a graph can't do: keep the buffer's shape and dtype"
                )
        # A value may be another of these buffers, so all are copied before any is changed.
        values = [new.detach().clone() for _, _, _, new in assigned if new is not None]
        for (_, _, old, _), value in zip(assigned, values, strict=True):
            old.copy_(value)


@contextlib.contextmanager
def fast_path_disabled() -> Iterator[None]:
    """Has PyTorch's Transformer layers compute as in training when they evaluate.

    Their fast path leaves out padding, whose amount it reads from the values of a mask; and below what watches a run,
    it does not see autocast.
    """
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
