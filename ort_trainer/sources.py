"""Chooses the source for the user's model, of PyTorch or ONNX, and finds a loss that is given by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn import functional as F

from .capture.step_module import LossFunction
from .core.errors import was_given
from .engine.ort import require_onnx
from .export.model import ModelSource
from .optim import OptimizerConfig
from .options import ORTTrainerOptions

# What ``loss_fn`` accepts by name: functions of torch.nn.functional with their defaults.
_LOSSES: Mapping[str, LossFunction] = {
    "bce_with_logits": F.binary_cross_entropy_with_logits,
    "cross_entropy": F.cross_entropy,
    "huber": F.huber_loss,
    "l1": F.l1_loss,
    "mse": F.mse_loss,
    "nll": F.nll_loss,
    "smooth_l1": F.smooth_l1_loss,
}


def loss_function(loss_fn: LossFunction | str | None) -> LossFunction | None:
    """Returns the loss function, which may be given by name.

    Raises:
        TypeError: If it is neither a function nor a known name.
    """
    found = _LOSSES.get(loss_fn, loss_fn) if isinstance(loss_fn, str) else loss_fn
    if found is not None and (not callable(found) or isinstance(found, type)):
        raise TypeError(
            f"loss_fn must be a function (prediction, label) -> loss, or one of {sorted(_LOSSES)}, but "
            f"{was_given(found)}"
        )
    return found


def model_source(
    model: Any, loss_fn: LossFunction | None, optim_config: OptimizerConfig, options: ORTTrainerOptions
) -> ModelSource:
    """Returns the source for a model.

    Raises:
        TypeError: If it is not a model.
    """
    if isinstance(model, nn.Module):
        return ModelSource(model, loss_fn, optim_config, options)
    require_onnx()
    from .onnx.source import OnnxSource, is_onnx_model  # slow to import and rarely needed

    if is_onnx_model(model):
        return OnnxSource(model, loss_fn, optim_config, options)
    raise TypeError(
        f"model must be a torch.nn.Module, an onnx.ModelProto or the path of an ONNX file, but {was_given(model)}"
    )
