"""``ORTModule`` inside FSDP2: the numbers of plain FSDP2."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from .fsdp_cases import ARRANGEMENTS
from .world import run


@functools.cache
def world() -> dict[str, list[dict[str, Any]]]:
    return run("fsdp_cases", ("compared", "refused"), 2)


@pytest.mark.parametrize("arrangement", [arrangement.__name__ for arrangement in ARRANGEMENTS])
def test_numbers_are_those_without_graphs(arrangement: str) -> None:
    for found in world()["compared"]:
        assert "error" not in found, found
        for kind in ("losses", "weights"):
            ours, theirs = found[f"{arrangement} graphs {kind}"], found[f"{arrangement} eager {kind}"]
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        assert len(set(ours.tolist())) > 10


def test_other_orders_say_what_to_do() -> None:
    for found in world()["refused"]:
        assert len(found) == 5, found
        assert all("fully_shard(ORTModule(layer))" in str(message) for message in found.values())
