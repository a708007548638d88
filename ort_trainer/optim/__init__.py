"""Optimizer configs, learning-rate schedules, and the weight update itself."""

from .config import AdamConfig, AdamWConfig, LambConfig, SGDConfig, _OptimizerConfig
from .lr_scheduler import (
    ConstantWarmupLRScheduler,
    CosineWarmupLRScheduler,
    LinearWarmupLRScheduler,
    PolyWarmupLRScheduler,
    _LRScheduler,
)

__all__ = [
    "AdamConfig",
    "AdamWConfig",
    "ConstantWarmupLRScheduler",
    "CosineWarmupLRScheduler",
    "LambConfig",
    "LinearWarmupLRScheduler",
    "PolyWarmupLRScheduler",
    "SGDConfig",
    "_LRScheduler",
    "_OptimizerConfig",
]
