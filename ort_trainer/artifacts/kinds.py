"""The choices for artifacts: losses, optimizers, flavors."""

from __future__ import annotations

from enum import Enum

FLAVORS = ("ort_trainer", "onnxruntime-training")
"""The runtimes that artifacts can be written for."""


class LossType(Enum):
    """Losses that :func:`generate_artifacts` can add; each is averaged over the batch."""

    MSELoss = 1
    CrossEntropyLoss = 2
    BCEWithLogitsLoss = 3
    L1Loss = 4


class OptimType(Enum):
    """Optimizers of :func:`generate_artifacts`, with onnxruntime-training's hyper-parameters."""

    AdamW = 1
    SGD = 2
