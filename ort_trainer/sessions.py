"""Makes sessions of ONNX Runtime, and says which operators it has of itself.

ONNX Runtime is given: each engine of this package imports it in a place of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["CALLING_OUT", "DOMAINS", "new_session"]

DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "ai.onnx.training", "ai.onnx.preview.training", "com.microsoft")
"""Of operators that every ONNX Runtime has of itself; those of any other domain come from a library that is loaded."""

CALLING_OUT = ("EPContext", "PythonOp", "PythonOpGrad")
"""Of these, operators that call back into Python, or that read files which they name."""

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
