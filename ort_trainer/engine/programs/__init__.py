"""PyTorch's kernels as nodes of a graph, called through ONNX Runtime's operator ``org.pytorch.aten::ATen``."""

from .program import Program

__all__ = ["Program"]
