"""Decides which operators become compiled loops, and divides a graph into programs of them and programs of others.

Many equal layers become programs of their own, as equal programs are compiled once::

    [embedding, layer.0, layer.1, ..., head]    =>    [embedding] [layer.0] [layer.1] ... [head]
"""

from __future__ import annotations

import collections
import itertools
import logging
import math
import operator
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from ...engine.programs.collectives import COLLECTIVES
from ...engine.programs.operators import LIBRARY
from ...fx.values import Node, arguments_of, is_integer, is_view, needed_for, tensors_of
from ...graph.equal_layers import entry_of_list
from ...operators.whole import RESIZING

aten = torch.ops.aten
ort_ops = torch.ops.ort_trainer
_log = logging.getLogger(__name__)

# PyTorch's kernels for these are faster than the loops that Inductor writes; the sum of an embedding's gradients would
# also depend on how threads run. For the gradient of a convolution Inductor writes none.
WHOLE = (
    aten.convolution_backward.default,
    aten.embedding_dense_backward.default,
    aten.native_group_norm.default,
    aten.native_group_norm_backward.default,
    aten.max_pool2d_with_indices.default,
    aten.max_pool2d_with_indices_backward.default,
)
# These read or write elements at places that are computed. Inductor may fuse them with the loop that makes what they
# read, or let that be overwritten, although an element needs others than its own: losses were off by a fifth.
_AT_PLACES = (
    aten._unsafe_index.Tensor,
    aten._unsafe_index_put.default,
    aten.gather.default,
    aten.index.Tensor,
    aten.index_add.default,
    aten.index_put.default,
    aten.index_select.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_add.default,
    aten.scatter_reduce.two,
)
_WITH_SIZES = (torch.Tensor, torch.SymInt, torch.SymFloat, tuple, list)
# Names of arguments that say which elements an operator reads or writes.
_PLACES = ("index", "indices", "target")
# The values of their results are values of their first argument.
_COPIES = (
    aten._to_copy.default,
    aten.clone.default,
    aten.constant_pad_nd.default,
    aten.gather.default,
    aten.index.Tensor,
    aten.index_select.default,
)
# Inductor has no loops for these in sizes that it does not know.
_OF_KNOWN_SIZES = (
    *(getattr(aten, f"{packet.__name__}{pass_}").default for packet in RESIZING for pass_ in ("", "_backward")),
    aten._adaptive_avg_pool2d.default,
    aten._adaptive_avg_pool2d_backward.default,
    aten._adaptive_avg_pool3d.default,
    aten._adaptive_avg_pool3d_backward.default,
    aten.nonzero.default,
)
_AVERAGES = (
    aten.avg_pool2d.default,
    aten.avg_pool2d_backward.default,
    aten.avg_pool3d.default,
    aten.avg_pool3d_backward.default,
)
_LARGEST_WINDOW = 25
# A program of its own takes as long to compile as this many operators more in another one: 1.5 s for headers, and the
# rest for what both programs read. With half as many, a GPT-2 of four layers takes 1.4 times as long.
_WORTH_A_PROGRAM = 200
# Where more operators are in a row, several programs are compiled at the same time.
_MOST = 300
# Fewer operators in a row stay PyTorch's kernels, if they are less than this share of all: to compile them takes 2 s.
_FEWEST, _LEAST_SHARE = 10, 0.1


def divide_for_loops(
    nodes: Sequence[Node], apart: Collection[Node], checked: Collection[Node], last: Collection[Node] = ()
) -> list[tuple[list[Node], bool]]:
    """Divides operators, in order, into programs; returns with each whether it is compiled. Masks come first.

    Args:
        nodes: The operators.
        apart: Those that are rarely needed; they come last, and are not worth compiling.
        checked: The inputs whose values are checked to be in range where they are indices.
        last: Operators after which a program ends.
    """
    compiled = {node: _can_be_compiled(node, checked) for node in nodes}
    # Look-ups by integers that the model computes can't be compiled; ahead of all loops, they don't divide them.
    lookups = [node for node in nodes if not compiled[node] and _indices(node) and _of_integers(node)]
    ahead = needed_for(lookups, sizes=True) | {node for node in nodes if _draws_masks(node)}
    ahead |= _parts_of(ahead, nodes)
    first = [node for node in nodes if node in ahead]
    others = [node for node in nodes if node not in ahead]
    # What no loop reads comes after them, where it doesn't divide them either: the gradients of a table of biases.
    read = needed_for(node for node in others if compiled[node] or _communicates(node))
    read |= _parts_of(read, others)
    behind = [node for node in others if node not in apart and node not in read]
    later = [node for node in others if node in apart]
    last_of_all = {*behind, *later}
    main = itertools.groupby((node for node in others if node not in last_of_all), compiled.__getitem__)
    divided = [(first, False), *((list(group), of_loops) for of_loops, group in main), (behind, False), (later, False)]
    parts = [(part, of_loops) for group, of_loops in divided for part in _split_after(last, group)]
    share = _LEAST_SHARE * sum(_computes(node) for node in nodes if compiled[node])
    fewest = max(1, math.ceil(min(_FEWEST, share)))
    longest = max((sum(map(_computes, part)) for part, of_loops in parts if of_loops), default=0)
    if longest < fewest:
        _log.info(
            "no loops: at most %d operators in a row can be compiled, and fewer than %d are not worth it",
            longest,
            fewest,
        )
    parts = [(part, of_loops and sum(map(_computes, part)) >= fewest) for part, of_loops in parts]
    return [(each, of_loops) for part, of_loops in parts for each in (_by_layers(part) if of_loops else [part])]


