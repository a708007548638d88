"""Optimizer configs, learning-rate schedules, and the weight update itself."""

from typing import Any

from ..core.unknown import meant
from . import rules
from .config import OptimizerConfig
from .lr_scheduler import (
    ConstantWarmupLRScheduler,
    CosineWarmupLRScheduler,
    LinearWarmupLRScheduler,
    LRScheduler,
    PolyWarmupLRScheduler,
)
from .rules import *  # noqa: F403 - all that is found there: a new optimizer needs only a new file
from .rules import AdamConfig, AdamWConfig, LambConfig, LionConfig, SGDConfig
from .torch_optimizer import from_torch

# The legacy package's names for the base classes.
_LRScheduler = LRScheduler
_OptimizerConfig = OptimizerConfig

__all__ = [
    "AdamConfig",
    "AdamWConfig",
    "ConstantWarmupLRScheduler",
    "CosineWarmupLRScheduler",
    "LRScheduler",
    "LambConfig",
    "LinearWarmupLRScheduler",
    "LionConfig",
    "OptimizerConfig",
    "PolyWarmupLRScheduler",
    "SGDConfig",
    "_LRScheduler",
    "_OptimizerConfig",
    "from_torch",
]
__all__ += [name for name in rules.__all__ if name not in __all__]

_ELSEWHERE = {name: f"{name}Config" for name in ("Adam", "AdamW", "Lamb", "Lion", "SGD")}


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {meant(name, __all__, _ELSEWHERE)}")
