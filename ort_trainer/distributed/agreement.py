"""Checks that all processes train the same model: compares checksums, and reports the differences if they differ."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from ..core.errors import DistributedError
from .processes import Processes

__all__ = ["check_traits", "checksum", "raise_difference"]

# The number of differences that a message lists.
_MOST = 3
_MISSING = "missing"


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
    different = [name for name, found in zip(traits, columns, strict=True) if len(found) > 1]
    if different:
        raise_difference(processes, {name: traits[name] for name in different})


def raise_difference(processes: Processes, traits: Mapping[str, Any]) -> NoReturn:
    """Raises a DistributedError that describes the differences; all processes call it.

    Args:
        processes: The processes that train.
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
    raise DistributedError(f"the processes must train the same model, but they differ in {'. In '.join(messages)}")


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
