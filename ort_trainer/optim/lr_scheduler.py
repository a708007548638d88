"""Learning-rate schedules: functions from the number of completed updates to a learning rate.

In the formulas, s is ``optimization_step`` (updates completed before this one), T is ``total_steps``, W is
``warmup * T`` and base is the ``lr`` of the optimizer config. ``ort_trainer/core/schedules.py`` computes them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any, ClassVar

from ..core import schedules
from ..core.errors import check_count, shown
from .config import OptimizerConfig
from .step_info import TrainStepInfo

ATTRIBUTES = "attributes"
"""Key of the attributes of a user's own schedule in its state."""
# Attributes of the base class, which are not part of the state of a user's subclass.
_OWN = frozenset({"_config", "_last_lr"})
# The start of the module names of this package's schedules, which have no attributes of a user.
_HERE = f"{__name__.partition('.')[0]}."


def _real(name: str, value: Any, *, positive: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name!r} must be a number, but {shown(value)} ({type(value).__name__}) was given")
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise ValueError(f"{name!r} must be {'positive' if positive else 'at least 0'}, but {shown(value)} was given")
    return float(value)


class LRScheduler:
    """Base class of schedules. For your own schedule, subclass it and override :meth:`get_lr`.

    A subclass need not call ``super().__init__()``.
    """

    # The config of the trainer that uses the schedule.
    _config: OptimizerConfig | None = None

    def __init__(self) -> None:
        self._last_lr: list[float] = []

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        """Returns the learning rate of the next update.

        Args:
            train_step_info: ``optimization_step`` is the number of completed updates, ``optimizer_config.lr`` the base,
                ``optimizer_config.learning_rates`` the bases of all parameter groups.

        Returns:
            A list with one rate for all parameters; or with one rate per parameter group of the config, in order,
            followed by the rate of the parameters without a group. If a group has its own ``lr``, a single rate would
            override it and is refused. A bare number is a single rate; arrays and tensors work like lists.
        """
        raise NotImplementedError(f"{type(self).__name__} must override get_lr()")

    def get_last_lr(self) -> list[float]:
        """Returns the last result of :meth:`get_lr`; an empty list if no trainer uses the schedule.

        Before the trainer's first step, it returns the rates of that step.
        """
        last = self._known_lr()
        return last if last or self._config is None else _listed(self.get_lr(TrainStepInfo(self._config)))

    def _known_lr(self) -> list[float]:
        # A subclass need not call super().__init__(), so the attribute may be missing.
        return list(self.__dict__.get("_last_lr", []))

    def _step(self, train_step_info: TrainStepInfo) -> list[float]:
        """Computes, records and returns the rates of the next update."""
        self._last_lr = _listed(self.get_lr(train_step_info))
        return self._last_lr

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint: JSON values only.

        As in PyTorch, the attributes of your own subclass are part of it: numbers, strings, bools, None, and lists and
        dicts of them. Override this method and the next one for state of other types.
        """
        state: dict[str, Any] = {"last_lr": [float(lr) for lr in self._known_lr()]}
        attributes = {key: value for key, value in vars(self).items() if key not in _OWN and _is_plain(value)}
        if attributes and not type(self).__module__.startswith(_HERE):
            state[ATTRIBUTES] = copy.deepcopy(attributes)
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restores a state from :meth:`state_dict`.

        Raises:
            KeyError, TypeError, ValueError: If the state is invalid; nothing has changed then.
        """
        rates = [float(rate) for rate in state_dict["last_lr"]]
        if not all(math.isfinite(rate) and rate >= 0 for rate in rates):
            raise ValueError(f"last_lr must hold finite numbers of at least 0, but it is {shown(rates)}")
        attributes = state_dict.get(ATTRIBUTES, {})
        if not isinstance(attributes, Mapping) or not _is_plain(attributes):
            raise TypeError(f"{ATTRIBUTES} must be a dict of plain values, but it is {shown(attributes)}")
        unknown = sorted(attributes.keys() - vars(self).keys() | attributes.keys() & _OWN)
        if unknown:
            raise ValueError(f"{type(self).__name__} has no attributes {unknown}")
        self._last_lr = rates
        vars(self).update(copy.deepcopy(dict(attributes)))


def _is_plain(value: Any) -> bool:
    """Returns whether a value survives a checkpoint as it is."""
    if isinstance(value, Mapping):
        return type(value) is dict and all(type(key) is str and _is_plain(entry) for key, entry in value.items())
    return (
        all(map(_is_plain, value)) if type(value) is list else value is None or type(value) in (bool, int, float, str)
    )


