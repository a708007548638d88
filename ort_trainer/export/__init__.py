"""Builds training graphs from PyTorch and ONNX models, behind one interface."""

from .choose import loss_function, model_source
from .model_source import Builder, ModelSource
from .torch.borrow import BORROWED

__all__ = ["BORROWED", "Builder", "ModelSource", "loss_function", "model_source"]
