"""``Request``: what a run of a model is asked for, from the batch to the export."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ..step import Step


class Request(NamedTuple):
    """What a run is to compute; the same for who looks up its graph, builds it and plans it.

    Attributes:
        batch: A mapping of input names to tensors; in a trainer, a ``Batch``.
        training: Whether to run in training mode.
        fetched: Outputs to return. Who builds a graph may leave them out, if runs fetch all.
        backward: Whether a run in training mode computes gradients.
        padded: Whether a training graph computes padded places, even if its step says which they are.
        refused: Graphs whose branches on values the batch does not take.
    """

    batch: Any
    training: bool
    fetched: Sequence[str] = ()
    backward: bool = True
    padded: bool = False
    refused: Sequence[Step] = ()
