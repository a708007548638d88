"""Divides a captured graph into the programs that become its nodes.

A run without the backward pass leaves out the programs that its outputs do not need, so there must be several; but
only within a program can an operator overwrite what another has computed. So a program collects operators in graph
order until they add up to enough work::

    layer_norm -> addmm -> gelu -> addmm -> ...    =>    [layer_norm, addmm] -> [gelu, addmm] -> ...

A view costs nothing and is repeated in every program that uses it; programs pass whole tensors to each other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection
from typing import Any

import torch

from ...engine.programs.program import may_call
from ...fx.operator_table import is_registered_by_user
from ...fx.symbols import hint, number_of_elements, size_in_bytes
from ...fx.values import Node, is_view, marks_reaching, product_flops, refuse, tensors_of

aten = torch.ops.aten

# A program is long enough at this many seconds of work, on a processor with this throughput per second.
_ENOUGH = 10e-3
_FLOPS, _BYTES = 100e9, 10e9
_OPERATOR = 2e-6


def partition(graph: torch.fx.Graph, apart: Collection[Node] = (), last: Collection[Node] = ()) -> list[list[Node]]:
    """Returns the operators of each program, in the order of the graph.

    Args:
        graph: The graph.
        apart: Results that a run may leave out: all operators of a program are needed for the same ones of them.
        last: Operators after which a program ends.

    Raises:
        ExportError: If a program can't run an operator of the graph.
    """
    programs: list[list[Node]] = [[]]
    places: dict[Node, list[Node]] = {}
    work, needed_by = 0.0, marks_reaching(reversed(graph.nodes), apart, operator.attrgetter("users"))
    for node in graph.nodes:
        if node.op != "call_function" or not tensors_of(node):
            continue  # sizes are computed within the programs that need them
        if is_view(node):
            continue
        if node.target is operator.getitem:
            (source,) = node.all_input_nodes
            if source not in places:  # such as what saves the state of a generator for a checkpoint of activations
                raise refuse(source, "is not a plain operator")
            places[source].append(node)
            continue
        if not isinstance(node.target, torch._ops.OpOverload):
            raise refuse(node, "is not a plain operator")
        if is_registered_by_user(node.target):
            raise refuse(node, "is registered for ONNX")
        if not may_call(node.target):
            raise refuse(
                node,
                "is not one of PyTorch's operators on tensors",
                "\nChoose one of PyTorch's, as options of the library that defines it may allow, say what it computes "
                "with ort_trainer.register_operator, or train with ORTModule, which runs such calls in PyTorch",
            )
        if node.target._schema.is_mutable:
            raise refuse(node, "changes its arguments")
        if work >= _ENOUGH or (programs[-1] and needed_by[node] != needed_by[programs[-1][-1]]):
            programs.append([])
            work = 0.0
        programs[-1].append(node)
        places[node] = programs[-1]
        work += _ENOUGH if node in last else _seconds(node)
    return [program for program in programs if program]


def _seconds(node: Node) -> float:
    """Estimates how long an operator takes."""
    count = _COUNTS.get(node.target)
    flops = 0.0 if count is None else count(*node.args)
    moved = sum(size_in_bytes(value) for part in (node, *node.all_input_nodes) for value in tensors_of(part))
    return max(flops / _FLOPS, moved / _BYTES) + _OPERATOR


def _linear(value: Node, weight: Node, *_: Any) -> float:
    return 2.0 * number_of_elements(value.meta["val"]) * hint(weight.meta["val"].shape[0])


def _convolution(value: Node, weight: Node, *_: Any) -> float:
    # Approximately: every element of the input meets every weight of its channel.
    elements, weights = (number_of_elements(node.meta["val"]) for node in (value, weight))
    return 2.0 * elements / hint(value.meta["val"].shape[1]) * weights


def _attention(query: Node, key: Node, *_: Any) -> float:
    # Two products, query x key and weights x value, each of 2 * (batch * heads * time * width) * time operations.
    return 4.0 * number_of_elements(query.meta["val"]) * hint(key.meta["val"].shape[-2])


_COUNTS: dict[Any, Callable[..., float]] = {
    aten.mm.default: product_flops,
    aten.bmm.default: product_flops,
    aten.addmm.default: lambda _, left, right, *rest: product_flops(left, right),
    aten.baddbmm.default: lambda _, left, right, *rest: product_flops(left, right),
    torch.ops.ort_trainer.linear.default: _linear,
    aten.convolution.default: _convolution,
    # Of a convolution, the gradients of input and weight; of attention, five products instead of two.
    aten.convolution_backward.default: lambda _, value, weight, *rest: 2 * _convolution(value, weight),
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: lambda _, q, k, *rest: 2.5 * _attention(q, k),
}
