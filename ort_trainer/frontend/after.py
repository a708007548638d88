"""``after``: an operator that hands a tensor on unchanged, but only when other tensors have been computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from onnxscript import opset18 as op
from onnxscript.onnx_types import TensorType

__all__ = ["AFTER", "translate_after"]

_library = torch.library.Library("ort_trainer", "DEF")  # noqa: TOR901 - operators of one library, defined once
_library.define("after(Tensor value, Tensor[] others) -> Tensor")
_library.impl("after", lambda value, others: value.clone(), "CompositeExplicitAutograd")

AFTER: Any = torch.ops.ort_trainer.after.default


def translate_after(value: TensorType, others: Sequence[TensorType]) -> TensorType:
    """Reshapes a tensor to its own shape, where the shape has empty slices of the other tensors in it.

    Nothing is copied, and no optimizer sees through it: what a slice of a computed tensor holds is known at run time
    only.
    """
    empty = [op.Cast(op.Slice(op.Reshape(other, [-1]), [0], [0], [0]), to=7) for other in others]  # 7 is int64
    keep = [op.Constant(value_ints=[0] * len(value.shape))] if len(value.shape) else []  # 0 takes a size over
    return op.Reshape(value, op.Concat(*keep, *empty, axis=0))
