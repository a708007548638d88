"""What the processes of a fit exchange to reach the same decisions."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..runs.stop import StopSignals

if TYPE_CHECKING:
    from ..trainer import ORTTrainer
    from .state import FitState

__all__ = ["Together", "mean"]


class Together:
    """The processes of a fit; works for a single process, too.

    Args:
        trainer: The trainer.
        state: The state of the fit.
        signals: Names of the signals that end the fit.

    Attributes:
        several: Whether there are several processes.
        interrupted: Whether any process had received a signal at the last :meth:`share`.
    """

    def __init__(self, trainer: ORTTrainer, state: FitState, signals: Iterable[str]) -> None:
        self._trainer, self._state, self._strategy = trainer, state, trainer.loop.strategy
        self.several = trainer.world_size > 1
        self.interrupted = False
        self._stop = StopSignals(signals)
        if self._takes_ctrl_c():
            self._stop = StopSignals([*self._stop.signals, "SIGINT"])

    @property
    def pressed(self) -> bool:
        """Whether this process received a signal to stop."""
        return bool(self._stop)

    def check_same(self, settings: Mapping[str, Any]) -> None:
        """Compares settings that must be equal in all processes.

        Raises:
            ValueError: If a setting differs; it is raised in all processes.
        """
        rows = self._trainer.gather(settings)
        for name, value in rows[0].items():
            different = {rank: row[name] for rank, row in enumerate(rows) if row[name] != value}
            if different:
                found = ", ".join(f"{other} in rank {rank}" for rank, other in different.items())
                raise ValueError(
                    f"fit() was called with another {name} in rank {', '.join(map(str, different))}: it is {value} in "
                    f"rank 0, but {found}; pass the same arguments in all processes"
                )

    def share(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the values of all processes, and records whether any asks to stop."""
        state = self._state
        rows = self._trainer.gather({**values, "reason": state.reason, "interrupted": self.pressed})
        state.reason = next((row["reason"] for row in rows if row["reason"]), "")
        self.interrupted = any(row["interrupted"] for row in rows)
        return rows

    def stopped(self) -> bool:
        """Whether training ends here; with several processes all learn it when they meet, and end at the same step."""
        asked = bool(self._state.reason) or self.pressed
        if not self.several:
            return asked
        self._strategy.stop_asked = asked
        return self._strategy.stop_heard

    def has_taken_workers(self, error: RuntimeError) -> bool:
        """Whether a signal to stop, sent to the whole process group, also ended workers of the loader."""
        return self.pressed and "DataLoader worker" in str(error)

    def interruptible(self) -> StopSignals:
        """Returns a context that turns the signals that end the fit into requests, reported by :meth:`stopped`."""
        return self._stop

    def _takes_ctrl_c(self) -> bool:
        """Whether Ctrl-C is only a request, because other processes would wait for one that ends at once."""
        in_main = threading.current_thread() is threading.main_thread()
        return self.several and in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def end(self) -> None:
        """Clears the request to stop."""
        self._strategy.stop_asked = False


def mean(rows: Sequence[Mapping[str, Any]], weights: Sequence[float]) -> dict[str, Any]:
    """Returns the weighted mean of the numbers of all processes, by name; equal numbers are returned unchanged.

    Raises:
        ValueError: If the processes have different names.
    """
    for rank, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            raise ValueError(
                f"rank {rank} has the numbers {sorted(row)}, but rank 0 has {sorted(rows[0])}: metrics and callbacks "
                "must return the same names in all processes"
            )
    total = sum(weights)
    found = {}
    for name in rows[0]:
        counted = [(row[name], weight) for row, weight in zip(rows, weights, strict=True) if weight]
        equal = all(other == counted[0][0] for other, _ in counted)
        found[name] = counted[0][0] if equal else sum(other * weight for other, weight in counted) / total
    return found
