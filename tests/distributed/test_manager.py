"""A ``CheckpointManager`` in several processes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from . import manager_cases
from .world import run


@functools.cache
def world() -> dict[str, list[dict[str, Any]]]:
    return run("manager_cases", ("own_loop", "errors", "fit"), 2, timeout=150)


def test_each_goes_on_where_it_was() -> None:
    for rank, found in enumerate(world()["own_loop"]):
        assert "error" not in found, found
        # Rank 0 was in the middle of the second epoch, and rank 1 at its end.
        assert found["place"].tolist() == ([2, 7] if rank == 0 else [2, 6])
        assert found["same"], rank
        assert set(found["left"]) >= {"latest"} and len(found["left"]) == 3


def test_an_error_in_one_is_an_error_in_all() -> None:
    first, second = (str(found["errors"]).splitlines() for found in world()["errors"])
    assert first[0] == "OSError: the disk is full" and first[1].startswith("DistributedError"), first
    assert "rank 1: TypeError: metrics must be a dict" in first[1]
    assert second[0].startswith("DistributedError") and "rank 0: OSError: the disk is full" in second[0], second
    assert second[1].startswith("TypeError: metrics must be a dict")
    for found in world()["errors"]:
        assert found["before"] == 1 and found["step"] == 1  # the damaged newest was skipped by all
        assert found["own disk"] == 2, "and one that is damaged for only one of them"


def test_fit() -> None:
    for found in world()["fit"]:
        assert "error" not in found, found
        assert str(found["status"]) == "completed" and found["epochs"] == 3
        assert len(found["steps"]) <= 2 and str(found["files"]) == f"step-{found['steps'][-1]:08d}.ortckpt"


def test_processes_come_and_go_in_the_middle_of_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, then one, then two, train as one that was never interrupted."""

    def trained(size: int, until: int, folder: str) -> dict[str, Any]:
        monkeypatch.setenv("ELASTIC", str(tmp_path / folder))
        monkeypatch.setenv("UNTIL", str(until))
        if size == 1:
            return manager_cases.elastic(0, 1)
        found = run("manager_cases", ("elastic",), size, timeout=150)["elastic"]
        assert not any("error" in each for each in found), found
        return found[0]

    whole = trained(1, 24, "whole")
    parts = [trained(2, 7, "elastic"), trained(1, 13, "elastic"), trained(2, 24, "elastic")]
    assert [list(part["place"]) for part in parts] == [[1, 7], [2, 5], [3, 8]]  # in the middle of windows
    # Two processes keep the last one of the end of an epoch, too.
    assert [list(part["left"]) for part in parts] == [[7], [13], [16, 24]]
    np.testing.assert_allclose(np.concatenate([part["losses"] for part in parts]), whole["losses"], rtol=1e-6)
    for name in whole.keys() - {"losses", "place", "left"}:
        np.testing.assert_allclose(parts[-1][name], whole[name], rtol=1e-5, atol=1e-6, err_msg=name)
