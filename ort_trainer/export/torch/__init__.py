"""Turns the user's model into training graphs: the only callers of torch.export, AOTAutograd and torch.onnx."""

from .builder import GraphBuilder
from .capture.step_module import ExportedStep, LossFunction, RecomputeOptions, takes_label
from .operators import register_operator

__all__ = ["ExportedStep", "GraphBuilder", "LossFunction", "RecomputeOptions", "register_operator", "takes_label"]
