"""Checks that all processes train the same model and do the same at the same time, and reports the differences."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from ..core.errors import DistributedError, warn
from .missing import ADVICE
from .processes import Processes

# The number of differences that a message lists.
_MOST = 3
_MISSING = "missing"
_DIFFER = "the processes must train the same model, but they differ in"


def checksum(value: Any) -> float:
    """Returns a checksum of a JSON value, the same in all processes; 0 for None."""
    return 0.0 if value is None else 1.0 + zlib.crc32(json.dumps(value, sort_keys=True).encode())


def check_traits(processes: Processes, traits: Mapping[str, Any]) -> None:
    """Compares settings that must be equal in all processes.

    Args:
        processes: The processes that train.
        traits: The settings: JSON values by their names in messages, with the same names in every process. None if
            this process has nothing to compare.

    Raises:
        DistributedError: In all processes, if something differs; it says what, and in which ranks.
    """
    rows = processes.exchange("the start of the other processes", [checksum(value) for value in traits.values()])
    columns = [{number for number in column if number} for column in zip(*rows, strict=True)]
    different = [name for name, checksums in zip(traits, columns, strict=True) if len(checksums) > 1]
    if different:
        raise_difference(processes, {name: traits[name] for name in different})


def compare_steps(processes: Processes, step: Mapping[str, Any]) -> None:
    """Warns, in rank 0, if the first training graphs of the processes compute different things.

    Their gradients have the names and shapes of the same parameters, so they can be combined, but perhaps a setting
    differs by mistake. Graphs for other conditions on sizes and values, which batches bring about, are not compared.
    What model and loss read outside tensors may differ, such as the rank, as long as the operators do not; otherwise it
    is the reason.

    Args:
        processes: The processes that train.
        step: From ``Guard.compared``; empty if this process has nothing to compare.
    """
    sums = {row[0] for row in processes.exchange("the first update of the others", [checksum(step or None)])}
    if len(sums - {0.0}) < 2:
        return
    gathered = processes.gather("what differs", json.dumps(step).encode())
    steps = {rank: found for rank, data in enumerate(gathered) if (found := json.loads(data))}
    if len({found["conditions"] for found in steps.values()}) > 1:
        return
    operators = _message("the operators of the step", {rank: found["operators"] for rank, found in steps.items()})
    if operators:
        common = set.intersection(*(set(found["values"]) for found in steps.values()))
        values = {rank: {place: found["values"][place] for place in common} for rank, found in steps.items()}
        read = _message("what model and loss read outside tensors", values)
        if not processes.rank:
            warn(
                "the processes train together, although their steps differ in "
                f"{'. In '.join(filter(None, (read, operators)))}. If a setting differs by mistake, make it equal"
            )


def raise_difference(processes: Processes, traits: Mapping[str, Any]) -> NoReturn:
    """Raises a DistributedError that describes the differences; all processes call it.

    Args:
        processes: The processes that train.
        traits: As for :func:`check_traits`.
    """
    values_by_rank = [json.loads(data) for data in processes.gather("what differs", json.dumps(traits).encode())]
    messages = [
        _message(name, {rank: found[name] for rank, found in enumerate(values_by_rank) if found[name] is not None})
        for name in traits
    ]
    raise DistributedError(f"{_DIFFER} {'. In '.join(messages)}")


def _message(name: str, by_rank: Mapping[int, Any]) -> str:
    """Describes how something differs between ranks; empty if it is the same."""
    leaves = {rank: dict(_leaves(value)) for rank, value in by_rank.items()}
    paths = list(dict.fromkeys(path for found in leaves.values() for path in found))
    texts = {path: _difference({rank: found.get(path, _MISSING) for rank, found in leaves.items()}) for path in paths}
    parts = [f"{path} is {text}" if path else text for path, text in texts.items() if text]
    more = f"; and {len(parts) - _MOST} more" if len(parts) > _MOST else ""
    return f"{name}: {'; '.join(parts[:_MOST])}{more}" if parts else ""


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields the leaves of nested dicts with their paths."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path[:-1]}.{key}'" if path else f"'{key}'")
    else:
        yield path, value if isinstance(value, str) else json.dumps(value)


def _difference(values: Mapping[int, str]) -> str:
    """Describes the values of all ranks; empty if all are equal."""
    ranks: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks.setdefault(value, []).append(rank)
    if len(ranks) < 2:
        return ""
    parts = [
        f"{value} on {f'rank {owners[0]}' if len(owners) == 1 else f'ranks {owners}'}"
        for value, owners in ranks.items()
    ]
    return f"{', '.join(parts[:-1])} and {parts[-1]}"


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
        trainer: The number of its trainer, in the order in which they were made.
        stop: Whether it asks all to stop.
        compared: Whether it has compared the start of training.
        joining: Whether it is in a context of ``trainer.join()``.
        step: Its steps so far.
        rates: The checksum of its learning rates.
        rate_count: The number of learning rates.
        names: The checksum of the names of its gradients and changed buffers.
        weight, unit, scale: As in ``Share``.
    """

    number: float
    trainer: float
    stop: float
    compared: float
    joining: float
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

    @property
    def place(self) -> str:
        """Where it is, for messages."""
        return f"{KINDS[self.kind]}{' inside trainer.join()' if self.joining and self.kind != FOLLOW else ''}"


def number_of(kind: str) -> float:
    """Returns the number of a kind in a row."""
    return float(_NAMES.index(kind))


def check_rows(
    processes: Processes, rows: Sequence[Row], own_row: Row, rates: Sequence[float], names: list[str]
) -> None:
    """Checks that all processes do the same with the same settings, or merely follow in ``trainer.join()``.

    Args:
        processes: The processes that train.
        rows: The rows of all processes.
        own_row: The row of this process.
        rates: The learning rates of this process.
        names: The names of its gradients and changed buffers.

    Raises:
        DistributedError: In all processes, if something differs.
    """
    if len({row.trainer for row in rows}) > 1:
        uses = ", ".join(f"rank {rank} uses number {int(row.trainer)}" for rank, row in enumerate(rows))
        raise DistributedError(
            f"the processes use different trainers at the same time: {uses}, in the order in which they were made. "
            f"{ADVICE}"
        )
    doing = {rank: row for rank, row in enumerate(rows) if row.kind != FOLLOW}
    if len({row.kind for row in doing.values()}) > 1 or len({row.joining for row in rows}) > 1:
        does = ", ".join(f"rank {rank} is {row.place}" for rank, row in enumerate(rows))
        raise DistributedError(f"the processes do different things at the same time: {does}. {ADVICE}")
    if len({row.rates for row in doing.values()}) > 1:
        raise_difference(processes, {"the learning rates": None if own_row.kind == FOLLOW else list(rates)})
    scales = {rank: row.scale for rank, row in enumerate(rows) if row.weight}
    if len(set(scales.values())) > 1:
        raise DistributedError(f"the processes have different loss scales: {scales}, by rank")
    if own_row.kind == "step" and len({row.names for row in doing.values()}) > 1:
        raise_difference(processes, {"the parameters that have p.grad": dict.fromkeys(names, "there")})
