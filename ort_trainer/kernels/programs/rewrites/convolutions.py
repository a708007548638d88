"""Gradients of depthwise convolutions."""

from __future__ import annotations

import math
import operator

import torch

from ....engine.programs.processor import slow_mkl
from ....fx.values import Node, arguments_of, call, memory_order

aten = torch.ops.aten

_CHANNELS_LAST = (0, 2, 3, 1)


def order_images(graph: torch.fx.Graph) -> None:
    """Computes gradients of depthwise convolutions with large kernels in channels-last order::

        convolution_backward(gradient, x, ...)    =>    convolution_backward(clone(gradient), clone(x), ...)

    In contiguous order they took 1.3 to 3.5 times as long as this, with the copies, on an AMD EPYC (1 to 2 threads,
    7 x 7 to 64 x 64 pixels, kernels from 5 x 5 on). For kernels of 3 x 3 the copies take longer than they save.
    """
    if not slow_mkl():  # Intel's processors were not measured
        return
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        x, weight, depthwise = _images(node)
        if not depthwise or math.prod(weight.shape[2:]) <= 9 or memory_order(x) is not None:
            continue
        with x.fake_mode, torch.no_grad():  # type: ignore[attr-defined]
            for place in (0, 1):
                node.update_arg(place, _copy(node.args[place], node, torch.channels_last))
            node.meta["val"] = node.target(*torch.fx.map_arg(node.args, lambda source: source.meta["val"]))
            for gradient in [user for user in node.users if user.args[1] == 0]:
                readers = list(gradient.users)
                gradient.meta["val"] = node.meta["val"][0]
                contiguous = _copy(gradient, gradient.next, torch.contiguous_format)
                for reader in readers:
                    reader.replace_input_with(gradient, contiguous)


def _copy(value: Node, before: Node, order: torch.memory_format) -> Node:
    """Inserts a copy in another order; the fake mode must be active."""
    with before.graph.inserting_before(before):
        copy = call(before.graph, aten.clone.default, value, memory_format=order)
    copy.meta = {**value.meta, **copy.meta}
    return copy


def sum_bias_gradients(graph: torch.fx.Graph) -> None:
    """Computes bias gradients of depthwise convolutions by a sum, where oneDNN, which computes all three, is slow::

    convolution_backward(gradient, x, weight, [..., ..., True])[2]    =>    sum(gradient, [0, 2, 3])
    """
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        if not _is_slow(node):
            continue
        gradient, *others, mask = node.args
        node.args = (gradient, *others, [*mask[:2], False])
        for user in list(node.users):
            if user.target is operator.getitem and user.args[1] == 2:
                user.target, user.args = aten.sum.dim_IntList, (gradient, [0, 2, 3])


def _is_slow(node: Node) -> bool:
    """Returns whether oneDNN's gradient of the bias takes longer than the sum.

    On an AMD EPYC the three gradients took 1.05 to 1.65 times as long as two and the sum for tensors in channels-last
    order (1 to 2 threads, 4 x 4 to 64 x 64 pixels). For contiguous ones, and for kernels of 3 x 3 with one output per
    channel, the times are equal, or the sum is slower by up to 6 %.
    """
    x, weight, depthwise = _images(node)
    arguments = arguments_of(node)
    return (
        depthwise
        and arguments["output_mask"][2]
        and memory_order(x) == _CHANNELS_LAST
        and (math.prod(weight.shape[2:]) > 9 or weight.shape[0] > arguments["groups"])
    )


def _images(node: Node) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Returns what a convolution's gradient takes: the images, the weight, and whether it is depthwise and of fp32."""
    arguments = arguments_of(node)
    x, weight = arguments["input"].meta["val"], arguments["weight"].meta["val"]
    depthwise = weight.dim() == 4 and weight.shape[1] == 1 and arguments["groups"] > 1 and not arguments["transposed"]
    return x, weight, depthwise and x.dtype == torch.float32
