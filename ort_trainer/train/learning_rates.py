"""The learning rates of the next update, from the config or from a schedule."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler as TorchScheduler
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ..core.errors import shown
from ..optim import LRScheduler, OptimizerConfig
from ..optim.lr_scheduler import ATTRIBUTES
from ..optim.step_info import TrainStepInfo
from ..optim.torch_state import as_types_of, check_groups, check_like, check_schedule
from ..state.differences import compare_keys
from .user_objects import load_state

_GROUPS = "param_groups"
Schedule = LRScheduler | TorchScheduler | Callable[[int], float]
"""Values of the option ``lr_scheduler``: our schedules, PyTorch's, or a function from update number to factor."""


class LearningRates:
    """The config's rates: without a schedule, or with a PyTorch schedule that the user steps.

    Args:
        config: The config with the rates.

    Attributes:
        scheduler: The user's own object, or None.
    """

    scheduler: Schedule | None = None

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config

    def upcoming(self, info: TrainStepInfo, step: int) -> list[float]:
        """Returns one learning rate for all parameters, or one per group and one for the others.

        Args:
            info: The training progress.
            step: The ``step`` passed to the schedule.

        Raises:
            TypeError, ValueError: If the schedule returns invalid rates.
        """
        return self._config.learning_rates

    def current(self, info: TrainStepInfo) -> list[float]:
        """Returns the rates of the next update without advancing the schedule.

        For a schedule that computes its next rates only when it advances, returns those of the last update.
        """
        return self._config.learning_rates

    def updated(self) -> None:
        """Called after the weights were updated."""

    def state_dict(self) -> dict[str, Any] | None:
        """Returns the schedule's state; None without a schedule."""
        return None

    def check_state(self, state: Mapping[str, Any] | None, strict: bool) -> None:
        """Checks the parts of a state that :meth:`load_state_dict` would restore unchecked; changes nothing.

        Raises:
            RuntimeError, CheckpointError: If the state is invalid.
        """

    def load_state_dict(self, state: Mapping[str, Any] | None, strict: bool) -> None:
        """Restores what :meth:`state_dict` returned; does nothing for None, or if there is no schedule.

        Raises:
            RuntimeError, CheckpointError: If the state is invalid. The schedule is unchanged then.
        """


class _Scheduled(LearningRates):
    """A schedule with this package's interface computes the rates from the config's."""

    scheduler: LRScheduler

    def __init__(self, config: OptimizerConfig, scheduler: LRScheduler) -> None:
        super().__init__(config)
        self.scheduler = scheduler
        scheduler._config = config  # so that get_last_lr() can return the first step's rate beforehand
        config.scheduled()

    def upcoming(self, info: TrainStepInfo, step: int) -> list[float]:
        scheduler = self.scheduler
        seen = copy.copy(info)  # the schedule sees the step that is running, which is not counted yet
        seen.step = step
        before = scheduler._known_lr()
        rates = scheduler._step(seen)
        try:
            return self._checked(rates, type(scheduler).__name__)
        except (TypeError, ValueError):
            scheduler._last_lr = before  # a rejected rate was never used, and a checkpoint could not store it
            raise

    def current(self, info: TrainStepInfo) -> list[float]:
        return self._checked(self.scheduler.get_last_lr(), type(self.scheduler).__name__)

    def state_dict(self) -> dict[str, Any]:
        return dict(self.scheduler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any] | None, strict: bool) -> None:
        if state is not None:
            current = self.scheduler.state_dict()
            missing = (
                {ATTRIBUTES: current[ATTRIBUTES]} if ATTRIBUTES in current else {}
            )  # in states of earlier versions
            load_state(self.scheduler, {**missing, **state}, "lr_scheduler", strict)

    def _checked(self, returned: Sequence[Any], name: str) -> list[float]:
        """Checks the rates that a schedule's get_lr() returned and converts them to floats."""
        config = self._config
        try:
            rates = [float(rate) for rate in returned]
        except (TypeError, ValueError):
            raise TypeError(
                f"get_lr() of {name} must return a list of numbers, but it returned {shown(returned)}"
            ) from None
        groups = len(config.learning_rates)
        if len(rates) not in (1, groups):
            raise ValueError(
                f"get_lr() of {name} must return one learning rate"
                + (f", or {groups}: one per parameter group and one for all others" if groups > 1 else "")
                + f", but it returned {shown(returned)}"
            )
        if len(rates) < groups and config.has_group_rates:
            raise ValueError(
                f"get_lr() of {name} returned one learning rate, {shown(returned)}, which would override those of the "
                f"parameter groups: return {groups}, based on train_step_info.optimizer_config.learning_rates, or "
                "leave 'lr' out of the groups"
            )
        if not all(math.isfinite(rate) and rate >= 0 for rate in rates):
            raise ValueError(
                f"get_lr() of {name} must return finite numbers, at least 0, but it returned {shown(returned)}"
            )
        return rates


