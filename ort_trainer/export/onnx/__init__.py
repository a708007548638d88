"""Builds training graphs from the ONNX model of a forward pass; requires onnxruntime-training."""

from .build import OnnxGraphBuilder, OnnxStep
from .describe import check_description, describe_onnx
from .gradient import GradientNode, constant_like, register_gradient
from .load import OnnxModel, load_onnx_model
from .passes.infer_shapes import infer_shapes

__all__ = [
    "GradientNode",
    "OnnxGraphBuilder",
    "OnnxModel",
    "OnnxStep",
    "check_description",
    "constant_like",
    "describe_onnx",
    "infer_shapes",
    "load_onnx_model",
    "register_gradient",
]
