"""Masks of attention that mask nothing, or only what comes later: PyTorch's kernels are faster without them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from ....fx.values import Node, arguments_of, same_sizes

aten = torch.ops.aten

_ALL = 2**63 - 1  # the end of a slice that takes everything
# Operators that only rearrange axes of size 1, or repeat what they are given.
_COPIES = (aten.clone.default, aten.to.device, aten.to.dtype, aten.contiguous.default, aten.lift_fresh_copy.default)


class _Count(NamedTuple):
    """An integer tensor that counts along axes: ``start`` plus, for each axis, its factor times the position.

    Attributes:
        start: The first value.
        factors: Axis, counted from the end as -1, -2, ... -> factor.
    """

    start: int
    factors: Mapping[int, int]


def drop_plain_masks(graph: torch.fx.Graph) -> None:
    """Removes masks that are True everywhere, and makes causal ones a flag, before differentiation::

        attention(q, k, v, arange(t) >= 0)                          =>    attention(q, k, v)
        attention(q, k, v, arange(t)[None, :] <= arange(t)[:, None])    =>    attention(q, k, v, is_causal=True)

    Hugging Face's models compute such masks where they are captured; otherwise they leave them out.
    """
    attention = aten.scaled_dot_product_attention.default
    for node in graph.find_nodes(op="call_function", target=attention):
        arguments = arguments_of(node)
        mask = arguments["attn_mask"]
        while isinstance(mask, Node) and mask.target in (aten.expand.default, *_COPIES):
            mask = mask.args[0]
        if not isinstance(mask, Node) or arguments["is_causal"]:
            continue
        causal = _is_causal(mask)
        if causal or _is_true(mask):
            arguments |= {"attn_mask": None, "is_causal": causal}
            node.args, node.kwargs = tuple(arguments.pop(name) for name in ("query", "key", "value")), arguments


def _is_true(mask: Node) -> bool:
    """Returns whether a mask is True everywhere: a count that is nowhere negative is at least 0."""
    if mask.target is not aten.ge.Scalar or mask.args[1] != 0:
        return False
    count = _count(mask.args[0])
    return count is not None and count.start >= 0 and all(factor >= 0 for factor in count.factors.values())


def _is_causal(mask: Node) -> bool:
    """Returns whether a mask is True where the key's position is at most the query's, and there are as many of both."""
    if mask.target not in (aten.le.Tensor, aten.ge.Tensor):
        return False
    keys, queries = mask.args[:2] if mask.target is aten.le.Tensor else mask.args[1::-1]
    shape = mask.meta["val"].shape
    return (
        _count(keys) == _Count(0, {-1: 1})
        and _count(queries) == _Count(0, {-2: 1})
        and len(shape) > 1
        and same_sizes(shape[-1:], shape[-2:-1])
    )


def _count(value: object) -> _Count | None:
    """Returns a node's value as a count; None if it is none."""
    if not isinstance(value, Node) or value.op != "call_function":
        return None
    if value.target is aten.arange.default:
        return _Count(0, {-1: 1})
    source = _count(value.args[0]) if value.args else None
    if source is None:
        return None
    dims = value.meta["val"].dim()
    if value.target is aten.unsqueeze.default:
        axis = value.args[1] % dims - dims  # type: ignore[operator]
        return _Count(source.start, {at - (at <= axis): factor for at, factor in source.factors.items()})
    if value.target is aten.add.Tensor and isinstance(added := value.args[1], int) and not value.kwargs:
        return _Count(source.start + added, source.factors)
    takes_all = value.target is aten.slice.Tensor and value.args[2:] in ((), (0,), (0, _ALL))
    return source if takes_all or value.target in _COPIES else None
