"""Normalizations by means and variances: of batches, instances, layers, groups, and of neighbouring channels."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..node_table import Node, operator

_Tensor = torch.Tensor


@operator("BatchNormalization", since=7, updates={1: 3, 2: 4})
def _batch_normalization(
    x: _Tensor,
    scale: _Tensor,
    bias: _Tensor,
    mean: _Tensor,
    variance: _Tensor,
    *,
    epsilon: float,
    momentum: float,
    training_mode: int | None = None,
    node: Node,
) -> tuple[_Tensor, ...]:
    """Normalizes by the statistics of the batch, if both the node and the model are in training mode.

    Returns:
        The output, the new running statistics, and the statistics of the batch, which are outputs up to version 13.
    """
    # Before version 14, a node exported for training has more outputs than y: the statistics.
    for_training = node.outputs > 1 if training_mode is None else bool(training_mode)
    dtype = torch.promote_types(x.dtype, torch.float32) if x.dtype != scale.dtype or x.dtype != mean.dtype else x.dtype
    scale, bias = scale.to(dtype), bias.to(dtype)
    values = x.to(dtype)
    if not (for_training and node.training):
        # torch.batch_norm has no gradient for the running statistics, which may be trained parameters here.
        if mean.requires_grad or variance.requires_grad:
            shape = [-1] + [1] * (x.dim() - 2)
            factor = scale * torch.rsqrt(variance.to(dtype) + epsilon)
            y = (values - mean.to(dtype).reshape(shape)) * factor.reshape(shape) + bias.reshape(shape)
            return (y.to(x.dtype), mean, variance, mean, variance)[: node.outputs]
        y = torch.batch_norm(values, scale, bias, mean.to(dtype), variance.to(dtype), False, 0.0, epsilon, False)
        return (y.to(x.dtype), mean, variance, mean, variance)[: node.outputs]
    # With momentum 1, PyTorch stores the statistics of the batch themselves. Its running variance is that of a sample
    # (divided by n - 1), ONNX's that of the population (divided by n).
    batch_mean, sample_variance = values.new_zeros(mean.shape), values.new_zeros(variance.shape)
    y = torch.batch_norm(values, scale, bias, batch_mean, sample_variance, True, 1.0, epsilon, False)
    count = x.numel() // x.shape[1]
    batch_statistics = batch_mean.to(mean.dtype), (sample_variance * ((count - 1) / count)).to(variance.dtype)
    updated = [
        old * momentum + new * (1 - momentum) for old, new in zip((mean, variance), batch_statistics, strict=True)
    ]
    return y.to(x.dtype), *updated, *batch_statistics


@operator("InstanceNormalization", since=6)
def _instance_normalization(x: _Tensor, scale: _Tensor, bias: _Tensor, *, epsilon: float) -> _Tensor:
    return torch.instance_norm(x, scale, bias, None, None, True, 0.0, epsilon, False)


@operator("LayerNormalization")
@operator("LayerNormalization", domain="com.microsoft")
def layer_normalized(
    x: _Tensor,
    scale: _Tensor,
    bias: _Tensor | None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
    node: Node,
) -> tuple[_Tensor, ...]:
    """Computes LayerNormalization, ONNX's and that of ONNX Runtime, which came first, in either domain.

    Returns:
        The output; mean and inverse standard deviation only if something uses them.

    Raises:
        ExportError: If ``stash_type`` is not float.
    """
    check_stash_type(stash_type, node)
    sizes = x.shape[axis:]
    if scale.shape == sizes and (bias is None or bias.shape == sizes) and x.dtype == scale.dtype:
        y = F.layer_norm(x, sizes, scale, bias, epsilon)
    else:
        y = F.layer_norm(x, sizes, None, None, epsilon) * scale
        y = (y if bias is None else y + bias).to(x.dtype)
    if not (node.wants(1) or node.wants(2)):
        return (y,)
    axes = tuple(range(axis % x.dim(), x.dim()))
    variance, mean = torch.var_mean(x.to(torch.promote_types(x.dtype, torch.float32)), axes, correction=0, keepdim=True)
    return y, mean.float(), torch.rsqrt(variance + epsilon).float()


def check_stash_type(stash_type: int, node: Node) -> None:
    """Refuses other types than float32 for the statistics."""
    if stash_type != 1:
        raise node.error(f"stash_type is {stash_type}, but only 1, float32, is supported")


@operator("GroupNormalization", since=18, until=20)
def _group_normalization_of_groups(
    x: _Tensor, scale: _Tensor, bias: _Tensor, *, epsilon: float, num_groups: int
) -> _Tensor:
    each = x.shape[1] // num_groups
    scale, bias = (v.unsqueeze(1).expand(num_groups, each).reshape(num_groups * each) for v in (scale, bias))
    return F.group_norm(x, num_groups, scale, bias, epsilon)


@operator("GroupNormalization", since=21)
def _group_normalization(
    x: _Tensor, scale: _Tensor, bias: _Tensor, *, epsilon: float, num_groups: int, stash_type: int, node: Node
) -> _Tensor:
    check_stash_type(stash_type, node)
    return F.group_norm(x, num_groups, scale, bias, epsilon)


@operator("RMSNormalization", since=23)
def _rms_normalization(
    x: _Tensor, scale: _Tensor, *, axis: int, epsilon: float, stash_type: int, node: Node
) -> _Tensor:
    check_stash_type(stash_type, node)
    return rms_normalized(x, scale, axis, epsilon)[0]


def rms_normalized(x: _Tensor, scale: _Tensor, axis: int, epsilon: float) -> tuple[_Tensor, _Tensor]:
    """Divides by the root of the mean square.

    Returns:
        The output, and the inverse root in float32 or wider.
    """
    values = x.to(torch.promote_types(x.dtype, torch.float32))
    axes = tuple(range(axis % x.dim(), x.dim()))
    inverse = torch.rsqrt(values.square().mean(axes, keepdim=True) + epsilon)
    return ((values * inverse).to(x.dtype) * scale).to(scale.dtype), inverse


@operator("LRN")
def _local_response_normalization(x: _Tensor, *, alpha: float, beta: float, bias: float, size: int) -> _Tensor:
    # For an even size, PyTorch's window is shifted by one channel from ONNX's.
    before = (size - 1) // 2
    squares = F.pad(x.square().flatten(2).unsqueeze(1), [0, 0, before, size - 1 - before])
    mean = F.avg_pool2d(squares, (size, 1), 1).reshape(x.shape)
    return x / (bias + alpha * mean).pow(beta)
