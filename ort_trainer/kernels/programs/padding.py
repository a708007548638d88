"""Leaves out of a graph what only padded places of the batch would need: the option ``utils.remove_padding``.

The places (batch, time) that an attention mask keeps become one sequence. An operator that treats places separately
gets ``[1, kept, ...]`` instead of ``[batch, time, ...]``, and one that sums over all places has fewer to sum. Others,
such as attention, get whole tensors, with zeros at padded places::

    x -> linear -> attention -> linear    =>    keep(x) -> linear -> restore -> attention -> keep -> linear

This is right if padded places do not reach the loss; then their gradients are zeros, too.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic

from ...core.errors import ExportError
from ...fx.symbols import SymbolTable, hint
from ...fx.values import Node, call, is_tensor, same_sizes
from ...step import Dim
from .rewrites.views import RESHAPES

aten = torch.ops.aten
_Rule = Callable[["_Remover", Node], Node | None]
KEPT_PLACES = "kept places"
"""The name of the size of what is left."""


def remove_padding(
    graph: torch.fx.Graph, symbols: SymbolTable, mask: Node, seeds: Iterable[Node]
) -> dict[str, tuple[Node, int]]:
    """Leaves padded places out of a graph, in place.

    Args:
        graph: The graph.
        symbols: The symbolic sizes, which get one more.
        mask: The input [batch, time] that is not zero at the places to keep.
        seeds: All inputs except for the batch. Values that depend on one of them are left out at padded places. Values
            that depend on the batch alone may matter there, such as the mask that attention adds.

    Returns:
        The name of the new size, with the node and the axis that have it.

    Raises:
        ExportError: If the mask does not have two symbolic sizes that differ.
    """
    value = mask.meta["val"]
    shape = [symbols.expression(size) for size in value.shape]
    if len(shape) != 2 or shape[0] == shape[1] or any(isinstance(size, int) for size in shape):
        raise ExportError(
            "utils.remove_padding needs an attention mask [batch, time] of two sizes that differ, and that neither "
            f"model_desc nor the model fixes; it has {shape}"
        )
    # The new operators work for all sizes for which the graph does, so they add no conditions on sizes.
    with value.fake_mode, value.fake_mode.shape_env.suppress_guards():
        return _Remover(graph, symbols, mask, seeds).run()


class _Places(NamedTuple):
    """Nodes that say which places are kept.

    Attributes:
        rows: Indices of the kept places among all, int64 [kept].
        kept: Their number.
        batch, time: The sizes of the mask.
        total: The number of all places.
    """

    rows: Node
    kept: Node
    batch: Node
    time: Node
    total: Node


class _Remover:
    """Visits operators in order, and replaces those that need only kept places.

    A value is *by places* if its leading axes are ``[batch, time, ...]``, or ``[batch * time, ...]`` in the same order;
    its kept places are ``[1, kept, ...]`` or ``[kept, ...]``.
    """

    def __init__(self, graph: torch.fx.Graph, symbols: SymbolTable, mask: Node, seeds: Iterable[Node]) -> None:
        self._graph, self._symbols, self._mask = graph, symbols, mask
        batch, time = mask.meta["val"].shape
        self._sizes = [symbols.expression(batch), symbols.expression(time)]
        self._total = symbols.expression(batch * time)
        self.dependent = set(seeds)
        self.replaced: set[Node] = set()  # values of which only the kept places are computed
        self.columns: dict[Node, Node] = {}  # transposed matrix -> matrix
        self._kept: dict[Node, Node] = {}  # value -> its kept places
        self._restored: dict[Node, Node] = {}  # replaced value -> a whole one with zeros
        self._treated: set[Node] = set()  # by a rule; if the first axis has all places, they are in order
        self._shapes: dict[Node, list[Dim | None]] = {}
        self._origin: dict[str, Any] = {}  # metadata of the operator that is visited

    def run(self) -> dict[str, tuple[Node, int]]:
        nodes = [node for node in self._graph.nodes if node.op in ("call_function", "output")]
        with self._graph.inserting_before(nodes[0]):
            self._places = self._find_places()
        for node in nodes:
            self._origin = node.meta
            with self._graph.inserting_before(node):
                self._visit(node)
        self._graph.eliminate_dead_code()
        if not self._places.rows.all_input_nodes:  # nothing is left out, as no other input has the mask's sizes
            return {}
        return {KEPT_PLACES: (self._places.rows.all_input_nodes[0], 0)}

    def _find_places(self) -> _Places:
        """Inserts the operators that find the kept places, and names the symbol of their number."""
        value = self._mask.meta["val"]
        indices = self._graph.call_function(aten.nonzero.default, (self.call(aten.reshape.default, self._mask, [-1]),))
        # A guess at the sample's number of kept places, for estimates of costs; torch would specialize 0 and 1.
        sample = max(2, hint(value.numel()) * 3 // 4)
        shapes, source = value.fake_mode.shape_env, ConstantSource(KEPT_PLACES)
        symbol = shapes.create_symbol(sample, source, dynamic_dim=DimDynamic.DYNAMIC)
        number = shapes.create_symintnode(symbol, hint=sample, source=source)
        self._symbols.add(KEPT_PLACES, number)
        indices.meta["val"] = value.new_empty((number, 1), dtype=torch.int64)
        rows = self.call(aten.squeeze.dim, indices, 1)
        kept = self.call(aten.sym_size.int, indices, 0)
        batch, time = (self.call(aten.sym_size.int, self._mask, axis) for axis in range(2))
        return _Places(rows, kept, batch, time, self.call(operator.mul, batch, time))

    def _visit(self, node: Node) -> None:
        """Replaces an operator by one on kept places, or gives it whole tensors."""
        if not self.dependent.isdisjoint(node.all_input_nodes):
            self.dependent.add(node)
        if node.target is aten.t.default:
            (self.columns[node],) = node.all_input_nodes
        for_kept = self._by_places(node)
        if for_kept is not None:
            self._treated.add(node)
        if for_kept is not None and node in self.dependent:  # what depends on the batch alone may matter at padding
            if self.axes(node) or isinstance(node.meta["val"], (tuple, list)):
                self._kept[node] = for_kept
                self.replaced.add(node)
            else:  # a sum over all places, which is the same
                node.replace_all_uses_with(for_kept)
        elif isinstance(node.meta.get("val"), torch.SymInt) and (number := self._number(node.meta["val"])) is not None:
            node.replace_all_uses_with(number)
        else:
            for source in node.all_input_nodes:
                if source in self.replaced:
                    node.replace_input_with(source, self._restore(source))

    def _by_places(self, node: Node) -> Node | None:
        """Returns what computes an operator for kept places; None if it needs whole tensors."""
        rule = _RULES.get(node.target)
        if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
            rule = _pointwise
        return None if rule is None else rule(self, node)

    def _number(self, size: torch.SymInt) -> Node | None:
        """Returns a product of the mask's sizes, so that no activation is read for it; None if it is another size."""
        # 2 * batch * time -> 2, (batch, time)
        coefficient, factors = size.node.expr.as_coeff_mul()
        sizes = (self._places.batch, self._places.time)
        node_of = {symbol: node for node in sizes for symbol in self._symbols.alike(node.meta["val"])}
        if not node_of.keys() >= set(factors):
            return None
        first, *rest = map(node_of.__getitem__, factors)
        return functools.reduce(functools.partial(self.call, operator.mul), [int(coefficient), *rest], first)

    def shape(self, node: Node) -> list[Dim | None]:
        """Returns a tensor's shape as expressions of named sizes."""
        if node not in self._shapes:  # it is asked for often, and printing expressions takes long
            self._shapes[node] = [self._symbols.expression(size) for size in node.meta["val"].shape]
        return self._shapes[node]

    def axes(self, node: Any) -> int:
        """Returns how many leading axes of a value are places: 2, or 1 if batch and time are one axis, or 0."""
        if not isinstance(node, Node) or not is_tensor(node):
            return 0
        shape = self.shape(node)
        axes = self.axes_of(shape, node in self._treated)
        # Behind the places, only numbers and the mask's sizes: ``inner`` can't name others.
        return axes if all(isinstance(size, int) or size in self._sizes for size in shape[axes:]) else 0

    def axes_of(self, shape: Sequence[Dim | None], in_order: bool = True) -> int:
        """Returns how many leading sizes of a shape are those of places."""
        # An axis of batch * time elements may also be (time, batch): the caller knows whether it is in order.
        return 2 if shape[:2] == self._sizes else int(shape[:1] == [self._total] and in_order)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        """Inserts an operator, which belongs where the visited one does."""
        node = call(self._graph, target, *args, **kwargs)
        node.meta = {**self._origin, "val": node.meta["val"]}
        return node

    def kept(self, node: Node) -> Node:
        """Returns the kept places of a value by places.

        The shapes are [batch, time, ...] -> [batch * time, ...] -> [kept, ...] -> [1, kept, ...].
        """
        if node not in self._kept:
            flat = node
            if self.axes(node) == 2:
                flat = self.call(aten.reshape.default, node, [self._places.total, *self.inner(node)])
            rows = self.call(aten.index_select.default, flat, 0, self._places.rows)
            self._kept[node] = rows if flat is node else self.call(aten.unsqueeze.default, rows, 0)
        return self._kept[node]

    def _restore(self, node: Node) -> Node:
        """Returns a whole value from its kept places, with zeros at the others."""
        if node not in self._restored:
            kept, inner = self._kept[node], self.inner(node)
            zeros = self.call(aten.new_zeros.default, kept, [self._places.total, *inner])
            flat = self.call(aten.reshape.default, kept, [self._places.kept, *inner])
            restored = self.call(aten.index_copy.default, zeros, 0, self._places.rows, flat)
            self._restored[node] = self.whole(restored, inner) if self.axes(node) == 2 else restored
        return self._restored[node]

    def whole(self, node: Node, inner: Sequence[Any]) -> Node:
        """Returns a value in the shape [batch, time, ...]."""
        return self.call(aten.reshape.default, node, [self._places.batch, self._places.time, *inner])

    def spread(self, node: Node, inner: Sequence[Any]) -> Node:
        """Returns an operand that is the same for several places as one that is by places: [batch, time, ...]."""
        return self.call(aten.expand.default, node, [self._places.batch, self._places.time, *inner])

    def inner(self, node: Node) -> list[Any]:
        """Returns the sizes of a value by places behind its places."""
        named = dict(zip(self._sizes, (self._places.batch, self._places.time), strict=True))
        return [named.get(size, size) for size in self.shape(node)[self.axes(node) :]]

    def leading(self, axes: int) -> list[Any]:
        """Returns the leading sizes of kept places."""
        return [1, self._places.kept] if axes == 2 else [self._places.kept]

    def with_kept(self, node: Node) -> Node:
        """Inserts an operator with the kept places of those of its arguments that are by places."""
        args = torch.fx.map_arg(node.args, lambda value: self.kept(value) if self.axes(value) else value)
        return self.call(node.target, *args, **node.kwargs)


