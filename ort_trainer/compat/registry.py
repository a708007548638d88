"""Lists the names of the legacy modules, and sets them."""

from __future__ import annotations

from typing import Any

import ort_trainer

from .. import amp
from ..engine.ort import engine
from ..optim import lr_scheduler
from ..options import ModelDescription
from . import c_session, checkpoint, older_api, onnxblock, options, ort_module
from .gradient_graph import GradientGraphBuilder, export_gradient_graph
from .modules import is_changed, module_named, put_in_place, restore, set_name
from .options import (
    ASSERTED,
    PROVIDER_SETTINGS,
    ORTTrainerOptions,
    PropagateCastOpsStrategy,
    forget_device_defaults,
    raising,
    set_cuda_device_id,
    set_cuda_mem_limit,
)
from .trainer import ORTTrainer, TrainingSession

__all__ = ["install_all", "uninstall_all"]


def _is_ortmodule_available() -> bool:
    return True


# Module -> names to set, which replace those of onnxruntime-training.
_SCALERS = {"LossScaler": amp.LossScaler, "DynamicLossScaler": amp.DynamicLossScaler}
_CONFIGS = {name: getattr(options, name) for name in ("AdamConfig", "LambConfig", "SGDConfig", "_OptimizerConfig")}
_SCHEDULES = {
    "ConstantWarmupLRScheduler": lr_scheduler.ConstantWarmupLRScheduler,
    "CosineWarmupLRScheduler": lr_scheduler.CosineWarmupLRScheduler,
    "LinearWarmupLRScheduler": lr_scheduler.LinearWarmupLRScheduler,
    "PolyWarmupLRScheduler": lr_scheduler.PolyWarmupLRScheduler,
    "_LRScheduler": lr_scheduler.LRScheduler,
}
_TRAINER: dict[str, Any] = {
    "ORTTrainer": ORTTrainer,
    "ORTTrainerOptions": ORTTrainerOptions,
    "TrainStepInfo": ort_trainer.TrainStepInfo,
}
_SESSION = {"TrainingSession": TrainingSession, "TrainingParameters": ort_trainer.TrainingParameters}
_MODULE = {name: getattr(ort_module, name) for name in ort_module.__all__}
_NAMES: dict[str, dict[str, Any]] = {
    "onnxruntime": _SESSION,
    "onnxruntime.training": {
        **_TRAINER,
        **_SESSION,
        "ORTModule": ort_module.ORTModule,
        "is_ortmodule_available": _is_ortmodule_available,
    },
    "onnxruntime.training.ortmodule": _MODULE,
    "onnxruntime.training.ortmodule.ortmodule": {"ORTModule": ort_module.ORTModule},
    "onnxruntime.training.ortmodule.options": {name: _MODULE[name] for name in ("DebugOptions", "LogLevel")},
    "onnxruntime.training.experimental": {"export_gradient_graph": export_gradient_graph},
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
        **{name: getattr(c_session, name) for name in c_session.__all__},
        "TrainingParameters": ort_trainer.TrainingParameters,
        "set_cuda_device_id": set_cuda_device_id,
        "set_cuda_mem_limit": set_cuda_mem_limit,
        "set_gpu_mem_limit": set_cuda_mem_limit,
    },
    "onnxruntime.capi.ort_trainer": {name: getattr(older_api, name) for name in older_api.__all__},
}
# Names that are set only if the engine does not have them.
_MISSING: dict[str, dict[str, Any]] = {
    "onnxruntime.training": {"PropagateCastOpsStrategy": PropagateCastOpsStrategy},
    "onnxruntime.capi._pybind_state": {"GradientGraphBuilder": GradientGraphBuilder, **PROVIDER_SETTINGS},
    "onnxruntime.training.onnxblock": {name: getattr(onnxblock, name) for name in onnxblock.__all__},
    **{
        f"onnxruntime.training.onnxblock.{part.__name__.rpartition('.')[2]}": {
            name: getattr(part, name) for name in part.__all__
        }
        for part in (onnxblock.blocks, onnxblock.loss, onnxblock.optim)
    },
}


def install_all() -> None:
    """Sets all names; see ``ort_trainer.compat.install``."""
    if is_changed():
        return
    engine()  # the next imports do not take its precautions when importing ONNX Runtime
    from .. import artifacts
    from .training_api import training_api_names

    artifact_names = {name: getattr(artifacts, name) for name in ("LossType", "OptimType", "generate_artifacts")}
    try:
        put_in_place(
            {**_NAMES, **training_api_names(), "onnxruntime.training.artifacts": artifact_names},
            _MISSING,
        )
        set_name(module_named("onnxruntime.training.orttrainer"), "optim", module_named("onnxruntime.training.optim"))
        kinds: tuple[Any, ...] = (*_SCALERS.values(), *_SCHEDULES.values(), ort_trainer.TrainStepInfo)
        for kind in kinds:
            set_name(kind, "__init__", raising(*ASSERTED)(kind.__init__))
    except BaseException:
        uninstall_all()
        raise


def uninstall_all() -> None:
    """Undoes :func:`install_all`."""
    forget_device_defaults()
    restore()
