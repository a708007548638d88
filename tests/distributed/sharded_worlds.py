"""The worlds of test_zero.py and test_checkpoints.py, each launched once for both."""

from __future__ import annotations

import functools
import os
import tempfile
from typing import Any

from .sharded_cases import RUNS
from .world import run

# The order matters: the first fills the export cache, and the others load what earlier ones have saved.
LAUNCHES: list[tuple[int, list[str]]] = [
    (1, [*RUNS, "own_loop", "overflow", "first_on"]),
    (4, ["adam", "lamb", "memory", "first_on", "first_off"]),
    (
        2,
        [
            *RUNS,
            "own_loop",
            "overflow",
            "second_off",
            "second_on",
            "resume",
            "refused_torch",
            "refused_state",
            "refused_shared",
        ],
    ),
    (1, ["third", "third_again"]),
    (3, ["adam", "lamb", "overflow", "memory", "fourth_on", "fourth_off", "failures"]),
]
CASES = {size: [case for other, cases in LAUNCHES if other == size for case in cases] for size, _ in LAUNCHES}


@functools.cache
def worlds() -> dict[int, dict[str, list[dict[str, Any]]]]:
    """Returns the results of the cases, by number of processes, case and rank."""
    found: dict[int, dict[str, list[dict[str, Any]]]] = {size: {} for size in CASES}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CHECKPOINTS"] = folder
        try:
            for size, cases in LAUNCHES:
                found[size] |= run("sharded_cases", cases, size)
        finally:
            del os.environ["CHECKPOINTS"]
    return found
