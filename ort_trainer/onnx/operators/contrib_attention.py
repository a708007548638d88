"""Attention as ONNX Runtime's own domain, com.microsoft, defines it: three operators, and rotary embeddings."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from ..node_table import Node, operator
from .attention import flattened, guarded_softmax, heads, repeated, rotated, visible

_Tensor = torch.Tensor
_DOMAIN = "com.microsoft"
_INFINITY = float("-inf")


@operator("Attention", domain=_DOMAIN)
def _attention(
    x: _Tensor,
    weights: _Tensor,
    bias: _Tensor | None = None,
    mask: _Tensor | None = None,
    past: _Tensor | None = None,
    added: _Tensor | None = None,
    *,
    do_rotary: int = 0,
    mask_filter_value: float = -10000.0,
    num_heads: int,
    past_present_share_buffer: int = 0,
    qkv_hidden_sizes: list[int] | None = None,
    scale: float = 0.0,
    unidirectional: int = 0,
    node: Node,
) -> tuple[_Tensor, ...]:
    if do_rotary or past_present_share_buffer:
        raise node.error("do_rotary and past_present_share_buffer are for inference, and not supported")
    projected = torch.matmul(x, weights)
    projected = projected if bias is None else projected + bias
    sizes = qkv_hidden_sizes or [weights.shape[1] // 3] * 3
    q, k, v = (heads(part, num_heads) for part in torch.split(projected, sizes, -1))
    offset: Any = 0
    if past is not None:
        offset = past.shape[3]
        k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
    y = _attended(q, k, v, scale, bool(unidirectional), offset, _hidden(mask, k, mask_filter_value, node), added)
    return (y, torch.stack([k, v])) if node.wants(1) else (y,)


@operator("MultiHeadAttention", domain=_DOMAIN)
def _multi_head_attention(
    query: _Tensor,
    key: _Tensor | None = None,
    value: _Tensor | None = None,
    bias: _Tensor | None = None,
    mask: _Tensor | None = None,
    added: _Tensor | None = None,
    past_key: _Tensor | None = None,
    past_value: _Tensor | None = None,
    *,
    mask_filter_value: float = -10000.0,
    num_heads: int,
    scale: float = 0.0,
    unidirectional: int = 0,
    node: Node,
) -> tuple[_Tensor, ...]:
    # Packed, (batch, time, heads, 3 or 2, width): queries, keys and values, or keys and values, in one tensor.
    if query.dim() == 5 or key is None:
        if query.dim() != 5:
            raise node.error("without keys, its query must have five dimensions")
        query, key, value = (part.flatten(2) for part in query.unbind(3))
    elif key.dim() == 5:
        key, value = (part.flatten(2) for part in key.unbind(3))
    if value is None:
        raise node.error("it has no value")
    if bias is not None:
        size, last = query.shape[2], value.shape[2] if value.dim() == 3 else value.shape[1] * value.shape[3]
        of_query, of_key, of_value = torch.split(bias, [size, size, last])
        query = query + of_query
        key, value = (key + of_key, value + of_value) if key.dim() == 3 else (key, value)
    # Keys and values with four dimensions are already split into heads.
    q = heads(query, num_heads)
    k, v = (x if x.dim() == 4 else heads(x, num_heads) for x in (key, value))
    offset: Any = 0
    if past_key is not None and past_value is not None:
        offset = past_key.shape[2]
        k, v = torch.cat([past_key, k], 2), torch.cat([past_value, v], 2)
    y = _attended(q, k, v, scale, bool(unidirectional), offset, _hidden(mask, k, mask_filter_value, node), added)
    return y, k, v


@operator("GroupQueryAttention", domain=_DOMAIN)
def _group_query_attention(
    query: _Tensor,
    key: _Tensor | None,
    value: _Tensor | None,
    past_key: _Tensor | None,
    past_value: _Tensor | None,
    last: _Tensor,
    total: _Tensor | None,
    cosines: _Tensor | None = None,
    sines: _Tensor | None = None,
    positions: _Tensor | None = None,
    added: _Tensor | None = None,
    *,
    do_rotary: int = 0,
    kv_num_heads: int,
    local_window_size: int = -1,
    num_heads: int,
    rotary_interleaved: int = 0,
    scale: float = 0.0,
    softcap: float = 0.0,
    node: Node,
) -> tuple[_Tensor, ...]:
    for past in (past_key, past_value):
        if past is not None and not (isinstance(past.shape[2], int) and past.shape[2] == 0):
            raise node.error("it has keys and values of the past, which are for inference: feed ones of length 0")
    if key is None or value is None:
        size = query.shape[2] // (num_heads + 2 * kv_num_heads)
        query, key, value = torch.split(query, [num_heads * size, kv_num_heads * size, kv_num_heads * size], 2)
    q, k, v = heads(query, num_heads), heads(key, kv_num_heads), heads(value, kv_num_heads)
    if do_rotary:
        if cosines is None or sines is None:
            raise node.error("do_rotary is set, but cos_cache or sin_cache is missing")
        places = torch.arange(q.shape[2]).unsqueeze(0) if positions is None else positions.long()
        of_places = cosines[places].unsqueeze(1), sines[places].unsqueeze(1)
        size = 2 * cosines.shape[1]
        q, k = (rotated(x, *of_places, bool(rotary_interleaved), size) for x in (q, k))
    inside = torch.arange(k.shape[2]) <= last.reshape(-1, 1, 1, 1)
    # The window counts the query's own position.
    allowed = visible(q.shape[2], k.shape[2], 0, True, local_window_size - 1 if local_window_size > 0 else -1)
    assert allowed is not None
    hidden = torch.zeros(1, dtype=q.dtype).masked_fill(~(allowed & inside), _INFINITY)
    y = _attended(q, repeated(k, num_heads), repeated(v, num_heads), scale, False, 0, hidden, added, softcap)
    return y, k, v


def _attended(
    q: _Tensor,
    k: _Tensor,
    v: _Tensor,
    scale: float,
    is_causal: bool,
    offset: Any,
    hidden: _Tensor | None,
    added: _Tensor | None,
    softcap: float = 0.0,
) -> _Tensor:
    """Computes attention, and joins the heads.

    Args:
        q: The queries, (batch, heads, time, width).
        k: The keys.
        v: The values.
        scale: The factor of the scores; 0 for 1 / sqrt(width).
        is_causal: Whether queries see no later keys.
        offset: The number of keys before the first query.
        hidden: A bias of the scores that hides keys, or None.
        added: Another bias of the scores, or None.
        softcap: The limit of the scores, softcap * tanh(scores / softcap); 0 for none.
    """
    bias = hidden if added is None else added if hidden is None else hidden + added
    allowed = visible(q.shape[2], k.shape[2], offset, is_causal)
    if allowed is not None:
        none = torch.zeros(1, dtype=q.dtype) if bias is None else bias
        bias = none.masked_fill(~allowed, _INFINITY)
    factor = scale or 1 / math.sqrt(q.shape[3])
    if bias is None and softcap == 0:
        return flattened(F.scaled_dot_product_attention(q, k, v, scale=factor))
    scores = (q * factor) @ k.transpose(2, 3)
    scores = softcap * torch.tanh(scores / softcap) if softcap > 0 else scores
    return flattened(guarded_softmax(scores if bias is None else scores + bias, bias) @ v)


def _hidden(mask: _Tensor | None, k: _Tensor, value: float, node: Node) -> _Tensor | None:
    """Returns the bias of the scores that hides masked keys.

    Args:
        mask: 1 for keys to see and 0 for others, (batch, keys) or (batch, queries, keys); or lengths, (batch).
        k: The keys, (batch, heads, keys, width).
        value: The bias of a hidden key.
        node: The node, for errors.
    """
    if mask is None:
        return None
    if mask.dim() == 1:
        if isinstance(mask.shape[0], int) and isinstance(k.shape[0], int) and mask.shape[0] != k.shape[0]:
            raise node.error(f"its mask has the shape {list(mask.shape)}, but must have one length for each sequence")
        seen = torch.arange(k.shape[2]) < mask.unsqueeze(1)
    elif mask.dim() in (2, 3):
        seen = mask > 0
    else:
        raise node.error(f"its mask has {mask.dim()} dimensions, but only 1 to 3 are supported")
    seen = seen.unsqueeze(1) if seen.dim() == 3 else seen[:, None, None, :]
    return torch.zeros_like(seen, dtype=k.dtype).masked_fill(~seen, value)


@operator("RotaryEmbedding", domain=_DOMAIN)
def _rotary_embedding(
    x: _Tensor,
    positions: _Tensor,
    cosines: _Tensor,
    sines: _Tensor,
    *,
    interleaved: int = 0,
    is_packed_batching: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
    node: Node,
) -> _Tensor:
    if is_packed_batching or scale != 1:
        raise node.error("is_packed_batching and scale are not supported: leave them out")
    size = 2 * cosines.shape[1]
    if rotary_embedding_dim and not num_heads:
        raise node.error("with rotary_embedding_dim, num_heads is needed")
    split = x if x.dim() == 4 else heads(x, num_heads or x.shape[2] // size)
    # A single position is that of the first token.
    places = positions + torch.arange(split.shape[2]).unsqueeze(0) if positions.dim() == 1 else positions
    of_places = cosines[places.long()].unsqueeze(1), sines[places.long()].unsqueeze(1)
    y = rotated(split, *of_places, bool(interleaved), size)
    return y if x.dim() == 4 else flattened(y)
