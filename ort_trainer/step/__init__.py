"""The contract of a step: data in an ONNX model, and the passes over it."""

from .contract import SIZES, Dim, RandomInput, Step, TensorSpec, dtype_name

__all__ = ["SIZES", "Dim", "RandomInput", "Step", "TensorSpec", "dtype_name"]
