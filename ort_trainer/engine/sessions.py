"""Creates ONNX Runtime sessions, and lists ONNX Runtime's built-in operator domains.

Callers pass the ONNX Runtime module: each engine of this package imports its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["CALLING_OUT", "DOMAINS", "new_session"]

DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview.training", "com.microsoft")
"""The built-in operator domains of every ONNX Runtime; operators of other domains come from loaded libraries."""

CALLING_OUT = ("EPContext", "PythonOp", "PythonOpGrad")
"""Operators of these domains that call Python, or that read files named in the model."""

_FUSIONS = ("MatMulScaleFusion", "MatmulTransposeFusion", "QuickGeluFusion")


def new_session(onnxruntime: Any, model: bytes, options: Any, providers: Sequence[Any]) -> Any:
    """Returns an ``InferenceSession`` of a model.

    ONNX Runtime's optimizer sometimes fuses operators into one for which it has no kernel, such as a transposition and
    a product of doubles. The session of such a model disables these fusions.
    """
    try:
        return onnxruntime.InferenceSession(model, options, list(providers))
    except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented:  # no kernel for a fused operator
        return onnxruntime.InferenceSession(model, options, list(providers), disabled_optimizers=list(_FUSIONS))
