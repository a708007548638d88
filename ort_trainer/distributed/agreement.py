"""Finds out at the start whether all processes train the same: by checksums of names, shapes and options."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

from ..errors import DistributedError
from .processes import Processes

__all__ = ["check_traits"]


def check_traits(processes: Processes, traits: Mapping[str, Any]) -> None:
    """Compares what must be equal.

    Args:
        processes: Who trains.
        traits: What it is, by what messages call it: JSON values, in every process of the same names.

    Raises:
        DistributedError: In all processes, if something differs.
    """
    own = [float(zlib.crc32(json.dumps(value, sort_keys=True).encode())) for value in traits.values()]
    rows = processes.exchange("the start of the other processes", own)
    for place, name in enumerate(traits):
        different = [rank for rank, row in enumerate(rows) if row[place] != rows[0][place]]
        if different:
            raise DistributedError(f"ranks {different} have other {name} than rank 0")
