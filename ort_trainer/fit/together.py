"""What the processes of a fit tell each other, so that all come to the same decisions."""

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
    """The processes of a fit; one is together with itself.

    Args:
        trainer: The trainer.
        state: The state of the fit.
        signals: Names of the signals that end the fit.

    Attributes:
        several: Whether there are several processes.
        interrupted: Whether a signal had come, to any process, when they last shared something.
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
        """Whether a signal to stop has come to this process."""
        return bool(self._stop)

    def check_same(self, settings: Mapping[str, Any]) -> None:
        """Compares what must be equal in all processes.

        Raises:
            ValueError: If something is not, in all processes.
        """
        rows = self._trainer.gather(settings)
        for name, value in rows[0].items():
            different = {rank: row[name] for rank, row in enumerate(rows) if row[name] != value}
            if different:
                found = ", ".join(f"{other} in rank {rank}" for rank, other in different.items())
                raise ValueError(
                    f"fit() was called with another {name} in rank {', '.join(map(str, different))}: it is {value} in "
                    f"rank 0, and {found}; give all processes the same arguments"
                )

    def share(self, values: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Returns the values of all processes, and learns whether any wants to stop."""
        state = self._state
        rows = self._trainer.gather({**values, "reason": state.reason, "interrupted": self.pressed})
        state.reason = next((row["reason"] for row in rows if row["reason"]), "")
        self.interrupted = any(row["interrupted"] for row in rows)
        return rows

    def stopped(self) -> bool:
        """Whether training is to end here; of several processes all learn that when they meet, and end alike."""
        asked = bool(self._state.reason) or self.pressed
        if not self.several:
            return asked
        self._strategy.stop_asked = asked
        return self._strategy.stop_heard

    def has_taken_workers(self, error: RuntimeError) -> bool:
        """Whether a signal to stop, perhaps sent to a whole group of processes, has ended workers of the loader."""
        return self.pressed and "DataLoader worker" in str(error)

    def interruptible(self) -> StopSignals:
        """Returns a context in which the signals that end the fit are wishes, which :meth:`stopped` passes on."""
        return self._stop

    def _takes_ctrl_c(self) -> bool:
        """Whether Ctrl-C is a wish, as there are others who would wait for a process that just ends."""
        in_main = threading.current_thread() is threading.main_thread()
        return self.several and in_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def end(self) -> None:
        """Forgets the wish to stop."""
        self._strategy.stop_asked = False


def mean(rows: Sequence[Mapping[str, Any]], weights: Sequence[float]) -> dict[str, Any]:
    """Returns the weighted mean of the numbers of all processes, by name; of equal ones that very number.

    Raises:
        ValueError: If the processes have other names.
    """
    for rank, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            raise ValueError(
                f"rank {rank} has the numbers {sorted(row)}, but rank 0 {sorted(rows[0])}: metrics and callbacks must "
                "give the same names in all processes"
            )
    total = sum(weights)
    found = {}
    for name in rows[0]:
        counted = [(row[name], weight) for row, weight in zip(rows, weights, strict=True) if weight]
        equal = all(other == counted[0][0] for other, _ in counted)
        found[name] = counted[0][0] if equal else sum(other * weight for other, weight in counted) / total
    return found
