"""Translates arguments of the older trainer into an optimizer config and options of the current one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from ..core.errors import shown
from ..export.onnx import OnnxModel
from ..optim.rules import CONFIGS
from .older_description import IODescription

__all__ = ["check_arguments", "check_callable", "one_number", "optimizer_config", "parameter_names", "returning"]


def check_arguments(
    learning_rate_description: Any, frozen_weights: Any, global_step: Any, loss_scaler: Any, use_mixed_precision: bool
) -> None:
    """Checks the constructor's arguments that do not become options.

    Raises:
        TypeError, ValueError: If one is invalid.
    """
    if not isinstance(learning_rate_description, IODescription):
        raise TypeError(
            f"learning_rate_description must be an IODescription, but {learning_rate_description!r} was given"
        )
    if isinstance(frozen_weights, str) or not isinstance(frozen_weights, Collection):
        raise TypeError(f"frozen_weights must be a list of names of weights, but {frozen_weights!r} was given")
    if isinstance(global_step, bool) or not isinstance(global_step, int) or global_step < 0:
        raise ValueError(f"global_step must be an int, at least 0, but {global_step!r} was given")
    scales = hasattr(loss_scaler, "loss_scale_") and callable(getattr(loss_scaler, "update_loss_scale", None))
    if loss_scaler is not None and not scales:
        raise TypeError(
            "loss_scaler must be a LossScaler of onnxruntime.capi.ort_trainer, or have loss_scale_ and "
            f"update_loss_scale() like it, but {shown(loss_scaler)} was given"
        )
    if loss_scaler is not None and not use_mixed_precision:
        warnings.warn(
            "loss_scaler has no effect without use_mixed_precision=True: the loss is not scaled",
            UserWarning,
            stacklevel=3,
        )


def check_callable(name: str, value: Any) -> None:
    """Raises a TypeError if an argument is neither a function nor None."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be a function or None, but {shown(value)} was given")


def returning(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Makes a function that changes the model in place return it, as the option expects."""

    def postprocess(model: Any) -> Any:
        change(model)
        return model

    return postprocess


def optimizer_config(
    name: str, attributes_of: Callable[[str], Mapping[str, float]] | None, parameters: Sequence[str]
) -> Any:
    """Returns the config, with one parameter group for each distinct set of attributes."""
    if name not in CONFIGS:
        raise ValueError(f"training_optimizer_name must be one of {list(CONFIGS)}, but {name!r} was given")
    groups: dict[tuple[tuple[str, float], ...], list[str]] = {}
    for parameter in parameters:
        given = None if attributes_of is None else attributes_of(parameter)
        if not isinstance(given, Mapping | None):
            raise TypeError(
                f"map_optimizer_attributes must return a dict of hyper-parameters or None, but for {parameter!r} it "
                f"returned {shown(given)}"
            )
        attributes = dict(given or {})
        if "do_bias_correction" in attributes:
            attributes["do_bias_correction"] = bool(attributes["do_bias_correction"])
        if attributes:
            groups.setdefault(tuple(sorted(attributes.items())), []).append(parameter)
    return CONFIGS[name]([{"params": names, **dict(values)} for values, names in groups.items()])


def parameter_names(model: Any) -> list[str]:
    """Returns the names of the parameters that can be trained."""
    if isinstance(model, torch.nn.Module):
        return [name for name, _ in model.named_parameters()]
    # Anything else is not a model: the trainer raises the error.
    return [name for name in model.parameters if name not in model.frozen] if isinstance(model, OnnxModel) else []


def one_number(what: str, value: Any) -> float:
    """Returns a value that was passed to a step as a float.

    Raises:
        TypeError: If it is not a single number.
    """
    if isinstance(value, (list, tuple)) and len(value) == 1:
        value = value[0]
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{what} must be one number, but {shown(value)} was given") from None
