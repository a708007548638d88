"""Precision: the dtype of products and convolutions, the loss scale, and what happens if numbers are not finite."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from typing import Any

import torch

from ..amp import DynamicLossScaler, LossScaler
from ..optim.step_info import TrainStepInfo
from ..step import Step
from .user_objects import load_state

_log = logging.getLogger(__name__)

_OPTION = "debug.max_nonfinite_losses"


class Precision:
    """Precision without a loss scale: fp32 or bfloat16, whose exponent range is that of fp32.

    Attributes:
        mixed: Whether matrix products and convolutions are computed in a narrower dtype.
        scaler: The loss scaler, or None.
        checks_finite: Whether an update is skipped if a gradient is not finite.
    """

    scaler: LossScaler | None = None
    checks_finite = False

    def __init__(self, mixed: bool) -> None:
        self.mixed = mixed

    @property
    def loss_scale(self) -> float:
        """The factor on the next loss for the backward pass."""
        return 1.0

    def name_input(self, step: Step) -> None:
        """Records the name of the input by which a new graph takes the scale."""

    def update(self, info: TrainStepInfo) -> None:
        """Sets the next scale after an update, including a skipped one (see ``info.all_finite``)."""

    def state_dict(self) -> dict[str, Any] | None:
        """Returns the state for a checkpoint; None if there is none."""
        return None

    def load_state_dict(self, state: Mapping[str, Any] | None, strict: bool) -> None:
        """Restores what :meth:`state_dict` returned; does nothing for None, or if there is no scaler.

        Args:
            state: The state.
            strict: Whether its keys must be exactly those of the scaler's own state.

        Raises:
            RuntimeError, ValueError: If it is invalid. The scaler is unchanged then.
        """


class ScaledPrecision(Precision):
    """Precision with a loss scale, which keeps the small gradients of fp16 from vanishing.

    Args:
        scaler: The user's own object, or the default.

    Raises:
        TypeError: If it has no scale.
    """

    checks_finite = True

    def __init__(self, scaler: LossScaler) -> None:
        super().__init__(mixed=True)
        if not hasattr(scaler, "loss_scale"):  # else an error would appear only after the first update
            raise TypeError(
                f"mixed_precision.loss_scaler: {type(scaler).__name__} has no scale yet: call "
                "super().__init__(loss_scale) in its __init__"
            )
        self.scaler: LossScaler = scaler

    @property
    def loss_scale(self) -> float:
        """The scaler's scale."""
        return self.scaler.loss_scale

    def name_input(self, step: Step) -> None:
        """Sets the scaler's ``input_name`` to the graph's input."""
        if step.loss_scale is not None:
            self.scaler.input_name = step.loss_scale.name

    def update(self, info: TrainStepInfo) -> None:
        """Calls the scaler, which may return the next scale or set it itself."""
        scale = self.scaler.update(info)
        if scale is not None:
            self.scaler.loss_scale = scale

    def state_dict(self) -> dict[str, Any]:
        """Returns the scaler's state."""
        return dict(self.scaler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any] | None, strict: bool) -> None:
        """Restores the scaler's state."""
        if state is not None:
            load_state(self.scaler, state, "loss_scaler", strict)


def fast_dtype(mixed_precision: Any, device: torch.device) -> str:
    """Returns what ``mixed_precision.dtype`` "auto" means on a device, else what it is.

    bfloat16 needs no loss scale, so float16 is for those who bring one, and for CUDA devices without its arithmetic
    (before compute capability 8.0).
    """
    dtype: str = mixed_precision.dtype
    if dtype != "auto" or not mixed_precision.enabled:
        return dtype
    is_old = device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) < (8, 0)
    dtype = "float16" if is_old or mixed_precision.loss_scaler is not None else "bfloat16"
    _log.info("mixed_precision.dtype 'auto' is %s on %s", dtype, device)
    return dtype


def choose_precision(mixed_precision: Any) -> Precision:
    """Returns the precision selected by the options ``mixed_precision``.

    Raises:
        TypeError: If their loss scaler is incomplete.
    """
    if not mixed_precision.enabled:
        return Precision(mixed=False)
    scaler = mixed_precision.loss_scaler
    if scaler is None and mixed_precision.dtype == "float16":
        scaler = DynamicLossScaler()
    return Precision(mixed=True) if scaler is None else ScaledPrecision(scaler)


class FiniteLosses:
    """Counts consecutive losses that are infinite or NaN.

    Args:
        limit: How many of them in a row are an error.

    Attributes:
        count: How many of the last losses were not finite.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.count = 0

    def check_fetched(self, names: Collection[str], loss: str) -> None:
        """Checks that a step fetches the loss.

        Raises:
            ValueError: If the loss is not among the outputs.
        """
        if loss not in names:
            raise ValueError(
                f"{_OPTION} is {self._limit}, but the step's outputs {list(names)} do not include the loss: add "
                f"{loss!r} to train_step_info.fetches, or leave the option out"
            )

    def check(self, step: Step, outputs: Mapping[str, torch.Tensor], _: Any = None) -> None:
        """Checks the loss of a run before its results are used.

        Raises:
            FloatingPointError: If this loss reaches the limit; it is not counted then.
        """
        value = outputs[step.loss].item()
        if math.isfinite(value):
            self.count = 0
        elif self.count + 1 < self._limit:
            self.count += 1
        else:
            before = f", as were the {self.count} before it" if self.count > 1 else ""
            before = ", as was the one before it" if self.count == 1 else before
            raise FloatingPointError(
                f"the loss is {value}{before}: {_OPTION} is {self._limit}. This step was not taken: weights, gradients "
                "and counters are unchanged. Check the batch and the learning rate, or go back to a checkpoint"
            )
