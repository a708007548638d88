"""The older API's classes for the description of a model and for the loss scale."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["IODescription", "LossScaler", "ModelDescription", "arguments_of", "generate_sample", "to_model_desc"]


class IODescription:
    """Name and shape of an input or output.

    Args:
        name: Its name.
        shape: Sizes; a str names a dimension whose size may change.
        dtype: The dtype of :func:`generate_sample`. Outputs have the dtypes of the model.
        num_classes: Makes :func:`generate_sample` return integers below it.
    """

    def __init__(
        self, name: str, shape: Sequence[int | str], dtype: torch.dtype | None = None, num_classes: int | None = None
    ) -> None:
        self.name_ = name
        self.shape_ = shape
        self.dtype_ = dtype
        self.num_classes_ = num_classes


class ModelDescription:
    """Inputs (the label last) and outputs (the loss first) of a model.

    Args:
        inputs: An :class:`IODescription` of each input.
        outputs: An :class:`IODescription` of each output.
    """

    def __init__(self, inputs: Sequence[IODescription], outputs: Sequence[IODescription]) -> None:
        self.inputs_ = inputs
        self.outputs_ = outputs


class LossScaler:
    """A loss scale that halves on overflow and doubles after a run of finite steps.

    Args:
        loss_scale_input_name: Stored as ``loss_scale_input_name_``; the trainer does not need it.
        is_dynamic_scale: False keeps the scale constant.
        loss_scale: The initial scale.
        up_scale_window: Finite steps before the scale doubles.
        min_loss_scale: Lower limit when the scale is halved.
        max_loss_scale: Upper limit when the scale is doubled.
    """

    def __init__(
        self,
        loss_scale_input_name: str,
        is_dynamic_scale: bool,
        loss_scale: float = float(1 << 16),
        up_scale_window: int = 2000,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = float(1 << 24),
    ) -> None:
        self.loss_scale_input_name_ = loss_scale_input_name
        self.is_dynamic_scale_ = is_dynamic_scale
        self.initial_loss_scale_ = self.loss_scale_ = loss_scale
        self.up_scale_window_ = up_scale_window
        self.min_loss_scale_ = min_loss_scale
        self.max_loss_scale_ = max_loss_scale
        self.stable_steps_ = 0

    def update_loss_scale(self, is_all_finite: bool) -> None:
        """Sets the next scale after an update.

        Args:
            is_all_finite: Whether all gradients of the update were finite.
        """
        if not self.is_dynamic_scale_:
            return
        if not is_all_finite:
            self.loss_scale_ = max(self.min_loss_scale_, self.loss_scale_ / 2)
            self.stable_steps_ = 0
            return
        self.stable_steps_ += 1
        if self.stable_steps_ >= self.up_scale_window_:
            self.loss_scale_ = min(self.max_loss_scale_, self.loss_scale_ * 2)
            self.stable_steps_ = 0

    def reset(self) -> None:
        """Resets the scale to its initial value, and the count of finite steps to 0."""
        self.loss_scale_ = self.initial_loss_scale_
        self.stable_steps_ = 0


def generate_sample(desc: IODescription, device: str | torch.device | None = None) -> torch.Tensor:
    """Returns a random tensor for a description; named dimensions have the size 1.

    Args:
        desc: With ``num_classes``, values are integers below it; otherwise they are normally distributed.
        device: The device of the tensor.
    """
    size = [entry if isinstance(entry, int) else 1 for entry in desc.shape_]
    if desc.num_classes_:
        return torch.randint(0, desc.num_classes_, size, dtype=desc.dtype_ or torch.int64).to(device)
    return torch.randn(size, dtype=desc.dtype_).to(device)


def to_model_desc(description: ModelDescription) -> dict[str, Any]:
    """Returns the description in the form of the current trainer.

    Raises:
        TypeError: If it, or an entry of it, has the wrong class.
        ValueError: If its first output is not a loss.
    """
    if not isinstance(description, ModelDescription):
        raise TypeError(f"model_desc must be a ModelDescription, but {description!r} was given")
    for kind, entries in (("inputs", description.inputs_), ("outputs", description.outputs_)):
        wrong = [entry for entry in entries if not isinstance(entry, IODescription)]
        if wrong:
            raise TypeError(f"the {kind} of a ModelDescription are IODescriptions, but {wrong[0]!r} was given")
    if not description.outputs_:
        raise ValueError("model_desc needs outputs: the first must be the loss")
    loss, *others = description.outputs_
    if list(loss.shape_) not in ([], [1]):
        raise ValueError(
            f"the first output is the loss, which is a scalar, but {loss.name_!r} has the shape {list(loss.shape_)}"
        )
    return {
        "inputs": [(entry.name_, list(entry.shape_)) for entry in description.inputs_],
        "outputs": [(loss.name_, [], True), *((entry.name_, list(entry.shape_)) for entry in others)],
    }


def arguments_of(model: Any, description: ModelDescription, has_loss: bool) -> dict[str, str]:
    """Returns described name -> argument of ``forward`` if inputs are matched by position, otherwise an empty dict."""
    if not isinstance(model, torch.nn.Module):
        return {}
    names = [entry.name_ for entry in description.inputs_]
    names = names[:-1] if has_loss else names
    parameters = inspect.signature(model.forward).parameters.values()
    own = [parameter.name for parameter in parameters]
    plain = all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
    if not plain or len(own) != len(names) or set(names) <= set(own):
        return {}
    return dict(zip(names, own, strict=True))
