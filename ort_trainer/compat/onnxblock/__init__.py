"""onnxruntime-training's onnxblock: losses and other pieces of a graph, put on top of an ONNX model.

A block adds nodes to the model that :func:`base` holds; ``generate_artifacts`` takes blocks as loss and optimizer.
Here, blocks do not compute gradients, so upstream's ``TrainingBlock`` is missing.
"""

from . import blocks, loss, optim
from .blocks import Block, base, empty_base

__all__ = ["Block", "base", "blocks", "empty_base", "loss", "optim"]
