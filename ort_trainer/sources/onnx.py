"""The documented import path of :func:`register_gradient` and :class:`GradientNode`."""

from ..export.onnx import GradientNode, register_gradient

__all__ = ["GradientNode", "register_gradient"]
