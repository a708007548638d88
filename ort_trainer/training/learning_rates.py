"""The learning rates of the coming update: the config's, or what a schedule makes of them."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import shown
from ..optim import LRScheduler, OptimizerConfig
from ..optim.step_info import TrainStepInfo
from .user_objects import load_state

__all__ = ["LearningRates"]


class LearningRates:
    """Asks the schedule, if there is one.

    Args:
        config: Has the rates that a schedule starts from.
        scheduler: The user's own object, or None.
    """

    def __init__(self, config: OptimizerConfig, scheduler: LRScheduler | None) -> None:
        self._config = config
        self.scheduler = scheduler
        if scheduler is not None:
            scheduler._config = config  # so that it can say what the first step will use

    def upcoming(self, info: TrainStepInfo, step: int) -> list[float]:
        """Returns one learning rate for all parameters, or one per group and one for the others.

        Args:
            info: Where training stands.
            step: The ``step`` that the schedule gets to see.

        Raises:
            TypeError, ValueError: If the schedule returns something else.
        """
        scheduler = self.scheduler
        if scheduler is None:
            return self._config.learning_rates
        seen = copy.copy(info)
        seen.step = step
        before = scheduler._known_lr()
        given = scheduler._step(seen)
        try:
            return self._checked(given, type(scheduler).__name__)
        except (TypeError, ValueError):
            scheduler._last_lr = before  # a refused rate was never in use, and no checkpoint could keep it
            raise

    def state_dict(self) -> dict[str, Any] | None:
        """Returns the schedule's state; None where there is no schedule."""
        return None if self.scheduler is None else dict(self.scheduler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any] | None, strict: bool) -> None:
        """Restores what :meth:`state_dict` returned; None, and a state without a schedule for it, change nothing.

        Raises:
            RuntimeError, ValueError: If it does not fit. The schedule is what it was then.
        """
        if self.scheduler is not None and state is not None:
            load_state(self.scheduler, state, "lr_scheduler", strict)

    def _checked(self, given: Sequence[Any], name: str) -> list[float]:
        """Returns what get_lr() of a schedule returned as floats."""
        config = self._config
        try:
            rates = [float(rate) for rate in given]
        except (TypeError, ValueError):
            raise TypeError(
                f"get_lr() of {name} must return a list of numbers, but it returned {shown(given)}"
            ) from None
        groups = len(config.learning_rates)
        if len(rates) not in (1, groups):
            raise ValueError(
                f"get_lr() of {name} must return one learning rate"
                + (f", or {groups}: one per parameter group and one for all others" if groups > 1 else "")
                + f", but it returned {shown(given)}"
            )
        if len(rates) < groups and config.has_group_rates:
            raise ValueError(
                f"get_lr() of {name} returned one learning rate, {shown(given)}, but parameter groups have their "
                "own, which "
                f"it would override: return {groups}, from train_step_info.optimizer_config.learning_rates, or leave "
                "'lr' out of the groups"
            )
        if not all(math.isfinite(rate) and rate >= 0 for rate in rates):
            raise ValueError(
                f"get_lr() of {name} must return finite numbers, at least 0, but it returned {shown(given)}"
            )
        return rates
