"""Precision: the dtype of products and convolutions, the loss scale, and the check for finite gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..amp import DynamicLossScaler, LossScaler
from ..graph import TrainingGraph
from ..optim.step_info import TrainStepInfo
from .user_objects import load_state

__all__ = ["FedScale", "Precision", "ScaledPrecision", "choose_precision"]


class Precision:
    """Without a loss scale: fp32, and bfloat16, which has the exponents of fp32, so that gradients do not vanish.

    Attributes:
        mixed: Whether matrix products and convolutions are computed in a narrower dtype.
        scaler: The loss scaler, or None.
        checks_finite: Whether an update is skipped where a gradient is not finite.
    """

    scaler: LossScaler | None = None
    checks_finite = False

    def __init__(self, mixed: bool) -> None:
        self.mixed = mixed

    @property
    def loss_scale(self) -> float:
        """What the coming loss is multiplied by before the backward pass."""
        return 1.0

    def name_input(self, graph: TrainingGraph) -> None:
        """Notes by which input a new graph takes the scale."""

    def update(self, info: TrainStepInfo) -> None:
        """Chooses the next scale after an update, or after one that was skipped (``info.all_finite``)."""

    def state_dict(self) -> dict[str, Any] | None:
        """Returns what a checkpoint keeps; None for nothing."""
        return None

    def load_state_dict(self, state: Mapping[str, Any] | None, strict: bool) -> None:
        """Restores what :meth:`state_dict` returned; None, and a state without a scaler for it, change nothing.

        Args:
            state: The state.
            strict: Whether it must have exactly the keys that the scaler's has.

        Raises:
            RuntimeError, ValueError: If it does not fit. The scaler is what it was then.
        """


class ScaledPrecision(Precision):
    """With a loss scale, so that the small gradients of fp16 do not vanish.

    Args:
        scaler: The user's own object, or the default.

    Raises:
        TypeError: If it does not say how the scale changes, or has no scale.
    """

    checks_finite = True

    def __init__(self, scaler: LossScaler) -> None:
        super().__init__(mixed=True)
        _check(scaler)
        self.scaler: LossScaler = scaler

    @property
    def loss_scale(self) -> float:
        """The scaler's."""
        return self.scaler.loss_scale

    def name_input(self, graph: TrainingGraph) -> None:
        """Gives the scaler the name of the graph's input."""
        if graph.loss_scale is not None:
            self.scaler.input_name = graph.loss_scale.name

    def update(self, info: TrainStepInfo) -> None:
        """Asks the scaler, which may return the next scale or set it itself."""
        scale = self.scaler.update(info)
        if scale is not None:
            self.scaler.loss_scale = scale

    def state_dict(self) -> dict[str, Any]:
        """Returns the scaler's."""
        return dict(self.scaler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any] | None, strict: bool) -> None:
        """Restores the scaler's."""
        if state is not None:
            load_state(self.scaler, state, "loss_scaler", strict)


class FedScale(LossScaler):
    """A scale that the caller feeds with every step; nothing else changes it."""

    def update(self, train_step_info: TrainStepInfo) -> None:
        """Leaves the scale alone."""


def choose_precision(mixed_precision: Any) -> Precision:
    """Returns what the options ``mixed_precision`` ask for.

    Raises:
        TypeError: If the loss scaler in it is not complete.
    """
    if not mixed_precision.enabled:
        return Precision(mixed=False)
    scaler = mixed_precision.loss_scaler
    if scaler is None and mixed_precision.dtype == "float16":
        scaler = DynamicLossScaler()
    return Precision(mixed=True) if scaler is None else ScaledPrecision(scaler)


def _check(scaler: LossScaler) -> None:
    """Checks what a user's own scaler needs, which would otherwise show after the first update only."""
    name = type(scaler).__name__
    if type(scaler).update is LossScaler.update:
        raise TypeError(
            f"mixed_precision.loss_scaler: {name} does not say how the scale changes: override update(), or keep the "
            "scale constant with DynamicLossScaler(automatic_update=False, loss_scale=...)"
        )
    if not hasattr(scaler, "loss_scale"):
        raise TypeError(
            f"mixed_precision.loss_scaler: {name} has no scale yet: call super().__init__(loss_scale) in its __init__"
        )
