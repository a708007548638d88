"""The data that processes exchange before a joint operation, and its checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..core.errors import DistributedError
from .agreement import raise_difference
from .missing import ADVICE
from .processes import Processes

__all__ = ["FOLLOW", "KINDS", "Row", "check_rows", "number_of"]

FOLLOW = "follow"
KINDS = {
    FOLLOW: "at the end of trainer.join()",
    "update": "in train_step() or optimizer_step()",
    "step": "in optimizer_step() with gradients in p.grad",
    "pass": "in forward_backward()",
    "state": "in state_dict(), save_checkpoint() or export_artifacts()",
    "model": "in save_checkpoint(include_optimizer_states=False)",
    "gather": "in gather()",
    "save": "at the end of a write by one process",
    "load": "in load_state_dict() or load_checkpoint()",
}
"""The kinds of operations, with the methods that perform them."""
_NAMES = list(KINDS)


class Row(NamedTuple):
    """The numbers that a process sends.

    Attributes:
        number: The number of its operation.
        stop: Whether it asks all to stop.
        compared: Whether it has compared the start of training.
        step: Its steps so far.
        rates: The checksum of its learning rates.
        rate_count: The number of learning rates.
        names: The checksum of the names of its gradients and changed buffers.
        weight, unit, scale: As in ``Share``.
    """

    number: float
    stop: float
    compared: float
    step: float
    rates: float
    rate_count: float
    names: float
    weight: float
    unit: float
    scale: float

    @property
    def kind(self) -> str:
        """The kind of its operation."""
        return _NAMES[int(self.number)]


def number_of(kind: str) -> float:
    """Returns the number of a kind in a row."""
    return float(_NAMES.index(kind))


def check_rows(processes: Processes, rows: Sequence[Row], own: Row, rates: Sequence[float], names: list[str]) -> None:
    """Checks that all processes that do not follow perform the same operation with the same settings.

    Args:
        processes: The processes that train.
        rows: The rows of all processes.
        own: The row of this process.
        rates: The learning rates of this process.
        names: The names of its gradients and changed buffers.

    Raises:
        DistributedError: In all processes, if something differs.
    """
    doing = {rank: row for rank, row in enumerate(rows) if row.kind != FOLLOW}
    if len({row.kind for row in doing.values()}) > 1:
        does = ", ".join(f"rank {rank} is {KINDS[row.kind]}" for rank, row in doing.items())
        raise DistributedError(f"the processes do different things at the same time: {does}. {ADVICE}")
    if len({row.rates for row in doing.values()}) > 1:
        raise_difference(processes, {"the learning rates": None if own.kind == FOLLOW else list(rates)})
    scales = {rank: row.scale for rank, row in enumerate(rows) if row.weight}
    if len(set(scales.values())) > 1:
        raise DistributedError(f"the processes have different loss scales: {scales}, by rank")
    if own.kind == "step" and len({row.names for row in doing.values()}) > 1:
        raise_difference(processes, {"the parameters that have p.grad": dict.fromkeys(names, "there")})
