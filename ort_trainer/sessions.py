"""Makes sessions of ONNX Runtime, which is given: each engine of this package imports it in a place of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["new_session"]

_FUSIONS = ("MatMulScaleFusion", "MatmulTransposeFusion", "QuickGeluFusion")


def new_session(onnxruntime: Any, model: bytes, options: Any, providers: Sequence[Any]) -> Any:
    """Returns an ``InferenceSession`` of a model.

    ONNX Runtime's optimizer makes operators for whose types it then has no kernel: of a transposition and a product of
    doubles, for one. Such a model gets a session without these fusions.
    """
    try:
        return onnxruntime.InferenceSession(model, options, list(providers))
    except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented:  # there is no kernel
        return onnxruntime.InferenceSession(model, options, list(providers), disabled_optimizers=list(_FUSIONS))
