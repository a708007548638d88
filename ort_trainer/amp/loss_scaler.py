"""Loss scalers: the factor that keeps small fp16 gradients from vanishing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..core.errors import check_count, shown
from ..optim.step_info import TrainStepInfo


def _positive(name: str, value: Any) -> float:
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be an int or float, but {shown(value)} ({type(value).__name__}) was given")
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name} must be positive and finite, but {shown(value)} was given")
    return float(value)


class LossScaler:
    """A constant scale, and the base class of loss scalers.

    The trainer multiplies the loss by :attr:`loss_scale` before the backward pass, divides the gradients by it, and
    calls :meth:`update` once after every optimizer step, even one that was skipped because of an overflow. For a policy
    of your own, subclass it and override :meth:`update` (and :meth:`state_dict` if there is more state).

    Args:
        loss_scale: The initial scale, positive and finite.
    """

    def __init__(self, loss_scale: float) -> None:
        self._input_name: str | None = None
        self._loss_scale = self._initial_loss_scale = _positive("loss_scale", loss_scale)

    @property
    def loss_scale(self) -> float:
        """The current scale."""
        return self._loss_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self._loss_scale = _positive("loss_scale", value)

    @property
    def input_name(self) -> str | None:
        """Name of the graph input that takes the scale; set by the trainer when the graph exists."""
        return self._input_name

    @input_name.setter
    def input_name(self, value: str) -> None:
        if not isinstance(value, str):
            raise TypeError(f"input_name must be a str, but {shown(value)} ({type(value).__name__}) was given")
        if not value:
            raise ValueError("input_name must not be empty")
        self._input_name = value

    def reset(self) -> None:
        """Resets the scale to its initial value."""
        self._loss_scale = self._initial_loss_scale

    def update(self, train_step_info: TrainStepInfo) -> float | None:
        """Returns the scale for the next step; here it is unchanged.

        Args:
            train_step_info: ``train_step_info.all_finite`` says whether all gradients of the step were finite.

        Returns:
            The new scale for the trainer, or None if the method has set :attr:`loss_scale` itself.
        """
        return self.loss_scale

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as JSON values only."""
        return {"loss_scale": self._loss_scale}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        self.loss_scale = state_dict["loss_scale"]


class DynamicLossScaler(LossScaler):
    """A scale that halves on overflow and doubles after a run of finite steps.

    With ``automatic_update``, after each optimizer step: if the gradients are finite, the step is counted, and when the
    count reaches ``up_scale_window``, ``scale = min(max_loss_scale, 2 * scale)`` and the count restarts. If they are
    not finite, ``scale = max(min_loss_scale, scale / 2)`` and the count restarts. (P. Micikevicius et al., "Mixed
    Precision Training", ICLR 2018, section 3.2.)

    Args:
        automatic_update: False keeps the scale constant.
        loss_scale: The initial scale.
        up_scale_window: Finite optimizer steps before the scale doubles.
        min_loss_scale: Lower limit when the scale is halved.
        max_loss_scale: Upper limit when the scale is doubled.
    """

    def __init__(
        self,
        automatic_update: bool = True,
        loss_scale: float = float(1 << 16),
        up_scale_window: int = 2000,
        min_loss_scale: float = 1.0,
        max_loss_scale: float = float(1 << 24),
    ) -> None:
        super().__init__(loss_scale)
        if not isinstance(automatic_update, bool):
            raise TypeError(f"automatic_update must be a bool, but {shown(automatic_update)} was given")
        check_count("up_scale_window", up_scale_window)
        self.automatic_update = automatic_update
        self.up_scale_window = up_scale_window
        self.min_loss_scale = _positive("min_loss_scale", min_loss_scale)
        self.max_loss_scale = _positive("max_loss_scale", max_loss_scale)
        if self.min_loss_scale > self.max_loss_scale:
            raise ValueError(f"min_loss_scale {min_loss_scale} is above max_loss_scale {max_loss_scale}")
        self._stable_steps_count = 0

    def reset(self) -> None:
        """Resets the scale to its initial value, and the count of finite steps to 0."""
        super().reset()
        self._stable_steps_count = 0

    def update(self, train_step_info: TrainStepInfo) -> float:
        """Applies the rule of the class, and returns the new scale."""
        if not self.automatic_update:
            return self.loss_scale
        if not train_step_info.all_finite:
            self.loss_scale = max(self.min_loss_scale, self.loss_scale / 2)
            self._stable_steps_count = 0
            return self.loss_scale
        self._stable_steps_count += 1
        if self._stable_steps_count >= self.up_scale_window:
            self.loss_scale = min(self.max_loss_scale, self.loss_scale * 2)
            self._stable_steps_count = 0
        return self.loss_scale

    def state_dict(self) -> dict[str, Any]:
        """Returns the scale and the count of finite steps since it last changed."""
        return {**super().state_dict(), "stable_steps_count": self._stable_steps_count}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores what :meth:`state_dict` returned."""
        count = int(state_dict["stable_steps_count"])
        if count < 0:
            raise ValueError(f"stable_steps_count must be at least 0, but it is {count}")
        super().load_state_dict(state_dict)
        self._stable_steps_count = count
