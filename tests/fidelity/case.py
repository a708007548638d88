"""A case of the catalogue."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """Something that trains.

    Attributes:
        name: Its name in the table of the docs.
        model: Makes the model; the seed is set before the call.
        batch: Makes a batch from a generator, a batch size and a length.
        loss_fn: The loss of (prediction, label), where the label is the batch's last entry; None if the loss is the
            model's first output.
        exports: How many training graphs two batch sizes and two lengths need: more than one if the model branches on
            a size or fixes it.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int, int], Batch]
    loss_fn: Any = None
    exports: int = 1
