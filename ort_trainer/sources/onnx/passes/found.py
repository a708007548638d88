"""What the passes over one model find out."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from ....graph import RandomInput
from ....indices import IndexRange

__all__ = ["Found"]


@dataclass
class Found:
    """What the passes over one model find out, for those behind them and for the training graph.

    Attributes:
        random: Random inputs, in the order in which PyTorch would draw them.
        buffer_updates: Buffer -> output with its new content.
        loss_scale: Name of the input by which the loss is multiplied.
        scaled_loss: The output that is differentiated.
        refused: Node that has no rewrite -> why.
        gradients: Weight -> output with its gradient.
        index_ranges: What operators allow in the inputs that they index with.
    """

    random: list[RandomInput] = field(default_factory=list)
    buffer_updates: dict[str, str] = field(default_factory=dict)
    loss_scale: str = ""
    scaled_loss: str = ""
    refused: dict[ir.Node, str] = field(default_factory=dict)
    gradients: dict[str, str] = field(default_factory=dict)
    index_ranges: tuple[IndexRange, ...] = ()