def _pointwise(remover: _Remover, node: Node) -> Node | None:
    """An elementwise operator, whose operands may be broadcast: along places, or along the axes behind."""
    if not is_tensor(node) or any(isinstance(value, Node) for value in node.kwargs.values()):
        return None
    axes = remover.axes_of(remover.shape(node), any(remover.axes(source) == 1 for source in node.all_input_nodes))
    if not axes:
        return None
    operands: dict[Node, Node] = {}
    for source in filter(is_tensor, node.all_input_nodes):
        # As broadcasting aligns shapes at the end, with leading ones.
        shape = [1] * (node.meta["val"].dim() - source.meta["val"].dim()) + remover.shape(source)
        if all(size == 1 for size in shape[:axes]):
            continue  # the same for all places
        if source not in remover.dependent and node in remover.dependent:
            return None  # a mask, for example, whose effect at padded places may matter
        if axes == 2 and remover.axes_of(shape) < 2:
            source_of_all = remover.spread(source, shape[2:])
        elif remover.axes(source):
            source_of_all = source
        else:
            return None
        operands[source] = remover.kept(source_of_all)
    args = torch.fx.map_arg(node.args, lambda value: operands.get(value, value))
    return remover.call(node.target, *args, **node.kwargs)


def _reshape(remover: _Remover, node: Node) -> Node | None:
    """A reshape to places again: of the axes behind them, or between [batch, time, ...] and [batch * time, ...]."""
    args: Any = node.args
    source, sizes = args
    axes = remover.axes_of(remover.shape(node)) if remover.axes(source) else 0
    return remover.call(node.target, remover.kept(source), [*remover.leading(axes), *sizes[axes:]]) if axes else None


