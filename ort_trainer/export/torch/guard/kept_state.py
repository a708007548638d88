"""State that forward() keeps between calls: buffers, which a graph can update, and attributes, which it can't."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ....core.errors import ExportError

__all__ = ["LeftAttributes", "assignments_as_updates", "refuse_kept_tensors"]


_NOTHING = object()


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
        if _is_plain(value) and existing.get((part, key), _NOTHING) is not value
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
        _put_back(left)
        first, second = (_left_by(run, sample, left) for _ in range(2))  # by the first call, and by the next one
        _put_back(left)
        for part in step.modules():
            for key, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[key] = nn.Parameter(_other(parameter.detach()), requires_grad=False)
        if _same(first, second) and _same(first, _left_by(run, [_other(value) for value in sample], left)):
            return
    names = [f"{type(owner).__name__}.{key}" for owner, key, _ in left]
    raise ExportError(
        f"forward() reads a value that an earlier call has left in one of its attributes {names}, plain tensors that a "
        f"graph does not keep ({type(reason).__name__}): make it a buffer, self.register_buffer({left[0][1]!r}, ...)"
    ) from reason


def _put_back(left: LeftAttributes) -> None:
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


def _same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(first, second, strict=True))


class _Left(torch.Tensor):
    """A tensor that raises when it is used."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError("it was left by an earlier call")


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
