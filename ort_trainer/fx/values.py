"""The values of a captured graph: what they are computed from, and how they lie in memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from ..core.errors import ExportError
from ..engine.torch_memory import dense_order
from .explain import source_line
from .symbols import hint, number_of_elements

Node = torch.fx.Node

# Tagged as random because of a dropout that only other devices have.
_DRAWS_NOTHING = (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def refuse(node: Node, why: str, way_out: str = "") -> ExportError:
    """Returns the error for an operator that no program can run."""
    return ExportError(f"{node.target} {why}, so PyTorch's kernels can't run it: {source_line(node)}{way_out}")


def tensors_of(node: Node) -> list[torch.Tensor]:
    """Returns the fake tensors that a node produces."""
    value = node.meta.get("val")
    return [entry for entry in (value if isinstance(value, (tuple, list)) else [value]) if torch.is_tensor(entry)]


def call(graph: torch.fx.Graph, function: Any, *args: Any, **kwargs: Any) -> Node:
    """Inserts an operator at the current place, with its fake result; the fake mode must be active."""
    node = graph.call_function(function, args, kwargs)
    fakes = torch.fx.map_arg((args, kwargs), lambda source: source.meta["val"])
    node.meta["val"] = function(*fakes[0], **fakes[1])
    return node


def runs_on_cpu(graph: torch.fx.Graph) -> bool:
    """Returns whether a graph is for the CPU."""
    values = (value for node in graph.find_nodes(op="placeholder") for value in tensors_of(node))
    return next((value.device.type for value in values), "cpu") == "cpu"


def draws_numbers(node: Node) -> bool:
    """Returns whether a node is one of PyTorch's random operators."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and node.target not in _DRAWS_NOTHING


def is_tensor(node: Node) -> bool:
    """Returns whether a node's value is one tensor."""
    return isinstance(node.meta.get("val"), torch.Tensor)


def is_integer(node: Node) -> bool:
    """Returns whether a node's value is one tensor of integers; bools don't count."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in _INTEGERS


def arguments_of(node: Node) -> dict[str, Any]:
    """Returns the arguments of an operator by name, including defaults."""
    assert isinstance(node.target, torch._ops.OpOverload)
    schema = node.target._schema.arguments
    arguments = {argument.name: argument.default_value for argument in schema}
    arguments.update(zip(arguments, node.args, strict=False))
    arguments.update(node.kwargs)
    return arguments


def is_view(node: Node) -> bool:
    """Returns whether a node is a view of its first argument, which costs nothing wherever it is computed."""
    if node.target is operator.getitem:
        return isinstance(node.args[0], Node) and is_view(node.args[0])
    if not isinstance(node.target, torch._ops.OpOverload) or not node.args or not isinstance(node.args[0], Node):
        return False
    if node.target is torch.ops.aten._unsafe_view.default:  # a view, although its signature does not say so
        return True
    aliases = [result.alias_info for result in node.target._schema.returns]
    return len(aliases) == 1 and aliases[0] is not None and not aliases[0].is_write


def base_of(node: Node) -> Node:
    """Returns what a node is a view of, through any number of views; the node itself if it is not a view."""
    while is_view(node):
        node = node.all_input_nodes[0]
    return node


def memory_order(value: torch.Tensor) -> tuple[int, ...] | None:
    """Returns the dimensions from the largest to the smallest stride, or None if the tensor should be contiguous.

    It should be if it is already, or if it has gaps or elements that share memory.
    """
    order = _dense_order(value)
    return None if _is_sorted(order or (), value) else order


def is_contiguous(value: torch.Tensor) -> bool:
    """Returns whether a tensor is contiguous, for the sample's sizes: to ask itself would bind the graph to these."""
    order = _dense_order(value)
    return order is not None and _is_sorted(order, value)


def _dense_order(value: torch.Tensor) -> tuple[int, ...] | None:
    return dense_order([hint(size) for size in value.shape], [hint(stride) for stride in value.stride()])


def _is_sorted(order: Sequence[int], value: torch.Tensor) -> bool:
    """Returns whether dimensions are in order, but for those of size 1."""
    large = [axis for axis in order if hint(value.shape[axis]) != 1]
    return large == sorted(large)


def same_sizes(mine: Sequence[int | torch.SymInt], others: Sequence[int | torch.SymInt]) -> bool:
    """Returns whether two shapes are equal as expressions: comparing sizes would bind the graph to the sample."""
    sides = ([size if isinstance(size, int) else size.node.expr for size in sizes] for sizes in (mine, others))
    return next(sides) == next(sides)


def product_flops(left: Node, right: Node) -> float:
    """Returns the floating-point operations of a matrix product (..., m, k) x (..., k, n), for the sample's sizes."""
    return 2.0 * number_of_elements(left.meta["val"]) * hint(right.meta["val"].shape[-1])


def reached(nodes: Iterable[Node], neighbours: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """Returns nodes, their neighbours, the neighbours of these, and so on."""
    seen: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += neighbours(node)
    return seen


def needed_for(results: Iterable[Node], but: Collection[Node] = (), sizes: bool = False) -> set[Node]:
    """Returns the given results and everything that they are computed from.

    Args:
        results: The results.
        but: Nodes to stop at; they are not returned.
        sizes: Whether to include nodes that compute symbolic sizes from those of the batch.
    """

    def kept(nodes: Iterable[Node]) -> list[Node]:
        return [node for node in nodes if node not in but and (sizes or tensors_of(node) or _is_of_values(node))]

    return reached(kept(results), lambda node: kept(node.all_input_nodes))


def _is_of_values(node: Node) -> bool:
    """Returns whether a node is a size that values decide: only what creates it tells it."""
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt) and value.node.hint is None


def marks_reaching(
    nodes: Iterable[Node], marked: Collection[Node], neighbours: Callable[[Node], Iterable[Node]]
) -> dict[Node, set[Node]]:
    """Returns for each node the marked ones that a walk through neighbours reaches from it.

    Args:
        nodes: All nodes; each comes after its neighbours.
        marked: The marked nodes.
        neighbours: What a node is computed from, for example, or what is computed from it.
    """
    marks: dict[Node, set[Node]] = {}
    for node in nodes:
        marks[node] = {node}.intersection(marked).union(*(marks[other] for other in neighbours(node)))
    return marks


def inputs_first(nodes: Iterable[Node], computed: Iterable[Node] = ()) -> list[Node]:
    """Returns nodes and what they are computed from, each after its inputs; otherwise keeps the order.

    Args:
        nodes: The nodes.
        computed: Nodes to stop at; they are not returned.
    """
    done = set(computed)
    order: list[Node] = []
    for node in nodes:
        waiting = [node]
        while waiting:
            last = waiting[-1]
            missing = [] if last in done else [source for source in last.all_input_nodes if source not in done]
            if missing:
                waiting += missing
                continue
            waiting.pop()
            if last not in done:
                done.add(last)
                order.append(last)
    return order
