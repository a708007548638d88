"""The optimizers: one file each, with config, update, ONNX nodes and what a state dict has of it.

A file that is put here is found: the configs in its ``__all__`` become names of ``ort_trainer.optim``.
"""

from __future__ import annotations

import importlib
import pkgutil

# By name for type checkers and completion; whatever else lies here is found below.
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
