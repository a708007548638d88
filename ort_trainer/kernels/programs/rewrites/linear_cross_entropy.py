"""Cross entropy of a linear layer with many classes, such as the vocabulary of a language model."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ....engine.programs.processor import slow_halves
from ....fx.symbols import size_in_bytes
from ....fx.values import Node, is_tensor, needed_for
from .views import RESHAPES

aten = torch.ops.aten

# Smaller logits stay in the cache anyway.
_WORTH_IT = 4 << 20


@dataclass
class _Loss:
    """A cross entropy with its gradient.

    Attributes:
        product: The product that gives the logits.
        forward, backward: The negative log likelihood and its gradient.
        of_hidden, of_weight, of_bias: The gradients of the product's operands; None if they are not needed.
    """

    product: Node
    forward: Node
    backward: Node
    of_hidden: Node | None = None
    of_weight: Node | None = None
    of_bias: Node | None = None


def fuse_linear_cross_entropy(graph: torch.fx.Graph, unfetched: Collection[int] = ()) -> None:
    """Computes the logits, their cross entropy and both gradients by blocks of rows::

        mm(x, t(weight)) -> log_softmax -> nll_loss -> ... -> nll_loss_backward -> log_softmax_backward -> mm, mm
            =>    linear_cross_entropy(x, weight, ..., gradient) -> loss, gradients of x and weight

    The logits, their log-softmax and its gradient are as large as the batch times the classes; they are never made, and
    rows whose label is ignored are left out. The loss is computed where its gradient is, in the backward pass.

    Args:
        graph: The graph.
        unfetched: Places of results that are probably not fetched: logits among them are computed separately.
    """
    graph.eliminate_dead_code()  # other rewrites leave operators that nothing reads any more
    (end,) = graph.find_nodes(op="output")
    left = {end.args[0][place] for place in unfetched}
    for node in graph.find_nodes(op="call_function", target=aten.nll_loss_backward.default):
        loss = _match(node, left)
        if loss is not None:
            _fuse(graph, loss)


def _match(backward: Node, unfetched: Collection[Node]) -> _Loss | None:
    """Returns the cross entropy of a linear layer that a gradient belongs to; None if nothing of it can be fused."""
    gradient, scores, labels, weight, reduction, ignored, total = backward.args
    assert isinstance(scores, Node) and isinstance(gradient, Node) and isinstance(total, Node)
    forward, value = total.all_input_nodes[0], scores.meta["val"]
    if weight is not None or scores.target is not aten._log_softmax.default or value.dim() != 2:
        return None
    if value.dtype != torch.float32 or size_in_bytes(value) < _WORTH_IT or forward in needed_for([gradient]):
        return None
    expected = (scores, labels, None, reduction, ignored)
    if (
        forward.target is not aten.nll_loss_forward.default
        or forward.args != expected
        or set(total.users) != {backward}
    ):
        return None
    of_scores = list(backward.users)
    if [user.target for user in of_scores] != [aten._log_softmax_backward_data.default]:
        return None
    product = _back(scores.args[0], scores, unfetched)
    if product is None or set(scores.users) != {forward, backward, *of_scores}:
        return None
    if product.meta["val"].dtype not in {torch.float32, torch.bfloat16}.difference(slow_halves()):
        return None
    return _with_gradients(_Loss(product, forward, backward), of_scores[0])


def _back(value: Any, user: Node, unfetched: Collection[Node]) -> Node | None:
    """Returns the product behind casts and reshapes of its result, if nothing else reads these; otherwise None."""
    while isinstance(value, Node):
        if any(reader is not user and not _only_returned(value, reader, unfetched) for reader in _readers(value)):
            return None
        if value.target in (aten.mm.default, aten.addmm.default) and not value.kwargs:
            return value if value.args[-1].target is aten.t.default else None  # type: ignore[union-attr]
        if value.target not in (*RESHAPES, aten._to_copy.default):
            return None
        value, user = value.args[0], value
    return None


def _only_returned(value: Node, reader: Node, unfetched: Collection[Node]) -> bool:
    """Returns whether a value, or a view that reads it, is only returned, and probably not fetched."""
    if reader.op == "output":
        return value in unfetched
    return reader in unfetched and all(other.op == "output" for other in _readers(reader))


def _readers(node: Node) -> Iterator[Node]:
    """Yields the users of a value that read more than its sizes."""
    return (user for user in node.users if is_tensor(user) or user.op == "output")


def _with_gradients(loss: _Loss, gradient: Node) -> _Loss | None:
    """Adds the product's gradients to a loss; returns None if the logits' gradient is used for anything else."""
    *_, hidden, transposed = loss.product.args
    assert isinstance(transposed, Node)
    weight = transposed.args[0]
    while [user.target in (*RESHAPES, aten._to_copy.default) for user in _readers(gradient)] == [True]:
        (gradient,) = _readers(gradient)
    if gradient.meta["val"].dim() != 2 or gradient.meta["val"].dtype != loss.product.meta["val"].dtype:
        return None
    for user in _readers(gradient):
        later = list(user.users)
        if user.target is aten.mm.default and user.args == (gradient, weight):
            loss.of_hidden = user
        elif user.target is aten.sum.dim_IntList and list(user.args[1]) == [0]:  # type: ignore[arg-type]
            loss.of_bias = user
        elif user.target is aten.t.default and [each.args for each in later] == [(user, hidden)]:
            loss.of_weight = later[0] if later[0].target is aten.mm.default else None
            if loss.of_weight is None:
                return None
        else:
            return None
    return loss


def _fuse(graph: torch.fx.Graph, loss: _Loss) -> None:
    """Replaces the loss and the gradients of the product's operands by the results of one operator."""
    *bias, hidden, transposed = loss.product.args
    gradient, _, labels, _, reduction, ignored, _ = loss.backward.args
    assert isinstance(transposed, Node) and isinstance(hidden, Node)
    weight = transposed.args[0]
    wanted = [result is not None for result in (loss.of_hidden, loss.of_weight, loss.of_bias)]
    arguments = (hidden, weight, bias[0] if bias else None, labels, gradient, reduction, ignored, wanted)
    (value,) = (user for user in loss.forward.users if user.args[1] == 0)
    results = [value, loss.of_hidden, loss.of_weight, loss.of_bias]
    with graph.inserting_before(loss.backward):
        fused = graph.call_function(torch.ops.ort_trainer.linear_cross_entropy.default, arguments)
        fused.meta.update(loss.product.meta)
        fused.meta["val"] = [None if result is None else result.meta["val"] for result in results]
        for index, result in enumerate(results):
            if result is None:
                continue
            part = graph.call_function(operator.getitem, (fused, index))
            part.meta.update({**loss.product.meta, "val": result.meta["val"]})
            if result is loss.of_bias:  # mostly a sum with keepdim, (1, classes); the fused operator gives (classes,)
                part.meta["val"] = result.meta["val"].reshape(-1)
                part = graph.call_function(aten.view.default, (part, list(result.meta["val"].shape)))
                part.meta.update({**loss.product.meta, "val": result.meta["val"]})
            result.replace_all_uses_with(part)
    # The operator that now computes the loss stands in the backward pass: what reads the loss moves behind it.
    late = {*fused.users}
    for node in list(graph.nodes):
        if node is fused:
            break
        if not late.isdisjoint(node.all_input_nodes):
            late.add(node)
            loss.backward.prepend(node)
