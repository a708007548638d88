"""Puts the legacy modules in place: names are set on modules that exist, and missing modules are made."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from enum import IntEnum
from types import ModuleType
from typing import Any

import ort_trainer

from .. import amp, optim
from ..optim import lr_scheduler
from ..options import ModelDescription
from ..runtime.engine import process_undisturbed, training_bindings
from . import checkpoint, older_api
from .missing import MissingParts
from .options import ORTTrainerOptions, set_cuda_mem_limit
from .session import TrainingSession
from .trainer import ORTTrainer

__all__ = ["PropagateCastOpsStrategy", "install", "uninstall"]


class PropagateCastOpsStrategy(IntEnum):
    """Strategies of cast propagation, for an ONNX Runtime that has no such enum."""

    NONE = 0
    INSERT_AND_REDUCE = 1
    FLOOD_FILL = 2


def _is_ortmodule_available() -> bool:
    return False


class _RefusedSession:
    """Stands where ONNX Runtime had the C class of a training session."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(
            "onnxruntime.capi._pybind_state.TrainingSession was a C class behind onnxruntime.TrainingSession; there is "
            "none here: use ort_trainer.TrainingSession, whose constructor reads the model (load_model, read_bytes)"
        )


class GradientGraphBuilder:
    """Stands where onnxruntime-training has the class that differentiates ONNX graphs, and a stock engine has none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        training_bindings()  # which says what to install


# Module -> names that it gets, replacing what a newer onnxruntime-training has under them.
_SCALERS = {"LossScaler": amp.LossScaler, "DynamicLossScaler": amp.DynamicLossScaler}
_CONFIGS = {
    "SGDConfig": optim.SGDConfig,
    "AdamConfig": optim.AdamConfig,
    "LambConfig": optim.LambConfig,
    "_OptimizerConfig": optim._OptimizerConfig,
}
_SCHEDULES = {
    "ConstantWarmupLRScheduler": optim.ConstantWarmupLRScheduler,
    "CosineWarmupLRScheduler": optim.CosineWarmupLRScheduler,
    "LinearWarmupLRScheduler": optim.LinearWarmupLRScheduler,
    "PolyWarmupLRScheduler": optim.PolyWarmupLRScheduler,
    "_LRScheduler": lr_scheduler.LRScheduler,
}
_TRAINER = {
    "ORTTrainer": ORTTrainer,
    "ORTTrainerOptions": ORTTrainerOptions,
    "TrainStepInfo": ort_trainer.TrainStepInfo,
}
_SESSION = {"TrainingSession": TrainingSession, "TrainingParameters": ort_trainer.TrainingParameters}
_NAMES: dict[str, dict[str, Any]] = {
    "onnxruntime": _SESSION,
    "onnxruntime.training": {**_TRAINER, **_SESSION},
    "onnxruntime.training.amp": _SCALERS,
    "onnxruntime.training.amp.loss_scaler": _SCALERS,
    "onnxruntime.training.optim": {**_CONFIGS, **_SCHEDULES},
    "onnxruntime.training.optim.config": _CONFIGS,
    "onnxruntime.training.optim.lr_scheduler": _SCHEDULES,
    "onnxruntime.training.checkpoint": {name: getattr(checkpoint, name) for name in checkpoint.__all__},
    "onnxruntime.training.orttrainer": _TRAINER,
    "onnxruntime.training.orttrainer_options": {"ORTTrainerOptions": ORTTrainerOptions},
    "onnxruntime.training.model_desc_validation": {"_ORTTrainerModelDesc": ModelDescription},
    "onnxruntime.capi._pybind_state": {
        "TrainingSession": _RefusedSession,
        "TrainingParameters": ort_trainer.TrainingParameters,
        "set_cuda_mem_limit": set_cuda_mem_limit,
    },
    "onnxruntime.capi.ort_trainer": {name: getattr(older_api, name) for name in older_api.__all__},
}
# Names that onnxruntime-training has itself, and that belong to it then.
_MISSING: dict[str, dict[str, Any]] = {
    "onnxruntime.training": {
        "PropagateCastOpsStrategy": PropagateCastOpsStrategy,
        "is_ortmodule_available": _is_ortmodule_available,
    },
    "onnxruntime.capi._pybind_state": {"GradientGraphBuilder": GradientGraphBuilder},
}
_ABSENT = object()
# What to do backwards to uninstall: (module, name, what it was), and the modules that were made.
_changed: list[tuple[ModuleType, str, Any]] = []
_made: list[str] = []


def install() -> None:
    """Makes the legacy import paths work, for scripts written for ``onnxruntime.training.ORTTrainer``.

    Registers ``onnxruntime.training`` with its submodules ``amp``, ``optim``, ``checkpoint``, ``orttrainer``,
    ``orttrainer_options`` and ``model_desc_validation``, the older API ``onnxruntime.capi.ort_trainer``, and
    ``onnxruntime.TrainingSession`` with ``TrainingParameters``. An installed onnxruntime-training keeps whatever else
    it has in these modules (ORTModule, ``artifacts``, ``api``, ``FusedAdam``, ...). Call it before the first of the
    old imports; a second call does nothing.

    Example:
        >>> import ort_trainer.compat
        >>> ort_trainer.compat.install()
        >>> from onnxruntime.training import ORTTrainer, ORTTrainerOptions, optim
    """
    if _changed:
        return
    try:
        for module_name, names in _NAMES.items():
            module = _module(module_name)
            missing = {n: v for n, v in _MISSING.get(module_name, {}).items() if not hasattr(module, n)}
            for name, value in {**names, **missing}.items():
                _set(module, name, value)
        _set(_module("onnxruntime.training.orttrainer"), "optim", _module("onnxruntime.training.optim"))
        sys.meta_path.append(MissingParts)
    except BaseException:
        uninstall()
        raise


def uninstall() -> None:
    """Undoes :func:`install`: modules that it made are gone, names that it set are what they were."""
    set_cuda_mem_limit(0)
    if MissingParts in sys.meta_path:
        sys.meta_path.remove(MissingParts)
    while _changed:
        module, name, before = _changed.pop()
        if before is _ABSENT:
            delattr(module, name)
        else:
            setattr(module, name, before)
    while _made:
        sys.modules.pop(_made.pop(), None)


def _module(name: str) -> ModuleType:
    """Returns a module: the one that is installed, or a new one that is entered into its parent."""
    if name in sys.modules:
        return sys.modules[name]
    with process_undisturbed():
        if importlib.util.find_spec(name) is not None:
            return importlib.import_module(name)
    module = ModuleType(name, f"Made by ort_trainer.compat.install() in place of the legacy module {name}.")
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    sys.modules[name] = module
    _made.append(name)
    parent, _, child = name.rpartition(".")
    _set(_module(parent), child, module)
    return module


def _set(module: ModuleType, name: str, value: Any) -> None:
    """Sets a name, also for ``from module import *``, and remembers what it was."""
    _changed.append((module, name, vars(module).get(name, _ABSENT)))
    setattr(module, name, value)
    exported = vars(module).get("__all__")
    if exported is not None and name not in exported:
        _changed.append((module, "__all__", exported))
        module.__all__ = [*exported, name]  # type: ignore[attr-defined]
