"""``TrainStepInfo``: the progress of training, as schedules and loss scalers see it."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from ..core.errors import check_count, shown
from .config import OptimizerConfig

Norm = float | torch.Tensor | Callable[[], torch.Tensor | None] | None


class TrainStepInfo:
    """State of the training loop.

    Attributes:
        optimizer_config: The trainer's optimizer config.
        all_finite: Whether all gradients of the last optimizer step were finite; only mixed precision checks them.
        fetches: Names of the outputs that steps return, in this order; empty for all described outputs. Assigned values
            are checked; None means an empty list.
        optimization_step: Number of completed weight updates; drives the schedules.
        step: Number of completed ``train_step`` calls; with several processes, the maximum over them at the last
            update.
    """

    # A misspelled attribute is an error.
    __slots__ = ("_fetches", "_norm", "_rates", "all_finite", "optimization_step", "optimizer_config", "step")

    def __init__(
        self,
        optimizer_config: OptimizerConfig,
        all_finite: bool = True,
        fetches: Collection[str] | None = None,
        optimization_step: int = 0,
        step: int = 0,
    ) -> None:
        if not isinstance(optimizer_config, OptimizerConfig):
            raise TypeError(f"optimizer_config must be an optimizer config, but {shown(optimizer_config)} was given")
        if not isinstance(all_finite, bool):
            raise TypeError(f"all_finite must be a bool, but {shown(all_finite)} was given")
        self.optimizer_config = optimizer_config
        self.all_finite = all_finite
        self.fetches = fetches
        self._rates: list[float] = []
        self._norm: Norm = None
        check_count("optimization_step", optimization_step, minimum=0)
        check_count("step", step, minimum=0)
        self.optimization_step, self.step = optimization_step, step

    @property
    def grad_norm(self) -> float | None:
        """Global norm of the gradients of the last update, before clipping; None before the first update.

        If no limit or check needs the norm, it is computed when it is read. This works until the next step begins,
        which releases the gradients; afterwards it is None.
        """
        if callable(self._norm):
            self._norm = self._norm()
        if isinstance(self._norm, torch.Tensor):
            self._norm = float(self._norm)
        return self._norm

    @property
    def learning_rates(self) -> list[float]:
        """Learning rates of the last update: one for all parameters, or one per group and one for the rest."""
        return list(self._rates)

    @property
    def learning_rate(self) -> float | None:
        """The first of :attr:`learning_rates`; None before the first update."""
        return self._rates[0] if self._rates else None

    def note_update(self, rates: list[float], norm: Norm) -> None:
        """Records what an update used.

        Args:
            rates: The learning rates.
            norm: The gradients' norm, or a function that computes it.
        """
        self._rates, self._norm = rates, norm

    @property
    def fetches(self) -> list[str]:
        """Names of the outputs that steps return, in this order; empty (assign a list or None) for all."""
        return self._fetches

    @fetches.setter
    def fetches(self, names: Collection[str] | None) -> None:
        names = [] if names is None else names
        if (
            isinstance(names, str)
            or not isinstance(names, Collection)
            or not all(isinstance(name, str) for name in names)
        ):
            raise TypeError(f"fetches must be a list of output names, but {shown(names)} was given")
        self._fetches = list(names)

    def __repr__(self) -> str:
        return (
            f"TrainStepInfo(step={self.step}, optimization_step={self.optimization_step}, "
            f"all_finite={self.all_finite}, fetches={self.fetches})"
        )
