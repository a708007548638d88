"""``ORTModule``: a module whose forward and backward pass run as graphs, in any loop."""

from .ort_module import ORTModule

__all__ = ["ORTModule"]