def _expand(remover: _Remover, node: Node) -> Node | None:
    """An expansion of axes behind the places; one that adds axes in front of them needs whole tensors."""
    args: Any = node.args
    source, sizes = args
    axes = remover.axes(source)
    if not axes or len(sizes) != source.meta["val"].dim():
        return None
    return remover.call(node.target, remover.kept(source), [*remover.leading(axes), *sizes[axes:]])


def _view_as(remover: _Remover, node: Node) -> Node | None:
    """A mask of all places in the shape of a value by places; it does not depend on the value."""
    args: Any = node.args
    value, like = args
    return remover.kept(remover.whole(value, remover.inner(like))) if remover.axes(like) == 2 else None


def _product(remover: _Remover, node: Node) -> Node | None:
    """A product of places with weights, (places, k) x (k, n), or the gradient of weights, (k, places) x (places, n).

    The latter is a sum over places, to which padded ones, whose gradients are zero, add nothing.
    """
    args: Any = node.args
    *bias, left, right = args
    if any(map(remover.axes, bias)):
        return None
    if remover.axes(left) == 1 and not remover.axes(right):
        return remover.with_kept(node)
    rows = remover.columns.get(left)
    if bias or rows is None or remover.axes(rows) != 1 or remover.axes(right) != 1:
        return None
    columns = remover.call(aten.t.default, remover.kept(rows))
    return remover.call(node.target, columns, remover.kept(right))


