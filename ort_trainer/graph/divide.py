"""Divides the joint graph of a call into the graph of the forward pass and that of the backward pass.

The backward pass takes the forward values that it reads, except for those that ``recompute.py`` lets it recompute::

    inputs ---> forward ---> results
       |           | saved
       v           v
    tangents -> backward --> gradients
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from ..fx.symbols import number_of_elements
from ..fx.values import base_of, inputs_first, is_tensor, marks_reaching, needed_for, reached, tensors_of

aten = torch.ops.aten
Node = torch.fx.Node


@dataclass
class Part:
    """A part of a graph, as a graph of its own.

    Attributes:
        module: The graph.
        inputs: Name of a node of the whole graph -> the placeholder that takes its value.
        results: The nodes that it returns; None for a gradient that is zero.
    """

    module: torch.fx.GraphModule
    inputs: dict[str, Node]
    results: list[Node | None]


@dataclass
class Divided:
    """Both passes.

    Attributes:
        forward: The forward pass; after its own results it returns what is saved.
        saved: Names of the joint graph's nodes that the forward pass returns in addition, for the backward pass.
        backward: The backward pass.
    """

    forward: Part
    saved: list[str]
    backward: Part


def divide(
    joint: torch.fx.GraphModule,
    of_forward: Sequence[Node],
    of_backward: Sequence[Node],
    again: Collection[Node],
    sizes: bool,
) -> Divided:
    """Divides a joint graph.

    Args:
        joint: The graph. The placeholders of tangents have ``tangents`` in their names.
        of_forward: The results of the forward pass.
        of_backward: The results of the backward pass.
        again: Forward values that the backward pass computes again, from others that it reads.
        sizes: Whether the parts compute symbolic sizes. Programs read them from the shapes of their inputs.
    """
    graph = joint.graph
    inputs = graph.find_nodes(op="placeholder")
    within = needed_for(of_forward)
    # The backward pass may read another item of an operator with several results, such as a layer norm's mean.
    within |= {user for node in within for user in node.users if user.target is operator.getitem}
    within = {node for node in within if tensors_of(node)} - set(again)
    later = needed_for(of_backward, within)
    read = [node for node in graph.nodes if node in within and any(user in later for user in node.users)]
    read += [node for node in of_backward if node in within and node not in read]
    saved = _bases(read, {*inputs, *of_forward})
    # The backward pass takes views of what is saved again.
    later = needed_for(of_backward, saved, sizes)
    taken = [node for node in inputs if node in later]
    tangents = [node for node in taken if "tangents" in str(node.target)]
    # Gradients keep their order. Views and recomputed values come where one needs them, so that they don't live longer.
    backward = part_of(graph, later, [*taken, *saved], of_backward, reached(tangents, operator.attrgetter("users")))
    extra = [node for node in saved if node not in of_forward]
    within = needed_for([*of_forward, *extra], (), sizes)
    return Divided(part_of(graph, within, inputs, [*of_forward, *extra]), [node.name for node in extra], backward)


def _bases(saved: Sequence[Node], in_memory: Collection[Node]) -> list[Node]:
    """Replaces views among saved values by their bases, where that takes no more memory.

    A view would be copied if its memory is that of an input or of another result. Inputs themselves are left out.

    Args:
        saved: The values.
        in_memory: What is in memory anyway.
    """
    elements: dict[Node, int] = {}
    for node in saved:
        elements[base_of(node)] = elements.get(base_of(node), 0) + number_of_elements(node.meta["val"])
    bases: dict[Node, None] = {}
    for node in saved:
        base = base_of(node)
        fits = base in in_memory or base in saved
        is_same = is_tensor(base) and base.meta["val"].dtype == node.meta["val"].dtype  # ONNX has no complex numbers
        if is_same and (fits or elements[base] >= number_of_elements(base.meta["val"])):
            node = base
        bases[node] = None
    return [node for node in bases if node.op != "placeholder"]


def part_of(
    joint: torch.fx.Graph,
    nodes: Collection[Node],
    inputs: Sequence[Node],
    results: Sequence[Node],
    first: Collection[Node] = (),
) -> Part:
    """Returns a part of a graph.

    Args:
        joint: The graph.
        nodes: The operators of the part.
        inputs: What it takes.
        results: What it returns.
        first: Operators that keep their order; others are computed when these or results need them. If there are none,
            all keep their order.
    """
    graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    order = [node for node in joint.nodes if node in nodes]
    sizes = dict.fromkeys(source for node in order for source in node.all_input_nodes if source not in nodes)
    for node in dict.fromkeys([*inputs, *sizes]):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta.update(node.meta)
    if first:
        order = [node for node in order if node in first] + [node for node in results if node in nodes]
    for node in inputs_first(order, copies):
        copies[node] = graph.node_copy(node, copies.__getitem__)
    returned = [copies[node] for node in results]
    graph.output(tuple(returned))
    return Part(torch.fx.GraphModule({}, graph), {node.name: copies[node] for node in inputs}, [*returned])


def depends_on(part: Part, tangents: Collection[Node]) -> dict[Node, set[Node]]:
    """Returns which tangents each node of a backward pass depends on."""
    return marks_reaching(part.module.graph.nodes, tangents, operator.attrgetter("all_input_nodes"))


def independent(part: Part, tangents: Collection[Node]) -> list[set[Node]]:
    """Returns the tangents in groups: what is computed from one group is not computed from another.

    Sums of gradients that the pass returns do not count, as autograd itself adds what the groups give a parameter.
    """
    (end,) = part.module.graph.find_nodes(op="output")
    sums = {end}
    groups = [{tangent} for tangent in tangents]
    for node in reversed(part.module.graph.nodes):
        if node.target is aten.add.Tensor and sums.issuperset(node.users):
            sums.add(node)
    for node, needed in depends_on(part, tangents).items():
        joined = [group for group in groups if group & needed] if node not in sums else []
        if len(joined) > 1:
            groups = [*(group for group in groups if group not in joined), set().union(*joined)]
    return groups


def without(part: Part, tangents: Collection[Node], absent: Collection[Node]) -> None:
    """Removes tangents that are not given from a backward pass, in place, as if PyTorch had no gradient for them.

    A backward pass is linear in its tangents, so what depends only on absent ones is zero. PyTorch does not compute it,
    and a parameter whose gradient it is gets none.

    Args:
        part: The pass.
        tangents: The placeholders of all tangents.
        absent: Those that are not given.
    """
    graph = part.module.graph
    zero = {node for node, needed in depends_on(part, tangents).items() if needed and needed <= set(absent)}
    (end,) = graph.find_nodes(op="output")
    end.args = (tuple(None if result in zero else result for result in part.results),)
    for node in list(graph.nodes):
        zeros = [] if node in zero else [source for source in node.all_input_nodes if source in zero]
        other = _other_summand(node, zeros)
        if other is not None:
            node.replace_all_uses_with(other)
            continue
        for source in zeros:
            node.replace_input_with(source, _zeros(node, source.meta["val"]))
    part.results = list(end.args[0])
    graph.eliminate_dead_code()


def _other_summand(node: Node, zeros: Sequence[Node]) -> Node | None:
    """Returns the summand that is not zero, if a node adds two tensors of one shape and dtype."""
    if len(zeros) != 1 or node.target is not aten.add.Tensor or len(node.all_input_nodes) != 2 or node.kwargs:
        return None
    (other,) = (source for source in node.all_input_nodes if source is not zeros[0])
    mine, result = other.meta["val"], node.meta["val"]
    return other if mine.shape == result.shape and mine.dtype == result.dtype else None


def _zeros(before: Node, like: torch.Tensor) -> Node:
    """Inserts zeros; symbolic sizes are placeholders, as elsewhere in a part."""
    graph, shape = before.graph, []
    for size in like.shape:
        if isinstance(size, torch.SymInt):
            with graph.inserting_before(next(iter(graph.nodes))):
                shape.append(graph.placeholder("size"))
            shape[-1].meta["val"] = size
        else:
            shape.append(size)
    with graph.inserting_before(before):
        zeros = graph.call_function(aten.full.default, (shape, 0), {"dtype": like.dtype})
    zeros.meta["val"] = like
    return zeros
