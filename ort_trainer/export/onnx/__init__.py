"""Reads ONNX models as PyTorch modules, from which training graphs are exported as from any other."""

from .describe import describe_onnx
from .load import FOLDED_FROM, OnnxModel, float_name, load_onnx_model
from .module import OnnxModule
from .shapes import infer_shapes, known_shapes, shape_of

__all__ = [
    "FOLDED_FROM",
    "OnnxModel",
    "OnnxModule",
    "describe_onnx",
    "float_name",
    "infer_shapes",
    "known_shapes",
    "load_onnx_model",
    "shape_of",
]
