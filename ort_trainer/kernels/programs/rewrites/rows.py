"""Rows that are taken by indices, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....fx.values import Node, arguments_of, is_contiguous

aten = torch.ops.aten


def select_rows(graph: torch.fx.Graph) -> None:
    """Takes rows by one index, before differentiation, where a model has an index for each of some dimensions::

        index(x, [None, i, j])    =>    index_select(flatten(x, 1, 2), 1, flat_index([i, j], sizes of x))

    PyTorch's ``index`` and its gradient go element by element: on one thread they take 1 to 5 times as long, and on two
    the gradient 2 to 16 times, in an order that changes from run to run. Few elements take as long as with this.
    """
    for node in graph.find_nodes(op="call_function", target=aten.index.Tensor):
        source, places = node.args
        given = [index for index in places if index is not None]
        adjacent = places[len(places) - len(given) :] == given
        if adjacent and all(map(_is_index, given)) and is_contiguous(source.meta["val"]):
            node.target, node.args = _select, (source, given, len(places) - len(given))


def _is_index(node: Node) -> bool:
    return node.meta["val"].dtype in (torch.int32, torch.int64)


def _select(source: torch.Tensor, indices: Sequence[torch.Tensor], first: int) -> torch.Tensor:
    """Returns ``source[:, ..., *indices]``, where the indices are for the dimensions from ``first`` on."""
    last = first + len(indices)
    outer, sizes, inner = source.shape[:first], source.shape[first:last], source.shape[last:]
    index = torch.ops.ort_trainer.flat_index(indices, sizes)
    rows = source.flatten(first, last - 1)
    if first > 1:
        rows = rows.flatten(0, first - 1)
    shape = torch.broadcast_shapes(*(index.shape for index in indices))
    return rows.index_select(min(first, 1), index).reshape(*outer, *shape, *inner)


def add_rows(graph: torch.fx.Graph) -> None:
    """Computes gradients of embeddings faster; see the function of this name that programs call::

    embedding_dense_backward(gradient, indices, 10, -1, False)    =>    add_rows(gradient, indices, 10, -1)
    """
    for node in graph.find_nodes(op="call_function", target=aten.embedding_dense_backward.default):
        if not arguments_of(node)["scale_grad_by_freq"]:
            node.target, node.args = torch.ops.ort_trainer.add_rows.default, node.args[:4]
