"""The optimizers: one file each, with config, update, ONNX nodes and the names of its state.

Files in this folder are found automatically: the configs in their ``__all__`` become names of ``ort_trainer.optim``.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable

from ..config import OptimizerConfig

# By name, for type checkers and completion; the code below finds any other file.
from .adam import AdamConfig, AdamWConfig
from .lamb import LambConfig
from .lion import LionConfig
from .sgd import SGDConfig

__all__ = ["AdamConfig", "AdamWConfig", "LambConfig", "LionConfig", "SGDConfig"]

for _module in pkgutil.iter_modules(__path__):
    if not _module.name.startswith("_"):
        _found = importlib.import_module(f"{__name__}.{_module.name}")
        globals().update({_name: getattr(_found, _name) for _name in _found.__all__})
        __all__ += [_name for _name in _found.__all__ if _name not in __all__]

CONFIGS: dict[str, Callable[..., OptimizerConfig]] = {}
"""Name of an optimizer in state dicts, such as ``AdamOptimizer`` -> its config, the first of several."""
for _name in sorted(__all__):
    CONFIGS.setdefault(globals()[_name]().name, globals()[_name])
