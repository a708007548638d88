"""The two ways to a training graph: from a PyTorch model and from an ONNX model, behind one face."""

from .choose import LOSSES, model_source
from .model_source import BORROWED, Builder, ModelSource

__all__ = ["BORROWED", "LOSSES", "Builder", "ModelSource", "model_source"]
