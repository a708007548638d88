"""Turns Python loops over recurrent cells into layers, before differentiation.

A loop is captured step by step, and each step would be differentiated, translated and run separately: minutes for a
thousand steps. If a cell only passes its state on to the next step, the loop is a layer::

    h1, c1 = cell(x1, (h0, c0))
    h2, c2 = cell(x2, (h1, c1)) ...    =>    output, ... = lstm(stack(x1, x2, ...), (h0, c0))
    linear(h1), linear(h2) ...         =>    linear(output)
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..fx.values import inputs_first, reached

aten = torch.ops.aten
Node = torch.fx.Node

# The minimum number of steps: a layer adds some operators of its own.
_WORTH_IT = 4
_LAYERS: dict[Any, Any] = {
    aten.lstm_cell.default: aten.lstm.input,
    aten.gru_cell.default: aten.gru.input,
    aten.rnn_tanh_cell.default: aten.rnn_tanh.input,
    aten.rnn_relu_cell.default: aten.rnn_relu.input,
}


def roll_up_loops(graph: torch.fx.Graph) -> None:
    """Replaces loops over cells by layers, in place, in the graph of a forward pass.

    Leaves a graph unchanged if the order of its operators matters: if it changes tensors or samples random numbers.
    """
    if not any(node.target in _LAYERS for node in graph.nodes) or not all(map(_may_move, graph.nodes)):
        return
    changed = False
    for cell in list(graph.nodes):
        if cell.target in _LAYERS and cell.users and _before(cell) is None:
            chain = _chain(cell)
            if len(chain) >= _WORTH_IT:
                _make_layer(graph, chain)
                changed = True
    if changed:
        _sort(graph)
        _roll_up_linear(graph)
        _sort(graph)
        graph.eliminate_dead_code()


def _may_move(node: Node) -> bool:
    """Returns whether an operator may run at another time: it changes no tensor and samples no random number."""
    if node.op != "call_function" or node.target is operator.getitem:
        return node.op != "call_module"
    if not isinstance(node.target, torch._ops.OpOverload):
        return getattr(node.target, "__module__", "") in ("_operator", "math", "torch")
    if node.target in _LAYERS.values():
        return not node.args[5]  # dropout
    drops_out = node.target.overloadpacket.__name__.endswith("dropout") and node.args[-1] is not False
    is_random = drops_out or torch.Tag.nondeterministic_seeded in node.target.tags
    return not node.target._schema.is_mutable and not is_random


def _state(cell: Node) -> list[Any]:
    state = cell.args[1]
    return list(state) if isinstance(state, (list, tuple)) else [state]


def _before(cell: Node) -> Node | None:
    """Returns the preceding cell, which has the same weights and computed this cell's state; None if there is none."""
    state = _state(cell)
    previous = state[0].args[0] if cell.target is aten.lstm_cell.default and _is_item(state[0], 0) else state[0]
    if not isinstance(previous, Node) or previous.target != cell.target or previous.args[2:] != cell.args[2:]:
        return None
    if len(state) > 1 and not (_is_item(state[1], 1) and state[1].args[0] is previous):
        return None
    return previous


def _is_item(value: Any, place: int) -> bool:
    return isinstance(value, Node) and value.target is operator.getitem and value.args[1:] == (place,)


def _outputs(cell: Node, place: int) -> list[Node]:
    """Returns the nodes of a cell's output h (0) or c (1)."""
    if cell.target is not aten.lstm_cell.default:
        return [cell]
    return [user for user in cell.users if _is_item(user, place)]


def _chain(first: Node) -> list[Node]:
    """Returns a cell and its successors, as long as their inputs don't depend on the first cell's result."""
    chain, dependent = [first], reached([first], operator.attrgetter("users"))
    while True:
        users = [user for output in _outputs(chain[-1], 0) for user in output.users]
        following = [user for user in users if user.target == first.target and _before(user) is chain[-1]]
        # A layer does not return the intermediate states c.
        kept = [user for output in _outputs(chain[-1], 1) for user in output.users if _is_lstm(first)]
        if len(following) != 1 or following[0].args[0] in dependent or any(user is not following[0] for user in kept):
            return chain
        chain.append(following[0])


def _is_lstm(cell: Node) -> bool:
    return cell.target is aten.lstm_cell.default


def _caller(graph: torch.fx.Graph, like: Node) -> Callable[..., Node]:
    """Returns a function that adds nodes with the origin of another node."""

    def call(target: Any, *args: Any) -> Node:
        node = graph.call_function(target, args)
        node.meta = {key: value for key, value in like.meta.items() if key != "val"}
        return node

    return call


def _make_layer(graph: torch.fx.Graph, chain: Sequence[Node]) -> None:
    """Replaces a chain of cells by one layer over a sequence (time, batch, features)."""
    first, last = chain[0], chain[-1]
    weights = [weight for weight in first.args[2:] if weight is not None]
    with graph.inserting_before(first):
        call = _caller(graph, first)
        value = _together(call, [cell.args[0] for cell in chain])
        states = [call(aten.unsqueeze.default, state, 0) for state in _state(first)]  # (layers = 1, batch, hidden)
        initial = states if _is_lstm(first) else states[0]
        # After the weights: has_biases, num_layers, dropout, train, bidirectional, batch_first.
        layer = call(_LAYERS[first.target], value, initial, weights, len(weights) > 2, 1, 0.0, True, False, False)
        steps = call(aten.unbind.int, call(operator.getitem, layer, 0), 0)
        for number, cell in enumerate(chain):
            output = call(operator.getitem, steps, number)
            for node in _outputs(cell, 0):
                node.replace_all_uses_with(output)
        if _is_lstm(first):
            left = call(aten.squeeze.dim, call(operator.getitem, layer, 2), 0)
            for node in _outputs(last, 1):
                node.replace_all_uses_with(left)


def _together(call: Callable[..., Node], values: Sequence[Any]) -> Node:
    """Returns the values of all steps in one tensor: the one that they were unbound from, or else a stack."""
    source = values[0].args[0] if _is_item(values[0], 0) else None
    if isinstance(source, Node) and source.target is aten.unbind.int and source.args[1:] == (0,):
        items = [value for value in values if value.target is operator.getitem and value.args[0] is source]
        if [item.args[1] for item in items] == list(range(len(values))) and len(source.users) == len(values):
            return source.args[0]  # type: ignore[return-value]
    return call(aten.stack.default, list(values))


def _roll_up_linear(graph: torch.fx.Graph) -> None:
    """Merges linear layers with the same weights that are applied to the steps of one sequence."""
    groups: dict[Any, list[Node]] = {}
    for node in graph.nodes:
        value = node.args[0] if node.target is aten.linear.default else None
        if isinstance(value, Node) and value.target is operator.getitem:
            source = value.args[0]
            if isinstance(source, Node) and source.target is aten.unbind.int and source.args[1:] == (0,):
                groups.setdefault((source, *node.args[1:]), []).append(node)
    for (source, *weights), group in groups.items():
        if len(group) < _WORTH_IT or 2 * len(group) < len(source.users):
            continue
        with graph.inserting_before(group[0]):
            call = _caller(graph, group[0])
            steps = call(aten.unbind.int, call(aten.linear.default, source.args[0], *weights), 0)
            for node in group:
                node.replace_all_uses_with(call(operator.getitem, steps, node.args[0].args[1]))  # type: ignore[union-attr]


def _sort(graph: torch.fx.Graph) -> None:
    """Moves every node behind its inputs, and otherwise keeps the order."""
    for before, after in itertools.pairwise(inputs_first(graph.nodes)):
        before.append(after)
