"""``onnxruntime.training.api``: the classes that train from artifacts. Nothing here needs PyTorch."""

from __future__ import annotations

from typing import Any

from .modules import is_changed, module_named, put_in_place, restore

__all__ = ["install_alone", "training_api_names"]

_PACKAGE = "onnxruntime.training.api"
_PUBLIC = ("CheckpointState", "LinearLRScheduler", "Module", "Optimizer")
_SUBMODULES = {
    "checkpoint_state": ("CheckpointState", "Parameter", "Parameters", "Properties"),
    "lr_scheduler": ("LinearLRScheduler",),
    "module": ("Module",),
    "optimizer": ("Optimizer",),
}


def training_api_names() -> dict[str, dict[str, Any]]:
    """Returns modules of ``onnxruntime.training``, with the names to set in them."""
    from .. import api  # imports ONNX Runtime, unless it was imported before
    from . import pairs

    modules = {_PACKAGE: _PUBLIC, **{f"{_PACKAGE}.{name}": names for name, names in _SUBMODULES.items()}}
    return {
        module: {name: getattr(pairs if name in pairs.__all__ else api, name) for name in names}
        for module, names in modules.items()
    }


def install_alone() -> None:
    """Sets the names of the training API, and nothing that needs PyTorch."""
    if is_changed():
        return
    module_named("onnxruntime")
    try:
        put_in_place(training_api_names())
    except BaseException:
        restore()
        raise
