"""The two ways to a training graph: from a PyTorch model and from an ONNX model, behind one face."""

from .choose import loss_function, model_source
from .model_source import BORROWED, Builder, ModelSource

__all__ = ["BORROWED", "Builder", "ModelSource", "loss_function", "model_source"]
