"""What can be chosen for artifacts: a loss, an optimizer, a flavor."""

from __future__ import annotations

from enum import Enum

__all__ = ["FLAVORS", "LossType", "OptimType"]

FLAVORS = ("ort_trainer", "onnxruntime-training")
"""Whose runtime trains from them."""


class LossType(Enum):
    """Losses that :func:`generate_artifacts` adds, each the mean over the batch."""

    MSELoss = 1
    CrossEntropyLoss = 2
    BCEWithLogitsLoss = 3
    L1Loss = 4


class OptimType(Enum):
    """Optimizers of :func:`generate_artifacts`, with the hyper-parameters that onnxruntime-training gives them."""

    AdamW = 1
    SGD = 2
