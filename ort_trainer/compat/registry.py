"""Which names the legacy modules get, and puts them in place."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import ort_trainer

from .. import amp, optim
from ..optim import lr_scheduler
from ..options import ModelDescription
from ..runtime.engine import engine, training_bindings
from . import checkpoint, older_api
from .modules import is_changed, module_named, put_in_place, restore, set_name
from .options import ORTTrainerOptions, set_cuda_mem_limit
from .session import TrainingSession
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


def install_all() -> None:
    """Puts everything in place; see ``ort_trainer.compat.install``."""
    if is_changed():
        return
    engine()  # the first to import ONNX Runtime, which the others do without care
    try:
        put_in_place({**_NAMES, **training_api_names(), **_artifacts_names()}, _MISSING)
        set_name(module_named("onnxruntime.training.orttrainer"), "optim", module_named("onnxruntime.training.optim"))
    except BaseException:
        uninstall_all()
        raise


def uninstall_all() -> None:
    """Undoes :func:`install_all`."""
    set_cuda_mem_limit(0)
    restore()


def _artifacts_names() -> dict[str, dict[str, Any]]:
    from .. import artifacts  # with ort_trainer.api, and so with ONNX Runtime

    names = ("LossType", "OptimType", "generate_artifacts")
    return {"onnxruntime.training.artifacts": {name: getattr(artifacts, name) for name in names}}
