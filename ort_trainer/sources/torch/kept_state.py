"""What forward() keeps from one call to the next: buffers, which a graph can update, and attributes, which it can't."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ...errors import ExportError

__all__ = ["LeftAttributes", "assignments_as_updates", "refuse_kept_tensors"]


_NOTHING = object()


class LeftAttributes(list[tuple[nn.Module, str, Any]]):
    """Modules with the names of attributes to which a run has assigned plain tensors, and what they had there before.

    It is no ``list``, as torch.export empties those that it finds in modules again.
    """


@contextlib.contextmanager
def assignments_as_updates(model: nn.Module, left: LeftAttributes) -> Iterator[None]:
    """Turns ``self.buffer = value`` in forward() into an update in place: the exporter drops the former.

    Args:
        model: The model, whose forward() runs in the context.
        left: What is filled with what was assigned to attributes.

    Raises:
        ExportError: If what is assigned can't be kept.
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
                f"forward() of {type(owner).__name__} assigns to its buffer {key!r} something of another shape or "
                "dtype, which a graph can't do: keep both"
            )
    # A value may be another of these buffers, so all are taken before any is changed.
    values = [new.detach().clone() for _, _, _, new in assigned if new is not None]
    for (_, _, old, _), value in zip(assigned, values, strict=True):
        old.copy_(value)


def refuse_kept_tensors(
    step: nn.Module, run: Callable[..., Any], sample: Sequence[torch.Tensor], left: LeftAttributes
) -> None:
    """Raises if a step reads what an earlier one has left in an attribute: in a graph it is not there.

    ``self.attention = weights``, to be looked at later, does no harm. Whether forward() itself reads it shows when the
    step runs once more, with something in the attributes that can't be computed with. Nor does a table that depends on
    sizes alone, which is computed when it is first needed: later calls, other batches and other weights leave the same.

    Args:
        step: A step that has been captured; what this does to its attributes is for the caller to put back.
        run: Runs it.
        sample: A batch.
        left: The attributes.

    Raises:
        ExportError: If so.
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
        f"forward() reads what an earlier call has left in one of its attributes {names}, plain tensors that no graph "
        f"keeps ({type(reason).__name__}): make it a buffer, self.register_buffer({left[0][1]!r}, ...)"
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
    """Returns other values of the same kind, each of which occurs in the batch."""
    if value.is_floating_point():
        return value * 0.5 + 0.25
    return value.flip(list(range(value.dim())))


def _same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(first, second, strict=True))


class _Left(torch.Tensor):
    """A tensor that nothing can be done with."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError("it was left by an earlier call")


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
