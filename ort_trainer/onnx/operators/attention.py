"""Attention, rotary embeddings and linear attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..joins import DOMAIN
from ..node_table import Node, operator
from ..values import Number, torch_dtype
from .windows import padded

_Tensor = torch.Tensor
_INFINITY = float("-inf")


@operator("Attention", since=23)
def _attention(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    mask: _Tensor | None,
    past_key: _Tensor | None,
    past_value: _Tensor | None,
    lengths: _Tensor | None,
    *,
    is_causal: int,
    kv_num_heads: int | None = None,
    left_window_size: int = -1,
    q_num_heads: int | None = None,
    qk_matmul_output_mode: int,
    right_window_size: int = -1,
    scale: float | None = None,
    softcap: float,
    softmax_precision: int | None = None,
    node: Node,
) -> tuple[_Tensor, ...]:
    is_flat = q.dim() == 3
    if is_flat:
        if not q_num_heads or not kv_num_heads:
            raise node.error("its inputs have three dimensions, so q_num_heads and kv_num_heads are needed")
        q, k, v = heads(q, q_num_heads), heads(k, kv_num_heads), heads(v, kv_num_heads)
    offset: Any = 0
    if past_key is not None and past_value is not None:
        offset = past_key.shape[2]
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    elif lengths is not None:
        offset = (lengths - q.shape[2]).reshape(-1, 1, 1, 1)
    present = k, v
    k, v = repeated(k, q.shape[1]), repeated(v, q.shape[1])
    scale = 1 / math.sqrt(q.shape[3]) if scale is None else scale
    windows = left_window_size, right_window_size
    is_plain = mask is None and lengths is None and windows == (-1, -1) and softcap == 0
    is_plain = is_plain and not (is_causal and past_key is not None)
    precision = None if softmax_precision is None else torch_dtype(softmax_precision)
    if is_plain and precision in (None, torch.float32, q.dtype) and not node.wants(3):
        # PyTorch's own attention aligns a causal mask at the first key too.
        y = F.scaled_dot_product_attention(q, k, v, is_causal=bool(is_causal), scale=scale)
        return (flattened(y) if is_flat else y), *present
    allowed = visible(q.shape[2], k.shape[2], offset, bool(is_causal), *windows)
    if lengths is not None:
        inside = torch.arange(k.shape[2]) < lengths.reshape(-1, 1, 1, 1)
        allowed = inside if allowed is None else allowed & inside
    bias = _bias(mask, allowed, q, k.shape[2])
    # As ONNX defines it, for numerical stability: q and k are scaled by the root each, instead of the scores.
    root = math.sqrt(scale)
    scores = (q * root) @ (k * root).transpose(2, 3)
    # What the fourth output returns, by qk_matmul_output_mode.
    steps = [scores]
    scores = softcap * torch.tanh(scores / softcap) if softcap > 0 else scores
    steps.append(scores)
    scores = scores if bias is None else scores + bias
    steps.append(scores)
    probabilities = guarded_softmax(scores.to(precision or scores.dtype), bias).to(q.dtype)
    steps.append(probabilities)
    y = probabilities @ v
    if not 0 <= qk_matmul_output_mode <= 3:
        raise node.error(f"qk_matmul_output_mode is {qk_matmul_output_mode}, but must be 0, 1, 2 or 3")
    return (flattened(y) if is_flat else y), *present, steps[qk_matmul_output_mode]


def heads(x: _Tensor, count: int) -> _Tensor:
    """Splits the last dimension into heads: (batch, time, heads * width) -> (batch, heads, time, width)."""
    return x.reshape(x.shape[0], x.shape[1], count, x.shape[2] // count).transpose(1, 2)


def flattened(x: _Tensor) -> _Tensor:
    """Joins the heads: (batch, heads, time, width) -> (batch, time, heads * width)."""
    return x.transpose(1, 2).flatten(2)


def repeated(x: _Tensor, count: int) -> _Tensor:
    """Repeats each head of keys or values for the query heads that share it."""
    return x if x.shape[1] == count else x.repeat_interleave(count // x.shape[1], 1)


def visible(
    queries: Number, keys: Number, offset: Any, is_causal: bool, left: int = -1, right: int = -1
) -> _Tensor | None:
    """Returns the keys that each query may see, (queries, keys) or with the dimensions of ``offset``; None for all.

    Args:
        queries: The number of queries.
        keys: The number of keys.
        offset: The number of keys before the first query: one number, or one per batch entry, (batch, 1, 1, 1).
        is_causal: Whether queries see no later keys.
        left: How many earlier keys they see; -1 for all.
        right: How many later keys they see; -1 for all.
    """
    if not is_causal and left < 0 and right < 0:
        return None
    distance = torch.arange(keys) - (torch.arange(queries).unsqueeze(1) + offset)
    allowed = distance <= 0 if is_causal else torch.ones_like(distance, dtype=torch.bool)
    if left >= 0:
        allowed = allowed & (distance >= -left)
    return allowed & (distance <= right) if right >= 0 else allowed


def _bias(mask: _Tensor | None, allowed: _Tensor | None, q: _Tensor, keys: Number) -> _Tensor | None:
    """Returns the bias of the scores: the mask, and minus infinity where a query may not see a key."""
    if mask is None:
        return None if allowed is None else torch.zeros_like(allowed, dtype=q.dtype).masked_fill(~allowed, _INFINITY)
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, _INFINITY)
    # A mask may cover the first keys only; the others are hidden.
    mask = padded(mask, [0], [keys - mask.shape[-1]], _INFINITY)
    return mask if allowed is None else mask.masked_fill(~allowed, _INFINITY)


@operator("ScaledDotProduct", domain=DOMAIN)
def _scaled_dot_product(q: _Tensor, k: _Tensor, v: _Tensor, mask: _Tensor | None) -> _Tensor:
    """Computes attention for nodes joined by ``joins.py``: k comes transposed, and the scores are not scaled."""
    is_batch = q.dim() == k.dim() == v.dim() >= 3 and q.shape[:-2] == k.shape[:-2] == v.shape[:-2]
    if is_batch and (mask is None or _fits(mask, [*q.shape[:-1], k.shape[-1]])):
        return F.scaled_dot_product_attention(q, k.transpose(-1, -2), v, mask, scale=1.0)
    scores = q @ k
    if mask is None:
        return torch.softmax(scores, -1) @ v
    scores = scores + mask
    return guarded_softmax(scores, mask.expand(scores.shape)) @ v


def _fits(mask: _Tensor, shape: Sequence[Number]) -> bool:
    """Returns whether a mask broadcasts to the shape of the scores, without enlarging it."""
    sizes = zip(reversed(mask.shape), reversed(shape), strict=False)
    return 2 <= mask.dim() <= len(shape) and all((isinstance(a, int) and a == 1) or a == b for a, b in sizes)


def guarded_softmax(scores: _Tensor, bias: _Tensor | None) -> _Tensor:
    """Returns the softmax over keys, with zeros for queries that see no key.

    For such a query all scores are -inf, and their softmax is NaN. They are replaced before the softmax too, so that
    the gradient is zero instead of NaN.
    """
    if bias is None:
        return torch.softmax(scores, -1)
    blind = (bias == _INFINITY).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(blind, 0), -1).masked_fill(blind, 0)


@operator("RotaryEmbedding", since=23)
def _rotary_embedding(
    x: _Tensor,
    cosines: _Tensor,
    sines: _Tensor,
    positions: _Tensor | None,
    *,
    interleaved: int,
    num_heads: int | None = None,
    rotary_embedding_dim: int,
    node: Node,
) -> _Tensor:
    if positions is not None:
        cosines, sines = cosines[positions.long()], sines[positions.long()]
    if x.dim() == 4:
        return rotated(x, cosines.unsqueeze(1), sines.unsqueeze(1), bool(interleaved), rotary_embedding_dim)
    if not num_heads:
        raise node.error("its input has three dimensions, so num_heads is needed")
    split = x.reshape(x.shape[0], x.shape[1], num_heads, x.shape[2] // num_heads)
    turned = rotated(split, cosines.unsqueeze(2), sines.unsqueeze(2), bool(interleaved), rotary_embedding_dim)
    return turned.reshape(x.shape)


def rotated(x: _Tensor, cosines: _Tensor, sines: _Tensor, interleaved: bool, size: int = 0) -> _Tensor:
    """Rotates pairs of elements in the last dimension.

    Args:
        x: The vectors.
        cosines: The cosines of the angles, broadcast to half of the rotated elements.
        sines: The sines.
        interleaved: Whether a pair are neighbours; otherwise one is in the first half and one in the second.
        size: The number of leading elements that are rotated; 0 for all.
    """
    size = size or x.shape[-1]
    part, rest = x[..., :size], x[..., size:]
    first, second = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    real, imaginary = cosines * first - sines * second, sines * first + cosines * second
    turned = torch.stack([real, imaginary], -1).flatten(-2) if interleaved else torch.cat([real, imaginary], -1)
    return torch.cat([turned, rest], -1) if size != x.shape[-1] else turned


@operator("LinearAttention", since=27)
def _linear_attention(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    past: _Tensor | None,
    decay: _Tensor | None,
    rate: _Tensor | None,
    *,
    chunk_size: int,  # a hint for speed
    kv_num_heads: int,
    q_num_heads: int,
    scale: float,
    update_rule: str,
    node: Node,
) -> tuple[_Tensor, _Tensor]:
    if update_rule not in ("linear", "gated", "delta", "gated_delta"):
        raise node.error(f"update_rule is {update_rule!r}, but must be 'linear', 'gated', 'delta' or 'gated_delta'")
    if ("gated" in update_rule) != (decay is not None) or ("delta" in update_rule) != (rate is not None):
        raise node.error("decay is for the update rules 'gated' and 'gated_delta', beta for 'delta' and 'gated_delta'")
    if not isinstance(q.shape[1], int):
        raise node.error(
            "it is computed step by step, which needs sequences of a fixed length: give that dimension of the input a "
            "fixed size"
        )
    dtype, batch = q.dtype, q.shape[0]
    kind = torch.promote_types(dtype, torch.float32)
    queries, keys, values = (
        heads(x, count).to(kind) for x, count in ((q, q_num_heads), (k, kv_num_heads), (v, kv_num_heads))
    )
    size, scale = queries.shape[3], scale or 1 / math.sqrt(queries.shape[3])
    state = values.new_zeros([batch, kv_num_heads, size, values.shape[3]]) if past is None else past.to(kind)
    # (batch, heads, time, 1), or (batch, heads, time, width of keys).
    factors = None if decay is None else heads(decay, kv_num_heads).to(kind).exp()
    rates = None if rate is None else rate.to(kind).transpose(1, 2).unsqueeze(3)
    # State S (batch, heads, key width, value width); in each step, with g = exp(decay), rate b, key k and value v:
    # S = g S;  v = b (v - S^T k) for the delta rule;  S = S + k v^T;  output = scale q^T S.
    outputs = []
    for t in range(q.shape[1]):
        if factors is not None:
            state = state * factors[:, :, t].unsqueeze(3)
        key, value = keys[:, :, t].unsqueeze(3), values[:, :, t]
        if rates is not None:
            value = rates[:, :, t] * (value - (state * key).sum(2))
        state = state + key * value.unsqueeze(2)
        outputs.append((queries[:, :, t].unsqueeze(3) * repeated(state, q_num_heads)).sum(2) * scale)
    return flattened(torch.stack(outputs, 2)).to(dtype), state.to(dtype if past is None else past.dtype)