class _Factor(LearningRates):
    """A function returns the factor on the config's rates."""

    def __init__(self, config: OptimizerConfig, factor: Callable[[int], float]) -> None:
        super().__init__(config)
        self.scheduler = self._factor = factor
        config.scheduled()

    def upcoming(self, info: TrainStepInfo, step: int) -> list[float]:
        returned = self._factor(info.optimization_step)
        value = returned.item() if isinstance(returned, torch.Tensor) and returned.numel() == 1 else returned
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ValueError(
                f"the function in the option lr_scheduler must return a finite number, at least 0, but for update "
                f"{info.optimization_step} it returned {shown(returned)}"
            )
        return [rate * value for rate in self._config.learning_rates]

    def current(self, info: TrainStepInfo) -> list[float]:
        return self.upcoming(info, info.step)


class _FromTorch(LearningRates):
    """A PyTorch schedule changes the rates of its optimizer; it is stepped after each update."""

    scheduler: TorchScheduler

    def __init__(self, config: OptimizerConfig, scheduler: TorchScheduler) -> None:
        super().__init__(config)
        name = f"torch.optim.lr_scheduler.{type(scheduler).__name__}"
        if isinstance(scheduler, ReduceLROnPlateau):
            raise ValueError(
                f"option lr_scheduler: {name} needs a metric at each step: leave it out of the options and call "
                "scheduler.step(metric) yourself. Every update reads the rates from its optimizer"
            )
        optimizer = getattr(config, "optimizer", None)
        if scheduler.optimizer is not optimizer:
            raise ValueError(
                f"option lr_scheduler: {name} changes the rates of its own {type(scheduler.optimizer).__name__}, which "
                "the trainer does not use: pass that optimizer, or ort_trainer.optim.from_torch(optimizer), as "
                "optim_config"
            )
        self.scheduler = scheduler

    def updated(self) -> None:
        self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {**_plain(self.scheduler.state_dict()), _GROUPS: _plain(self._groups())}

    def check_state(self, state: Mapping[str, Any] | None, strict: bool) -> None:
        if state is None:
            return
        scheduler, where = self.scheduler, "state_dict[lr_scheduler]"
        optimizer, (state, groups) = scheduler.optimizer, self._parts(state)
        compare_keys(scheduler.state_dict(), state, strict, where)
        check_like(groups, self._groups(), f"{where}[{_GROUPS}]")
        groups = [{**group, **values} for group, values in zip(optimizer.param_groups, groups, strict=True)]
        check_groups(optimizer, groups, f"{where}[{_GROUPS}]")
        check_schedule(scheduler, state, groups, where)

    def load_state_dict(self, state: Mapping[str, Any] | None, strict: bool) -> None:
        if state is None:
            return
        state, groups = self._parts(state)
        load_state(self.scheduler, as_types_of(self.scheduler.state_dict(), state), "lr_scheduler", strict)
        # Besides its own state, a schedule changes its optimizer's rates, and some change the momentum.
        for group, values in zip(
            self.scheduler.optimizer.param_groups, as_types_of(self._groups(), groups), strict=True
        ):
            group.update(values)

    def _parts(self, state: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
        """Returns the state of the schedule itself, and the hyper-parameters that it changes."""
        return {key: value for key, value in state.items() if key != _GROUPS}, state.get(_GROUPS, self._groups())

    def _groups(self) -> list[dict[str, Any]]:
        """Returns the hyper-parameters of the optimizer's groups that a schedule may change."""
        return [
            {key: value for key, value in group.items() if key in ("lr", "momentum", "betas")}
            for group in self.scheduler.optimizer.param_groups
        ]


def _plain(value: Any) -> Any:
    """Returns the state of a schedule with str keys and lists only, as checkpoints require."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return [_plain(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def learning_rates(config: OptimizerConfig, scheduler: Schedule | None) -> LearningRates:
    """Returns the learning rates of a config with a schedule of any kind.

    Args:
        config: The config with the initial rates.
        scheduler: The user's own object, or None.

    Raises:
        ValueError: If it is a PyTorch schedule of another optimizer, or one that can't be stepped after each update.
    """
    if scheduler is None:
        return LearningRates(config)
    if isinstance(scheduler, LRScheduler):
        return _Scheduled(config, scheduler)
    return _FromTorch(config, scheduler) if isinstance(scheduler, TorchScheduler) else _Factor(config, scheduler)
