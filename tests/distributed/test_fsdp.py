"""``ORTModule`` in PyTorch's engines for large models: the numbers are those of plain layers."""

from __future__ import annotations

import functools
import os
import tempfile
from typing import Any
from unittest import mock

import numpy as np
import pytest

from .fsdp_cases import ARRANGEMENTS
from .world import run


@functools.cache
def worlds() -> dict[int, dict[str, list[dict[str, Any]]]]:
    """Returns the results of two processes, and of others that load their checkpoints."""
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, CHECKPOINTS=folder):
        cases = {2: ("compared", "refused", "saved"), 1: ("loaded",), 3: ("loaded",)}
        return {size: run("fsdp_cases", names, size) for size, names in cases.items()}


@pytest.mark.parametrize("arrangement", [arrangement.__name__ for arrangement in ARRANGEMENTS])
def test_numbers_are_those_without_graphs(arrangement: str) -> None:
    for found in worlds()[2]["compared"]:
        assert "error" not in found, found
        for kind in ("losses", "weights"):
            ours, theirs = found[f"{arrangement} graphs {kind}"], found[f"{arrangement} eager {kind}"]
            np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        assert len(set(ours.tolist())) > 10


def test_other_orders_say_what_to_do() -> None:
    for found in worlds()[2]["refused"]:
        assert len(found) == 5, found
        assert all("fully_shard(ORTModule(layer))" in str(message) for message in found.values())


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", ["sharded", "trainer"])
def test_checkpoints_of_torch_distributed(kind: str, size: int) -> None:
    expected = worlds()[2]["saved"][0]
    for found in worlds()[size]["loaded"]:
        assert "error" not in found, found
        np.testing.assert_allclose(found[kind], expected[kind], rtol=1e-5)
