"""Trains PyTorch and ONNX models behind the interface of ONNX Runtime's legacy ``ORTTrainer``."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import amp, optim
    from .adapters.quantize import quantize
    from .compat.training_session import TrainingParameters, TrainingSession
    from .core.errors import CheckpointError, DistributedError, ExportError, ValueBranchError, VerificationError
    from .fx.operator_table import register_operator
    from .module import ORTModule
    from .onnx.user_operators import register_onnx_operator
    from .optim.step_info import TrainStepInfo
    from .options import ORTTrainerOptions
    from .runs import CheckpointManager, Position, StopSignals
    from .state import read_user_dict
    from .trainer import ORTTrainer

__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "DistributedError",
    "ExportError",
    "ORTModule",
    "ORTTrainer",
    "ORTTrainerOptions",
    "Position",
    "StopSignals",
    "TrainStepInfo",
    "TrainingParameters",
    "TrainingSession",
    "ValueBranchError",
    "VerificationError",
    "amp",
    "optim",
    "quantize",
    "read_user_dict",
    "register_onnx_operator",
    "register_operator",
]
__version__ = "0.2.0"

# Public name -> the module that has it. Imports are lazy: ort_trainer.api trains without torch, and the part for ONNX
# models takes as long to import as everything else.
_PLACES = {
    "CheckpointError": "core.errors",
    "CheckpointManager": "runs",
    "DistributedError": "core.errors",
    "ExportError": "core.errors",
    "ORTModule": "module",
    "ORTTrainer": "trainer",
    "ORTTrainerOptions": "options",
    "Position": "runs",
    "StopSignals": "runs",
    "TrainStepInfo": "optim.step_info",
    "TrainingParameters": "compat.training_session",
    "TrainingSession": "compat.training_session",
    "ValueBranchError": "core.errors",
    "VerificationError": "core.errors",
    "quantize": "adapters.quantize",
    "read_user_dict": "state",
    "register_onnx_operator": "onnx.user_operators",
    "register_operator": "fx.operator_table",
}
_MISSING = """ort_trainer.{name} needs {package}, which is not installed. Install it{how}
Without it, only ort_trainer.api works, which trains from exported artifacts."""
_WITH_ENGINE = """ with an engine:
  pip install 'ort_trainer[cpu]'     onnxruntime-training-cpu: Python up to 3.12
  pip install 'ort_trainer[cuda]'    onnxruntime-training with CUDA: Linux, Python up to 3.11
  pip install 'ort_trainer[stock]'   onnxruntime: any Python and platform
  pip install 'ort_trainer[trainer]' without one, where only PyTorch trains"""
# Names that scripts look for in the wrong place -> the import that they need.
_ELSEWHERE = {
    **dict.fromkeys(
        ("OrtTrainer", "HuggingFaceTrainer"), "from ort_trainer.integrations.transformers import HuggingFaceTrainer"
    ),
    **{
        name: f"from ort_trainer.optim import {name}"
        for name in ("AdamConfig", "AdamWConfig", "LambConfig", "LionConfig", "SGDConfig")
    },
}
# A second distribution of ONNX Runtime would overwrite files of the first.
_BESIDE_ENGINE = """, and keep the ONNX Runtime that is there:
  pip install 'ort_trainer[onnx]'"""


def __getattr__(name: str) -> Any:
    """Imports a public name or a submodule on first use."""
    from importlib.util import find_spec  # here, to keep the import of ort_trainer.api fast

    if name in _ELSEWHERE:  # no AttributeError, whose message `from ort_trainer import ...` would not show
        raise ImportError(f"{__name__} has no {name}: {_ELSEWHERE[name]}", name=__name__)
    if name not in _PLACES and (not name.isidentifier() or name[0] == "_" or find_spec(f"{__name__}.{name}") is None):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = importlib.import_module(f".{_PLACES.get(name, name)}", __name__)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", __name__, "onnxruntime"):  # our own module, or an error that already says what to do
            raise
        how = _BESIDE_ENGINE if find_spec("onnxruntime") is not None else _WITH_ENGINE
        raise ModuleNotFoundError(_MISSING.format(name=name, package=package, how=how), name=error.name) from error
    if name in _PLACES:
        globals()[name] = found = getattr(found, name)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
