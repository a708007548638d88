"""The names of the legacy modules: a table."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import ort_trainer

from .. import amp, optim
from ..engine.ort import engine
from ..options import ModelDescription
from . import c_session, checkpoint, gradient_graph, older_api, onnxblock, options, ort_module, trainer
from .modules import module_named, put_in_place, set_name


def _of(module: ModuleType, *names: str) -> dict[str, Any]:
    """Returns some names of a module, by default its public ones."""
    return {name: getattr(module, name) for name in names or module.__all__}


def _is_ortmodule_available() -> bool:
    return True


_SCALERS = _of(amp, "LossScaler", "DynamicLossScaler")
_CONFIGS = _of(options, "AdamConfig", "LambConfig", "SGDConfig", "_OptimizerConfig")
_WARMUPS = (f"{kind}WarmupLRScheduler" for kind in ("Constant", "Cosine", "Linear", "Poly"))
_SCHEDULES = _of(optim, *_WARMUPS, "_LRScheduler")
_OPTIONS = _of(options, "ORTTrainerOptions")
_TRAINER = {**_of(trainer, "ORTTrainer"), **_OPTIONS, **_of(ort_trainer, "TrainStepInfo")}
_PARAMETERS = _of(ort_trainer, "TrainingParameters")
_SESSION = {**_of(trainer, "TrainingSession"), **_PARAMETERS}
_MODULE = _of(ort_module, "ORTModule")
# Module -> names to set, which replace those of onnxruntime-training.
_NAMES: dict[str, dict[str, Any]] = {
    "onnxruntime": _SESSION,
    "onnxruntime.training": {
        **_TRAINER,
        **_SESSION,
        **_MODULE,
        "is_ortmodule_available": _is_ortmodule_available,
    },
    "onnxruntime.training.ortmodule": _of(ort_module),
    "onnxruntime.training.ortmodule.ortmodule": _MODULE,
    "onnxruntime.training.ortmodule.options": _of(ort_module, "DebugOptions", "LogLevel"),
    "onnxruntime.training.experimental": _of(gradient_graph, "export_gradient_graph"),
    "onnxruntime.training.amp": _SCALERS,
    "onnxruntime.training.amp.loss_scaler": _SCALERS,
    "onnxruntime.training.optim": {**_CONFIGS, **_SCHEDULES},
    "onnxruntime.training.optim.config": _CONFIGS,
    "onnxruntime.training.optim.lr_scheduler": _SCHEDULES,
    "onnxruntime.training.checkpoint": _of(checkpoint),
    "onnxruntime.training.orttrainer": _TRAINER,
    "onnxruntime.training.orttrainer_options": _OPTIONS,
    "onnxruntime.training.model_desc_validation": {"_ORTTrainerModelDesc": ModelDescription},
    "onnxruntime.capi._pybind_state": {
        **_of(c_session),
        **_PARAMETERS,
        **_of(options, "set_cuda_device_id", "set_cuda_mem_limit"),
        "set_gpu_mem_limit": options.set_cuda_mem_limit,
    },
    "onnxruntime.capi.ort_trainer": _of(older_api),
}
# Names that are set only if the engine does not have them.
_MISSING: dict[str, dict[str, Any]] = {
    "onnxruntime.training": _of(options, "PropagateCastOpsStrategy"),
    "onnxruntime.capi._pybind_state": {**_of(gradient_graph, "GradientGraphBuilder"), **options.PROVIDER_SETTINGS},
    "onnxruntime.training.onnxblock": _of(onnxblock),
    "onnxruntime.training.onnxblock.blocks": _of(onnxblock.blocks),
    "onnxruntime.training.onnxblock.loss": _of(onnxblock.loss),
    "onnxruntime.training.onnxblock.optim": _of(onnxblock.optim),
}


def install_all() -> None:
    """Sets all names; see ``ort_trainer.compat.install``."""
    engine()  # the next imports do not take its precautions when importing ONNX Runtime
    from .. import artifacts
    from .training_api import training_api_names

    of_artifacts = {"onnxruntime.training.artifacts": _of(artifacts, "LossType", "OptimType", "generate_artifacts")}
    put_in_place({**_NAMES, **training_api_names(), **of_artifacts}, _MISSING)
    set_name(module_named("onnxruntime.training.orttrainer"), "optim", module_named("onnxruntime.training.optim"))
    for kind in (*_SCALERS.values(), *_SCHEDULES.values(), ort_trainer.TrainStepInfo):
        set_name(kind, "__init__", options.raising(*options.ASSERTED)(kind.__init__))
