"""Uses the user's model and PyTorch for an export, and restores them: what a forward pass reads, changes and keeps."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import warnings
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import nn

from ...core.errors import ExportError

__all__ = [
    "BORROWED",
    "LeftAttributes",
    "assignments_as_updates",
    "borrowed",
    "modes_read",
    "quiet",
    "refuse_kept_tensors",
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
_NOTHING = object()


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
def modes_read() -> Iterator[dict[int, nn.Module]]:
    """Yields the modules, by their ``id``, whose attribute ``training`` is read inside the context."""
    found: dict[int, nn.Module] = {}

    def read(module: nn.Module) -> bool:
        try:
            mode: bool = vars(module)["training"]
        except KeyError:  # a TorchScript module; its own lookup comes next
            raise AttributeError("training") from None
        found[id(module)] = module
        return mode

    def write(module: nn.Module, mode: bool) -> None:
        vars(module)["training"] = mode

    nn.Module.training = property(read, write)  # type: ignore[assignment]
    try:
        yield found
    finally:
        del nn.Module.training


class LeftAttributes(list[tuple[nn.Module, str, Any]]):
    """Modules, names of attributes to which a run has assigned plain tensors, and the attributes' former values.

    A subclass, because torch.export empties plain lists that it finds in modules.
    """


@contextlib.contextmanager
def assignments_as_updates(model: nn.Module, left: LeftAttributes) -> Iterator[None]:
    """Turns ``self.buffer = value`` in forward() into an in-place update, because the exporter drops assignments.

    Args:
        model: The model, whose forward() runs in the context.
        left: Receives the assignments of plain tensors to attributes.

    Raises:
        ExportError: If a buffer is assigned a value of another shape or dtype.
    """
    before = [(m, key, value) for m in model.modules() for key, value in m._buffers.items() if value is not None]
    existing = {(m, key): value for m in model.modules() for key, value in vars(m).items()}
    assigned: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor | None]] = []
    try:
        yield
    finally:
        for owner, key, old in before:
            if owner._buffers[key] is not old:
                assigned.append((owner, key, old, owner._buffers[key]))
                owner._buffers[key] = old
    parts = [(part, key, value) for part in model.modules() for key, value in vars(part).items()]
    left[:] = [
        (part, key, existing.get((part, key), _NOTHING))
        for part, key, value in parts
        if isinstance(value, torch.Tensor) and existing.get((part, key), _NOTHING) is not value
    ]
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


def refuse_kept_tensors(
    step: nn.Module, run: Callable[..., Any], sample: Sequence[torch.Tensor], left: LeftAttributes
) -> None:
    """Raises if a step reads an attribute that an earlier step has assigned: a graph does not have it.

    Two cases are harmless. An attribute that forward() only writes, such as ``self.attention = weights``: to find out,
    the step runs once more with unusable values in the attributes. A table that depends only on sizes and is computed
    when it is first needed: later calls, other batches and other weights give the same values.

    Args:
        step: A step that has been captured; the caller must restore its attributes and parameters.
        run: Runs it.
        sample: A batch.
        left: The attributes.

    Raises:
        ExportError: If the step reads such an attribute.
    """
    if not left:
        return
    with torch.no_grad(), torch.random.fork_rng():
        for owner, key, _ in left:
            setattr(owner, key, _Left._make_subclass(_Left, torch.empty(0)))
        try:
            run(*(value.clone() for value in sample))
            return
        except Exception as error:
            reason = error
        _put_left_back(left)
        first, second = (_left_by(run, sample, left) for _ in range(2))  # by the first call, and by the next one
        _put_left_back(left)
        for part in step.modules():
            for key, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[key] = nn.Parameter(_other(parameter.detach()), requires_grad=False)
        if _same_values(first, second) and _same_values(
            first, _left_by(run, [_other(value) for value in sample], left)
        ):
            return
    names = [f"{type(owner).__name__}.{key}" for owner, key, _ in left]
    raise ExportError(
        f"forward() reads a value that an earlier call has left in one of its attributes {names}, plain tensors that a "
        f"graph does not keep ({type(reason).__name__}): make it a buffer, self.register_buffer({left[0][1]!r}, ...)"
    ) from reason


def _put_left_back(left: LeftAttributes) -> None:
    for owner, key, before in left:
        if before is _NOTHING:
            vars(owner).pop(key, None)
        else:
            setattr(owner, key, before)


def _left_by(run: Callable[..., Any], sample: Sequence[torch.Tensor], left: LeftAttributes) -> list[torch.Tensor]:
    """Returns what the attributes hold after a step."""
    run(*(value.clone() for value in sample))
    return [vars(owner)[key] for owner, key, _ in left]


def _other(value: torch.Tensor) -> torch.Tensor:
    """Returns other values of the same kind; integers only from the batch, so that they stay in range."""
    if value.is_floating_point():
        return value * 0.5 + 0.25
    return value.flip(list(range(value.dim())))


def _same_values(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(first, second, strict=True))


class _Left(torch.Tensor):
    """A tensor that raises when it is used."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError("it was left by an earlier call")
