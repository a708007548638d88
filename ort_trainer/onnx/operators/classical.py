"""Operators of classical machine learning, as scikit-learn's pipelines have them before a linear model or a network.

They compute what ONNX Runtime does, in fp32. Statistics are attributes of the nodes, and are not trained.
"""

from __future__ import annotations

import torch

from ..classical import DOMAIN
from ..node_table import Node, operator

_Tensor = torch.Tensor


@operator("Scaler", domain=DOMAIN)
def _scaler(x: _Tensor, *, offset: list[float], scale: list[float]) -> _Tensor:
    shift, factor = (torch.tensor(values, dtype=torch.float32, device=x.device) for values in (offset, scale))
    return (x.float() - shift) * factor


@operator("Normalizer", domain=DOMAIN)
def _normalizer(x: _Tensor, *, norm: str, node: Node) -> _Tensor:
    x = x.float()
    if norm == "MAX":  # as in ONNX Runtime: the largest number, not the largest magnitude
        size = x.amax(-1, keepdim=True)
    elif norm in ("L1", "L2"):
        size = torch.linalg.vector_norm(x, int(norm[1]), -1, keepdim=True)
    else:
        raise node.error(f"its attribute 'norm' is {norm!r}, but only 'MAX', 'L1' and 'L2' are supported")
    return x / torch.where(size == 0, 1, size)


@operator("Binarizer", domain=DOMAIN)
def _binarizer(x: _Tensor, *, threshold: float) -> _Tensor:
    return (x > threshold).to(x.dtype)


@operator("Imputer", domain=DOMAIN)
def _imputer(
    x: _Tensor,
    *,
    imputed_value_floats: list[float] | None = None,
    imputed_value_int64s: list[int] | None = None,
    replaced_value_float: float,
    replaced_value_int64: int,
) -> _Tensor:
    missing = replaced_value_float if x.is_floating_point() else replaced_value_int64
    values = torch.tensor(imputed_value_floats or imputed_value_int64s, dtype=x.dtype, device=x.device)
    return torch.where(x.isnan() if missing != missing else x == missing, values, x)


@operator("FeatureVectorizer", domain=DOMAIN)
def _feature_vectorizer(*parts: _Tensor, inputdimensions: list[int]) -> _Tensor:
    return torch.cat([part.float().reshape(part.shape[0], -1) for part in parts], 1)
