"""The second way in: an ONNX model of a forward pass becomes a training graph. Needs onnxruntime-training."""

from .build import OnnxGraphBuilder, OnnxStep
from .describe import check_description, describe_onnx
from .gradient import GradientNode, constant_like, register_gradient
from .load import OnnxModel, load_onnx_model

__all__ = [
    "GradientNode",
    "OnnxGraphBuilder",
    "OnnxModel",
    "OnnxStep",
    "check_description",
    "constant_like",
    "describe_onnx",
    "load_onnx_model",
    "register_gradient",
]
