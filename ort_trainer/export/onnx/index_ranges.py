"""Finds the inputs of an ONNX model that its losses use as class labels, and their valid ranges."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import onnx_ir as ir

from ...core.indices import IndexRange
from .nodes import shape_of

__all__ = ["label_ranges"]

_LOSSES = ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
# Operators that pass on all values of a tensor.
_VIEWS = ("Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")


def label_ranges(model: ir.Model, inputs: Collection[str], loss: str) -> Iterator[IndexRange]:
    """Yields the valid ranges of inputs that a model's losses use as labels.

    It skips the indices of other operators, whose rules differ from PyTorch's: ONNX allows negative indices, and ONNX
    Runtime raises an error at run time if one is too large.

    Args:
        model: The forward pass, with shapes.
        inputs: Names of the inputs.
        loss: Name of the output that is the loss.
    """
    for node in model.graph:
        if node.op_type in _LOSSES:
            scores, label = node.inputs[:2]
            while label is not None and (maker := label.producer()) is not None and maker.op_type in _VIEWS:
                label = maker.inputs[0]
            shape = None if scores is None else shape_of(scores)
            if label is not None and label.name in inputs and shape is not None and isinstance(shape[1], int):
                ignored = node.attributes.get("ignore_index")
                yield IndexRange(
                    str(label.name),
                    shape[1],
                    ignored=None if ignored is None else ignored.as_int(),
                    operator=node.op_type,
                    source=f"node {node.name!r}",
                    outputs=(loss,),
                )
