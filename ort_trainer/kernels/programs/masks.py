"""Unpacks the masks of dropout, whose words hold four elements each, for graphs that will be compiled to loops."""

from __future__ import annotations

from typing import Any

import torch

from ...fx.values import Node, call

aten = torch.ops.aten
ort_ops = torch.ops.ort_trainer


def open_masks(graph: torch.fx.Graph) -> None:
    """Replaces operators on packed masks, in place::

        draw_mask(key, count, ...)     =>    draw_unpacked(key, count, ...)
        unpack_mask(mask, x)           =>    mask as x
        noise(mask, factor, dtype)     =>    cast(mask, dtype) * factor
        apply_mask(x, mask, factor)    =>    x * noise(mask as x, factor, dtype)

    Loops read one byte for each element, in order. The factor of an overload ``rate`` is 1 / kept.
    """
    for node in list(graph.nodes):
        if node.target not in _OF_MASKS:
            continue
        with graph.inserting_before(node), node.meta["val"].fake_mode:
            new = _OF_MASKS[node.target](graph, *node.args)
        new.meta.update({**node.meta, "val": new.meta["val"]})
        node.replace_all_uses_with(new)
        graph.erase_node(node)


def _noise(graph: torch.fx.Graph, mask: Node, factor: float | Node, dtype: torch.dtype, *_: Any) -> Node:
    if isinstance(factor, Node):
        factor = call(graph, aten._to_copy.default, call(graph, aten.reciprocal.default, factor), dtype=dtype)
    return call(graph, aten.mul.Tensor, call(graph, aten._to_copy.default, mask, dtype=dtype), factor)


def _masked(graph: torch.fx.Graph, value: Node, mask: Node, factor: float | Node) -> Node:
    kept = call(graph, aten.view_as.default, mask, value)
    return call(graph, aten.mul.Tensor, value, _noise(graph, kept, factor, value.meta["val"].dtype))


_OF_MASKS: dict[Any, Any] = {
    ort_ops.draw_mask.default: lambda graph, *args: call(graph, ort_ops.draw_unpacked.default, *args),
    ort_ops.draw_mask.rate: lambda graph, *args: call(graph, ort_ops.draw_unpacked.rate, *args),
    ort_ops.unpack_mask.default: lambda graph, *args: call(graph, aten.view_as.default, *args),
    ort_ops.noise.default: _noise,
    ort_ops.noise.rate: _noise,
    ort_ops.apply_mask.default: _masked,
    ort_ops.apply_mask.rate: _masked,
}
