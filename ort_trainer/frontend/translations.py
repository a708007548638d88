"""ATen operators that torch.onnx does not translate, translated to ONNX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from onnxscript import opset18 as op
from onnxscript.onnx_types import TensorType

__all__ = ["TRANSLATIONS"]

aten = torch.ops.aten


def sym_numel(value: TensorType) -> TensorType:
    """The number of elements of a tensor, as batch norm's gradient needs it."""
    return op.Size(value)


TRANSLATIONS: dict[Any, Callable[..., Any]] = {aten.sym_numel.default: sym_numel}