def _listed(rates: Any) -> list[float]:
    """Returns the result of a user's ``get_lr``, a number or any sequence, as a list."""
    rates = rates.tolist() if hasattr(rates, "tolist") else rates
    return list(rates) if isinstance(rates, (list, tuple)) else [rates]


class _WarmupLRScheduler(LRScheduler):
    """Base class of the schedules with warm-up."""

    kind: ClassVar[str]

    def __init__(self, total_steps: int | None, warmup: float) -> None:
        super().__init__()
        check_count("'total_steps'", total_steps, optional=True)
        self.total_steps = total_steps
        self.warmup = _real("warmup", warmup)
        if self.warmup >= 1:
            raise ValueError(f"'warmup' is a share of total_steps: at least 0 and below 1, but {warmup!r} was given")

    @property
    def schedule(self) -> dict[str, Any]:
        """The argument of :func:`ort_trainer.core.schedules.learning_rate`: plain values, which files can store.

        Raises:
            ValueError: If ``total_steps`` is not set.
        """
        if self.total_steps is None:
            name = type(self).__name__
            raise ValueError(
                f"{name} has no total_steps, the number of updates of the whole training: write, for example, "
                f"{name}(total_steps=10_000), or set its attribute total_steps before the first step"
            )
        check_count("'total_steps'", self.total_steps)
        return {"kind": self.kind, "total_steps": self.total_steps, "warmup_steps": self.warmup * self.total_steps}

    def get_lr(self, train_step_info: TrainStepInfo) -> list[float]:
        """Returns the learning rate of the next update in a list, or one rate per group if groups have their own."""
        config = train_step_info.optimizer_config
        bases = config.learning_rates if config.has_group_rates else [config.lr]
        return [schedules.learning_rate(self.schedule, train_step_info.optimization_step, base) for base in bases]


class ConstantWarmupLRScheduler(_WarmupLRScheduler):
    """After warm-up, the learning rate stays at base.

    Args:
        total_steps: Updates in the whole training; positive. None to set the attribute before the first step.
        warmup: Share of the updates for warm-up, in [0, 1).
    """

    kind = "constant"

    def __init__(self, total_steps: int | None = None, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)


class LinearWarmupLRScheduler(_WarmupLRScheduler):
    """After warm-up ``base * max(0, (T - s) / max(1, T - W))``.

    Args:
        total_steps: Updates in the whole training; positive. None to set the attribute before the first step.
        warmup: Share of the updates for warm-up, in [0, 1).
    """

    kind = "linear"

    def __init__(self, total_steps: int | None = None, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)


class CosineWarmupLRScheduler(_WarmupLRScheduler):
    """After warm-up ``base * max(0, (1 + cos(2 pi cycles p)) / 2)`` with ``p = min(1, (s - W) / max(1, T - W))``.

    In the legacy class p grew beyond 1, so the learning rate rose again after ``total_steps``; here it stays.

    Args:
        total_steps: Updates in the whole training; positive. None to set the attribute before the first step.
        cycles: Number of cosine cycles; 0.5 decays from base to 0.
        warmup: Share of the updates for warm-up, in [0, 1).
    """

    kind = "cosine"

    def __init__(self, total_steps: int | None = None, cycles: float = 0.5, warmup: float = 0.002) -> None:
        super().__init__(total_steps, warmup)
        self.cycles = _real("cycles", cycles, positive=True)

    @property
    def schedule(self) -> dict[str, Any]:
        """As for the other schedules."""
        return {**super().schedule, "cycles": self.cycles}


class PolyWarmupLRScheduler(_WarmupLRScheduler):
    """After warm-up ``(base - lr_end) * (1 - (s - W) / (T - W))^power + lr_end``, and ``lr_end`` after ``T``.

    Args:
        total_steps: Updates in the whole training; positive. None to set the attribute before the first step.
        lr_end: The last learning rate, below the base.
        power: Exponent of the decay, at least 0.
        warmup: Share of the updates for warm-up, in [0, 1).

    Raises:
        ValueError: From ``get_lr`` if the base learning rate is not above ``lr_end``.
    """

    kind = "poly"

    def __init__(
        self, total_steps: int | None = None, lr_end: float = 1e-7, power: float = 1.0, warmup: float = 0.002
    ) -> None:
        super().__init__(total_steps, warmup)
        self.lr_end = _real("lr_end", lr_end)
        self.power = _real("power", power)

    @property
    def schedule(self) -> dict[str, Any]:
        """As for the other schedules."""
        return {**super().schedule, "lr_end": self.lr_end, "power": self.power}
