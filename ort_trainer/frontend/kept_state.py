"""What forward() keeps from one call to the next: buffers, which a graph can update, and attributes, which it can't."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import ExportError

__all__ = ["LeftAttributes", "assignments_as_updates", "refuse_kept_tensors"]


class LeftAttributes(list[tuple[nn.Module, str]]):
    """Modules, with their attributes, to which a run has assigned plain tensors.

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
    plain = {(m, key): value for m in model.modules() for key, value in vars(m).items() if _is_plain(value)}
    assigned: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor | None]] = []
    try:
        yield
    finally:
        for owner, key, old in before:
            if owner._buffers[key] is not old:
                assigned.append((owner, key, old, owner._buffers[key]))
                owner._buffers[key] = old
    parts = [(part, key, value) for part in model.modules() for key, value in vars(part).items()]
    left[:] = [(part, key) for part, key, value in parts if _is_plain(value) and plain.get((part, key)) is not value]
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


def refuse_kept_tensors(run: Callable[..., Any], sample: Sequence[torch.Tensor], left: LeftAttributes) -> None:
    """Raises if a step reads what an earlier one has left in an attribute: in a graph it is not there.

    ``self.attention = weights``, to be looked at later, does no harm. Whether forward() itself reads it shows when the
    step runs once more, with something in the attributes that can't be computed with.

    Args:
        run: Runs a step that has been captured; what it does to attributes is for the caller to put back.
        sample: A batch.
        left: The attributes.

    Raises:
        ExportError: If so.
    """
    if not left:
        return
    for owner, key in left:
        setattr(owner, key, _Left._make_subclass(_Left, torch.empty(0)))
    names = [f"{type(owner).__name__}.{key}" for owner, key in left]
    with torch.no_grad(), torch.random.fork_rng():
        try:
            run(*(value.clone() for value in sample))
        except Exception as error:
            raise ExportError(
                f"forward() reads what an earlier call has left in one of its attributes {names}, plain tensors that "
                f"no graph keeps ({type(error).__name__}): make it a buffer, self.register_buffer({left[0][1]!r}, ...)"
            ) from error


class _Left(torch.Tensor):
    """A tensor that nothing can be done with."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TypeError("it was left by an earlier call")


def _is_plain(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
