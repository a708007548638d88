"""Dropout whose rate changes from step to step, as the operator ``ort_trainer::dropout``, which takes it as a tensor.

It draws what dropout of a fixed rate draws. Rates of 0 and 1, for which PyTorch draws nothing, and invalid rates tie
the graph to their value.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

# Alpha dropout replaces elements by the least value of the activation SELU, -scale * alpha = -1.0507 * 1.6733
# (Klambauer et al., Self-Normalizing Neural Networks, 2017).
_ALPHA = 1.7580993408473766


def _dropout(plain: Callable[..., Any], in_place: bool, p: Any, value: torch.Tensor, train: bool) -> torch.Tensor:
    """Stands for a function of torch; ``p`` is a ``Number``."""
    if not train:
        return value
    if not 0 < p < 1:
        return plain(value, p.fixed(), train)  # type: ignore[no-any-return]
    kept, name = 1 - p, plain.__name__
    of_channels, alpha = "feature" in name, "alpha" in name
    noise = value.new_ones((*value.shape[:2], *(1 for _ in value.shape[2:]))) if of_channels else value
    # As for a fixed rate, only the ordinary dropout may have faster masks than PyTorch's.
    dropped, mask = torch.ops.ort_trainer.dropout(noise, p.uses.scalar(kept), plain is torch.dropout)
    if alpha:
        # The affine map that restores zero mean and unit variance, with kept = 1 - p (the same paper).
        scale = ((_ALPHA**2 * p + 1) * kept) ** -0.5
        mask = mask.to(value.dtype)
        dropped = value * (mask * scale) + ((mask - 1) * (_ALPHA * scale) + _ALPHA * scale * p)
    elif of_channels:
        dropped = value * dropped
    return value.copy_(dropped) if in_place else dropped


def _attention(
    p: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Stands for ``scaled_dot_product_attention``: PyTorch's formula, with dropout on its weights."""
    settings: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
    # In half precision PyTorch rounds elsewhere than in the weights.
    half = query.dtype.itemsize < 4 or torch.is_autocast_enabled(query.device.type)
    if half or not 0 < p < 1:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, p.fixed(), **settings)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, -torch.inf)
    _, weights = torch.ops.aten._scaled_dot_product_attention_math(query, key, value, attn_mask, 0.0, **settings)
    if enable_gqa:
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    return torch.dropout(weights, p, True) @ value


DROPOUTS: dict[Any, tuple[int, str, Callable[..., torch.Tensor]]] = {
    F.scaled_dot_product_attention: (4, "dropout_p", _attention),
    **{
        plain: (1, "p", functools.partial(_dropout, plain, plain.__name__.endswith("_")))
        for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
        for plain in (getattr(torch, name), getattr(torch, f"{name}_"))
    },
}
"""Function -> position and name of its rate, and the function that replaces it if the rate changes."""
