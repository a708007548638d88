"""Refuses changes in place that PyTorch's functionalization gets wrong: those through views without an exact inverse.

A graph has no changes in place. Functionalization replaces one through a view by a new base, which it computes from the
changed view. For slices, diagonals and most other views that is exact. For ``unfold`` it is a sum over windows, so that
elements between windows become zero, and those in several windows are added up
(https://github.com/pytorch/pytorch/issues/198102).
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..core.errors import ExportError
from .explain import source_line
from .symbols import hint
from .values import arguments_of

DATA = "ort_trainer_data"
"""Key in the custom metadata of a node that stands for the ``.data`` of a tensor."""

aten = torch.ops.aten
Node = torch.fx.Node


def refuse_inexact_writes(graph: torch.fx.Graph) -> None:
    """Raises if a graph that still has changes in place makes one through a view without an exact inverse.

    Raises:
        ExportError: If so; it names the line and the way out.
    """
    for node in graph.nodes:
        for value in written(node):
            for view in bases_of(value):
                if _is_inexact(view):
                    raise _refused(node, view.target)
            if any(map(_is_data, bases_of(value))):
                _refuse_unseen_write(node, value)


def _is_data(node: Node) -> bool:
    """Returns whether a node is the ``.data`` of a tensor."""
    return node.target is aten.detach.default and bool((node.meta.get("custom") or {}).get(DATA))


def _refuse_unseen_write(write: Node, value: Node) -> None:
    """Raises if a tensor changes through ``.data`` after autograd may have saved it.

    Autograd does not notice such a change. Its backward pass then reads the new value, and that of a graph the former.
    """
    *_, base = bases_of(value)
    saved = base.op == "call_function"
    for node in itertools.takewhile(lambda node: node is not write, write.graph.nodes):
        sources = [source for source in node.all_input_nodes if base in bases_of(source)]
        is_view = base in bases_of(node)
        saved |= not is_view and any(not any(map(_is_data, bases_of(source))) for source in sources)
    if saved:
        raise ExportError(
            "forward() changes a tensor through .data after it has computed with it, which autograd does not notice: "
            "change parameters and buffers before they are used or under torch.no_grad(), and compute other tensors "
            f"anew\n  {source_line(write)}"
        )


def refuse_sums_over_windows(graph: torch.fx.Graph) -> None:
    """Raises if functionalization has already replaced an inexact change, in the graph of a forward pass.

    Raises:
        ExportError: If so; it names the line and the way out.
    """
    for node in graph.find_nodes(op="call_function", target=aten.unfold_backward.default):
        _, sizes, axis, size, step = node.args
        if not _covers(_number(sizes[axis]), _number(size), _number(step)):
            raise _refused(node, aten.unfold.default)


def written(node: Node) -> Iterator[Node]:
    """Yields the arguments that an operator changes in place."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return
    arguments = arguments_of(node)
    for argument in node.target._schema.arguments:
        if argument.is_write:
            value = arguments[argument.name]
            values = value if isinstance(value, (list, tuple)) else [value]
            yield from (each for each in values if isinstance(each, Node))


def bases_of(value: Any) -> Iterator[Node]:
    """Yields a value, what it is a view of, and so on."""
    while isinstance(value, Node):
        yield value
        is_view = isinstance(value.target, torch._ops.OpOverload) and value.target.is_view
        value = value.args[0] if value.args and (is_view or value.target is operator.getitem) else None


def _is_inexact(view: Node) -> bool:
    """Returns whether functionalization can't compute the base from a changed view."""
    if view.target is aten.unfold.default:
        base, axis, size, step = (view.args[0].meta["val"], *view.args[1:])  # type: ignore[union-attr]
        return base.dim() > 0 and not _covers(base.shape[axis], size, step)
    if view.target is aten.as_strided.default:
        value = view.meta["val"]
        sizes, strides = [hint(size) for size in value.shape], [hint(stride) for stride in value.stride()]
        # The view of a memory whose elements are their own addresses: an address that occurs twice overlaps.
        last = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        places: torch.Tensor = torch.arange(last + 1).as_strided(sizes, strides)
        return len(set(places.flatten().tolist())) < places.numel()
    return False


def _covers(length: Any, size: Any, step: Any) -> bool:
    """Returns whether each element of an axis is in exactly one window, for every length that it may have."""
    return bool(step == size and (size == 1 or statically_known_true(length % size == 0)))


def _number(value: Any) -> Any:
    """Returns an argument as a number or a symbolic size, if it is a node that computes one."""
    return value.meta["val"] if isinstance(value, Node) else value


def _refused(node: Node, view: Any) -> ExportError:
    """Returns the error for a change in place through a view without an exact inverse."""
    name, problem = "as_strided", "has elements several times"
    if view is aten.unfold.default:
        name, problem = "unfold", "leaves out elements or has them several times"
    return ExportError(
        f"forward() changes a tensor in place through {name}(), a view that {problem}. A graph would change other "
        "elements as well, because PyTorch's functionalization does. Change the same elements through slices, such as "
        "x[:, ::step], or compute a new tensor, for example with torch.where\n"
        f"  {source_line(node)}"
    )
