"""Gradients of depthwise convolutions."""

from __future__ import annotations

import math
import operator

import torch

from ....fx.values import arguments_of, memory_order

__all__ = ["sum_bias_gradients"]

aten = torch.ops.aten

CHANNELS_LAST = (0, 2, 3, 1)


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


def _is_slow(node: torch.fx.Node) -> bool:
    """Returns whether oneDNN's gradient of the bias takes longer than the sum.

    On an AMD EPYC the three gradients took 1.05 to 1.65 times as long as two and the sum for tensors in channels-last
    order (1 to 2 threads, 4 x 4 to 64 x 64 pixels). For contiguous ones, and for kernels of 3 x 3 with one output per
    channel, the times are equal, or the sum is slower by up to 6 %.
    """
    arguments = arguments_of(node)
    x, weight = arguments["input"].meta["val"], arguments["weight"].meta["val"]
    depthwise = weight.dim() == 4 and weight.shape[1] == 1 and arguments["groups"] > 1 and not arguments["transposed"]
    return (
        depthwise
        and arguments["output_mask"][2]
        and x.dtype == torch.float32
        and memory_order(x) == CHANNELS_LAST
        and (math.prod(weight.shape[2:]) > 9 or weight.shape[0] > arguments["groups"])
    )
