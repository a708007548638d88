"""Finds out whether all processes train the same: by checksums, and by what differs where one does."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from ..errors import DistributedError
from .processes import Processes

__all__ = ["check_traits", "checksum", "raise_difference"]

# Of what differs, so many things are said.
_MOST = 3
_MISSING = "missing"


def checksum(value: Any) -> float:
    """Returns a checksum of a JSON value, the same in all processes; 0 of None."""
    return 0.0 if value is None else 1.0 + zlib.crc32(json.dumps(value, sort_keys=True).encode())


def check_traits(processes: Processes, traits: Mapping[str, Any]) -> None:
    """Compares what must be equal.

    Args:
        processes: Who trains.
        traits: What it is, by what messages call it: JSON values, in every process of the same names. None where this
            process has nothing to compare.

    Raises:
        DistributedError: In all processes, if something differs; it says what, and in which ranks.
    """
    rows = processes.exchange("the start of the other processes", [checksum(value) for value in traits.values()])
    columns = [{number for number in column if number} for column in zip(*rows, strict=True)]
    different = [name for name, found in zip(traits, columns, strict=True) if len(found) > 1]
    if different:
        raise_difference(processes, {name: traits[name] for name in different})


def raise_difference(processes: Processes, traits: Mapping[str, Any]) -> NoReturn:
    """Raises a DistributedError that says what differs; all processes call it.

    Args:
        processes: Who trains.
        traits: As for :func:`check_traits`.
    """
    found = [json.loads(data) for data in processes.gather("what differs", json.dumps(traits).encode())]
    messages: list[str] = []
    for name in traits:
        by_rank = {rank: dict(_leaves(values[name])) for rank, values in enumerate(found) if values[name] is not None}
        paths = list(dict.fromkeys(path for leaves in by_rank.values() for path in leaves))
        texts = {
            path: _difference({rank: leaves.get(path, _MISSING) for rank, leaves in by_rank.items()}) for path in paths
        }
        parts = [f"{path} is {text}" if path else text for path, text in texts.items() if text]
        more = f"; and {len(parts) - _MOST} more" if len(parts) > _MOST else ""
        messages.append(f"{name}: {'; '.join(parts[:_MOST])}{more}")
    raise DistributedError(f"the processes do not train the same. They differ in {'. In '.join(messages)}")


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields what is in nested dicts, by where it is."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{path[:-1]}.{key}'" if path else f"'{key}'")
    else:
        yield path, value if isinstance(value, str) else json.dumps(value)


def _difference(values: Mapping[int, str]) -> str:
    """Returns what each rank has, or nothing where all have the same."""
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
