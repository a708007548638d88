"""Turns the user's model into training graphs: the only callers of torch.export, AOTAutograd and torch.onnx."""

from .builder import GraphBuilder
from .describe import describe, name_sample
from .operators import register_operator
from .step_module import ExportedStep, LossFunction, RecomputeOptions, canonical_names, check_signature, takes_label

__all__ = [
    "ExportedStep",
    "GraphBuilder",
    "LossFunction",
    "RecomputeOptions",
    "canonical_names",
    "check_signature",
    "describe",
    "name_sample",
    "register_operator",
    "takes_label",
]
