"""N processes with batches of size b train as one process with batches of size N * b."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from .world import run

CASES = ("adam",)


@functools.cache
def world(size: int) -> dict[str, list[dict[str, Any]]]:
    return run("data_parallel_cases", CASES, size)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("case", CASES)
def test_processes_train_as_one(case: str, size: int) -> None:
    (alone,), together = world(1)[case], world(size)[case]
    losses = np.mean([found["losses"] for found in together], axis=0)
    np.testing.assert_allclose(losses, alone["losses"], rtol=1e-6)
    for found in together:
        for name in (key for key in alone if key.startswith("weight.")):
            np.testing.assert_allclose(found[name], alone[name], rtol=1e-6, atol=1e-7)
