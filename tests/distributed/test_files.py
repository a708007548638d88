"""Several processes write files to the same paths: each file is complete, and equals that of a single process."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from .world import run


@functools.cache
def world(size: int) -> list[dict[str, Any]]:
    return run("files_cases", ("files",), size)["files"]


def test_files_are_those_of_one_process() -> None:
    (alone,), together = world(1), world(2)
    assert {name.partition(".")[0] for name in alone} >= {"parameters", "optimizer", "gradients", "whole", "inference"}
    for found in together:
        assert "error" not in found, found
        assert found.keys() == alone.keys() | {"refused"}
        for name, expected in alone.items():
            if expected.dtype.kind == "f":
                np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-7, err_msg=name)
        traces = {"trace.json", "trace.1.json"}
        assert set(found["names"]) == set(alone["names"]) | traces
        assert not any(name.endswith(".tmp") for name in found["names"])


def test_a_process_that_can_not_write_stops_all() -> None:
    first, second = (str(found["refused"]) for found in world(2))
    assert first.startswith("NotADirectoryError"), first
    assert "rank 0" in second, second