def _parts_of(results: Collection[Node], nodes: Sequence[Node]) -> set[Node]:
    """Returns the nodes that select one of several results."""
    return {node for node in nodes if node.target is operator.getitem and node.all_input_nodes[0] in results}


def _computes(node: Node) -> bool:
    """Returns whether a node is an operator that computes something: no view, and no part of a result."""
    return not is_view(node) and node.target is not operator.getitem


def _by_layers(nodes: Sequence[Node]) -> list[list[Node]]:
    """Divides operators where layers end: layers whose equals are worth it, and others if they are many."""
    runs: list[list[Node]] = [[]]
    current = ""
    for node in nodes:
        # An operator that a rewrite has made may not know its layer, and parts of a result stay with it.
        layer = current if node.target is operator.getitem else entry_of_list(node, current)
        if layer != current and runs[-1]:
            runs.append([])
        current = layer
        runs[-1].append(node)
    alike = collections.Counter(map(_outline, runs))
    parts: list[list[Node]] = []
    joins = False
    for run in runs:
        is_alone = len(run) * (alike[_outline(run)] - 1) >= _WORTH_A_PROGRAM
        if joins and not is_alone and len(parts[-1]) < _MOST:
            parts[-1] += run
        else:
            parts.append(run)
        joins = not is_alone
    return parts


def _outline(nodes: Sequence[Node]) -> tuple[Any, ...]:
    """Returns what operators of equal layers have in common."""
    return tuple((node.target, *(str(value.shape) for value in tensors_of(node))) for node in nodes)


def _split_after(last: Collection[Node], nodes: Sequence[Node]) -> list[list[Node]]:
    """Divides operators after some of them; each result of several stays with its operator."""
    parts: list[list[Node]] = []
    ended = True
    for node in nodes:
        is_part = node.target is operator.getitem
        if ended and not (is_part and parts):
            parts.append([])
        parts[-1].append(node)
        ended = (node.all_input_nodes[0] if is_part else node) in last
    return parts


def _draws_masks(node: Node) -> bool:
    """Returns whether an operator samples a mask of dropout."""
    return node.target in (ort_ops.draw_unpacked.default, ort_ops.draw_unpacked.rate)


def _communicates(node: Node) -> bool:
    """Returns whether an operator is one of several processes together, which begins as early as it can."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == COLLECTIVES


def _can_be_compiled(node: Node, checked: Collection[Node]) -> bool:
    """Returns whether Inductor can call an operator, for results of known sizes."""
    if node.target is operator.getitem:
        return _can_be_compiled(node.all_input_nodes[0], checked)
    if node.target in _OF_KNOWN_SIZES or (node.target in _AT_PLACES and node.all_input_nodes[0].op != "placeholder"):
        return False
    if _communicates(node) or _has_sizes_of_values(node) or _exceeds_images(node):
        return False
    # A loop that finds an index out of range ends the process: threads can't raise errors.
    if node.target not in WHOLE and not all(_values_of(index) in checked for index in _indices(node)):
        return False
    assert isinstance(node.target, torch._ops.OpOverload)
    return node.target.namespace != LIBRARY and "mkldnn_rnn" not in str(node.target)


def _exceeds_images(node: Node) -> bool:
    """Returns whether windows may exceed an image, where Inductor's gradient is wrong, or are slow in a loop."""
    if node.target not in _AVERAGES:
        return False
    given = arguments_of(node)
    return bool(given["ceil_mode"]) or math.prod(given["kernel_size"]) > _LARGEST_WINDOW


def _has_sizes_of_values(node: Node) -> bool:
    """Returns whether an operator takes or returns a size that depends on values."""
    arguments = pytree.tree_leaves((node.args, node.kwargs))
    found = [node.meta["val"], *(part.meta.get("val") if isinstance(part, Node) else part for part in arguments)]
    return any(free_unbacked_symbols(value) for value in found if isinstance(value, _WITH_SIZES))


def _indices(node: Node) -> list[Node]:
    """Returns the integers that say which elements an operator reads or writes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    arguments = arguments_of(node)
    places = [value for name in _PLACES for value in _listed(arguments.get(name))]
    return [value for value in places if isinstance(value, Node) and is_integer(value)]


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _values_of(node: Node) -> Node:
    """Returns what a node has its values from, through views and copies."""
    while is_view(node) or node.target in _COPIES:
        node = node.all_input_nodes[0]
    return node


def _of_integers(node: Node) -> bool:
    """Returns whether an operator needs nothing computed but integers, flags and sizes."""
    needed = needed_for([node]) - {node}
    return not any(
        value.dtype.is_floating_point for other in needed if other.op != "placeholder" for value in tensors_of(other)
    )
