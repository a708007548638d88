"""Results that the passes over one model share."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from ....core.indices import IndexRange
from ....step import RandomInput

__all__ = ["Found"]


@dataclass
class Found:
    """Results of the passes over one model, for later passes and for the training graph.

    Attributes:
        random: Random inputs, in the order in which PyTorch would draw them.
        buffer_updates: Buffer -> output with its new value.
        loss_scale: Name of the input with the loss scale.
        scaled_loss: Name of the output to differentiate.
        refused: Node that can't be rewritten -> the reason.
        gradients: Weight -> output with its gradient.
        index_ranges: The valid ranges of inputs used as indices.
    """

    random: list[RandomInput] = field(default_factory=list)
    buffer_updates: dict[str, str] = field(default_factory=dict)
    loss_scale: str = ""
    scaled_loss: str = ""
    refused: dict[ir.Node, str] = field(default_factory=dict)
    gradients: dict[str, str] = field(default_factory=dict)
    index_ranges: tuple[IndexRange, ...] = ()
