"""Marks the operators inside ``torch.utils.checkpoint`` in a captured model."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

from torch.fx import traceback as fx_traceback
from torch.utils import checkpoint as checkpointing

__all__ = ["CHECKPOINT", "marked_checkpoints"]

CHECKPOINT = "ort_trainer_checkpoint"
"""Key in a node's custom metadata: the number of the ``torch.utils.checkpoint`` that it was captured in."""


@contextlib.contextmanager
def marked_checkpoints() -> Iterator[None]:
    """Marks operators inside ``torch.utils.checkpoint``, which leaves no other trace: a capture saves no tensors."""
    enclosed = checkpointing._checkpoint_without_reentrant_generator
    numbers = itertools.count()

    def marked(*args: Any, **kwargs: Any) -> Iterator[None]:
        with fx_traceback.annotate({CHECKPOINT: next(numbers)}):
            yield from enclosed(*args, **kwargs)

    with (
        fx_traceback.preserve_node_meta(),  # without it, annotations are dropped
        mock.patch.object(checkpointing, "_checkpoint_without_reentrant_generator", marked),
    ):
        yield
