"""Classification losses."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ..node_table import Node, operator

_Tensor = torch.Tensor


@operator("NegativeLogLikelihoodLoss", since=12)
def _likelihood(
    logarithms: _Tensor,
    labels: _Tensor,
    weights: _Tensor | None,
    *,
    ignore_index: int | None = None,
    reduction: str,
    node: Node,
) -> _Tensor:
    if reduction not in ("none", "mean", "sum"):
        raise node.error(f"reduction is {reduction!r}, but must be 'none', 'mean' or 'sum'")
    # Without an ignored class, no label is negative: PyTorch's default ignores nothing.
    ignored = -100 if ignore_index is None else ignore_index
    # In other layouts, PyTorch's gradient fails for inputs of four dimensions.
    logarithms = logarithms.contiguous()
    return F.nll_loss(logarithms, labels.long(), weights, ignore_index=ignored, reduction=reduction)


@operator("SoftmaxCrossEntropyLoss", since=12, passing=_likelihood)
def _softmax_cross_entropy(
    scores: _Tensor,
    labels: _Tensor,
    weights: _Tensor | None,
    **attributes: Any,
) -> tuple[_Tensor, _Tensor]:
    logarithms = F.log_softmax(scores, 1)
    return _likelihood(logarithms, labels, weights, **attributes), logarithms
