"""Which names the legacy modules get, and puts them in place."""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import Any

import ort_trainer

from .. import amp, optim
from ..optim import lr_scheduler
from ..options import ModelDescription
from ..runtime.engine import engine
from . import checkpoint, older_api
from .missing import MissingParts
from .modules import is_changed, module_named, restore, set_name
from .options import ORTTrainerOptions, set_cuda_mem_limit
from .trainer import ORTTrainer
from .training_api import training_api_names

__all__ = ["PropagateCastOpsStrategy", "install_all", "uninstall_all"]


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
_NAMES: dict[str, dict[str, Any]] = {
    "onnxruntime": {},
    "onnxruntime.training": _TRAINER,
    "onnxruntime.training.amp": _SCALERS,
    "onnxruntime.training.amp.loss_scaler": _SCALERS,
    "onnxruntime.training.optim": {**_CONFIGS, **_SCHEDULES},
    "onnxruntime.training.optim.config": _CONFIGS,
    "onnxruntime.training.optim.lr_scheduler": _SCHEDULES,
    "onnxruntime.training.checkpoint": {name: getattr(checkpoint, name) for name in checkpoint.__all__},
    "onnxruntime.training.orttrainer": _TRAINER,
    "onnxruntime.training.orttrainer_options": {"ORTTrainerOptions": ORTTrainerOptions},
    "onnxruntime.training.model_desc_validation": {"_ORTTrainerModelDesc": ModelDescription},
    "onnxruntime.capi._pybind_state": {"TrainingSession": _RefusedSession, "set_cuda_mem_limit": set_cuda_mem_limit},
    "onnxruntime.capi.ort_trainer": {name: getattr(older_api, name) for name in older_api.__all__},
}
# Names that an onnxruntime-training with ORTModule has itself, and that belong to it then.
_MISSING: dict[str, dict[str, Any]] = {
    "onnxruntime.training": {
        "PropagateCastOpsStrategy": PropagateCastOpsStrategy,
        "is_ortmodule_available": _is_ortmodule_available,
    },
}


def install_all() -> None:
    """Puts everything in place; see ``ort_trainer.compat.install``."""
    if is_changed():
        return
    engine()  # the first to import ONNX Runtime, which the others do without care
    try:
        for module_name, names in {**_with_sessions(), **training_api_names(), **_artifacts_names()}.items():
            module = module_named(module_name)
            missing = {n: v for n, v in _MISSING.get(module_name, {}).items() if not hasattr(module, n)}
            for name, value in {**names, **missing}.items():
                set_name(module, name, value)
        set_name(module_named("onnxruntime.training.orttrainer"), "optim", module_named("onnxruntime.training.optim"))
        sys.meta_path.append(MissingParts)
    except BaseException:
        uninstall_all()
        raise


def uninstall_all() -> None:
    """Undoes :func:`install_all`."""
    set_cuda_mem_limit(0)
    if MissingParts in sys.meta_path:
        sys.meta_path.remove(MissingParts)
    restore()


def _artifacts_names() -> dict[str, dict[str, Any]]:
    from .. import artifacts  # with ort_trainer.api, and so with ONNX Runtime

    names = ("LossType", "OptimType", "generate_artifacts")
    return {"onnxruntime.training.artifacts": {name: getattr(artifacts, name) for name in names}}


def _with_sessions() -> dict[str, dict[str, Any]]:
    """Returns the table, with the session and its parameters where the package has both."""
    sessions = {name: getattr(ort_trainer, name, None) for name in ("TrainingSession", "TrainingParameters")}
    if None in sessions.values():
        return _NAMES
    return {
        **_NAMES,
        "onnxruntime": {**_NAMES["onnxruntime"], **sessions},
        "onnxruntime.training": {**_NAMES["onnxruntime.training"], **sessions},
        "onnxruntime.capi._pybind_state": {
            **_NAMES["onnxruntime.capi._pybind_state"],
            "TrainingParameters": sessions["TrainingParameters"],
        },
    }
