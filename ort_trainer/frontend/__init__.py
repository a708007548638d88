"""From the user's model to a training graph: the only callers of torch.export, AOTAutograd and torch.onnx."""

from .build import GraphBuilder, canonical_names
from .step_module import LossFunction, check_signature

__all__ = ["GraphBuilder", "LossFunction", "canonical_names", "check_signature"]