def _separately(holds: Callable[..., bool] = lambda *_: True) -> _Rule:
    """Returns the rule of operators that treat places separately, or sum over all of them.

    Args:
        holds: Whether an operator does: a function of its arguments, the number of axes of places, and the rank.
    """

    def rule(remover: _Remover, node: Node) -> Node | None:
        sources = [source for source in node.all_input_nodes if is_tensor(source)]
        axes = {remover.axes(source) for source in sources if remover.axes_of(remover.shape(source))}
        if len(axes) != 1 or axes == {0}:  # none by places, or in another order
            return None
        rank = next(source.meta["val"].dim() for source in sources if remover.axes(source))
        return remover.with_kept(node) if holds(node.args, *axes, rank) else None

    return rule


def _picks(position: int) -> _Rule:
    """Returns the rule of operators that pick a class for each place; the argument of the given number says which."""
    rule = _separately()
    return lambda remover, node: rule(remover, node) if remover.axes(node.args[position]) else None


def _along(*positions: int, added: int = 0, sums: bool = False) -> _Rule:
    """Returns the rule of operators that work along axes behind those of places.

    Args:
        positions: The arguments that are axes, or lists of them.
        added: The number of axes that the result has in addition.
        sums: Whether it may also sum over all places.
    """

    def holds(args: Any, axes: int, rank: int) -> bool:
        dim_arguments = [args[position] for position in positions if position < len(args)]
        if len(dim_arguments) < len(positions) or None in dim_arguments:
            return False
        dims = {
            int(axis) % (rank + added)
            for each in dim_arguments
            for axis in (each if isinstance(each, list) else [each])
        }
        return bool(dims) and (min(dims) >= axes or (sums and dims.issuperset(range(axes))))

    return _separately(holds)


