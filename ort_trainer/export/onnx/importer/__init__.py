"""Makes an ONNX model a PyTorch module: ``module.py`` runs it, ``operators/`` has ONNX's operators by PyTorch's."""

from .module import OnnxModule

__all__ = ["OnnxModule"]