def _normalizes(position: int) -> _Rule:
    """Returns the rule of operators that normalize the last axes, whose sizes are an argument."""
    return _separately(lambda args, axes, rank: len(args[position]) <= rank - axes)


def _part(remover: _Remover, node: Node) -> Node | None:
    """A copy, or a slice that takes everything, is the value itself; other slices work along an axis."""
    source: Any = node.args[0]
    if remover.axes(source) and same_sizes(node.meta["val"].shape, source.meta["val"].shape):
        return remover.kept(source)
    return _along(1)(remover, node) if node.target is aten.slice.Tensor else None


def _item(remover: _Remover, node: Node) -> Node | None:
    """One of several results of an operator that was replaced."""
    args: Any = node.args
    source, place = args
    return remover.call(operator.getitem, remover.kept(source), place) if source in remover.replaced else None


_RULES: dict[Any, _Rule] = {
    operator.getitem: _item,
    **dict.fromkeys(RESHAPES, _reshape),
    aten.expand.default: _expand,
    aten.view_as.default: _view_as,
    aten.slice.Tensor: _part,
    aten.slice_backward.default: _part,
    aten.clone.default: _part,
    **dict.fromkeys((aten.mm.default, aten.addmm.default), _product),
    # Elementwise operators that torch does not tag as such.
    **dict.fromkeys(
        (
            aten.detach.default,
            aten.alias.default,
            aten._to_copy.default,
            aten.zeros_like.default,
            aten.ones_like.default,
            aten.full_like.default,
            aten.masked_fill.Tensor,
            aten.leaky_relu_backward.default,
            aten.elu_backward.default,
            aten.hardtanh_backward.default,
            aten.hardswish_backward.default,
            aten.log_sigmoid_backward.default,
            aten.softplus_backward.default,
            aten.mish_backward.default,
        ),
        _pointwise,
    ),
    # Each place separately, or a sum over all of them.
    **dict.fromkeys(
        (
            aten.embedding.default,
            aten.embedding_dense_backward.default,
            aten.sum.default,
        ),
        _separately(),
    ),
    aten.nll_loss_forward.default: _picks(1),
    aten.nll_loss_backward.default: _picks(2),
    # Along axes that are the argument of the given number.
    **dict.fromkeys(
        (
            aten.select.int,
            aten.squeeze.dim,
            aten.unbind.int,
            aten.cat.default,
            aten.cumsum.default,
            aten.mean.dim,
            aten.amax.default,
            aten.amin.default,
            aten.logsumexp.default,
            aten.var.correction,
            aten.var_mean.correction,
            aten._softmax.default,
            aten._safe_softmax.default,
            aten._log_softmax.default,
        ),
        _along(1),
    ),
    aten.sum.dim_IntList: _along(1, sums=True),
    aten.unsqueeze.default: _along(1, added=1),
    aten.transpose.int: _along(1, 2),
    **dict.fromkeys(
        (
            aten.split.Tensor,
            aten.split_with_sizes.default,
            aten._softmax_backward_data.default,
            aten._log_softmax_backward_data.default,
        ),
        _along(2),
    ),
    aten.native_layer_norm.default: _normalizes(1),
    aten.native_layer_norm_backward.default: _normalizes(2),
    aten._fused_rms_norm.default: _normalizes(1),
    aten._fused_rms_norm_backward.default: _normalizes(3),
}
