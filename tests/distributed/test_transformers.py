"""``HuggingFaceTrainer`` and accelerate in several processes, against ``transformers.Trainer`` there and in one."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from .world import run

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

CASES = ("classify", "language", "resume", "loader", "sharded")


@functools.cache
def world(size: int) -> dict[str, list[dict[str, Any]]]:
    return run("transformers_cases", CASES if size > 1 else ("language", "loader"), size)


def assert_same(found: dict[str, Any], expected: dict[str, Any], ours: str, theirs: str, relative: float) -> None:
    """Compares the values with two prefixes; a key's bias is only rounding errors."""
    names = [name.removeprefix(theirs) for name in expected if name.startswith(theirs)]
    assert names
    for name in names:
        other = expected[theirs + name]
        difference = np.linalg.norm(found[ours + name] - other)
        limit = relative * np.linalg.norm(other) + (1e-7 if relative else 0)
        assert difference <= limit, (name, found[ours + name], other)


@pytest.mark.parametrize("case", ["classify", "language"])
def test_against_transformers(case: str) -> None:
    for found in world(2)[case]:
        assert "error" not in found, found
        assert len(found["Trainer.loss"]) == (10 if case == "classify" else 6)
        assert_same(found, found, "HuggingFaceTrainer.", "Trainer.", 1e-4)


def test_as_one_process() -> None:
    """With the same batches in all ranks, the loss is divided by their total."""
    (alone,) = world(1)["language"]
    for found in world(2)["language"]:
        assert_same(found, alone, "HuggingFaceTrainer.", "HuggingFaceTrainer.", 1e-4)


def test_resume() -> None:
    for found in world(2)["resume"]:
        assert found["files"].tolist() == ["rng_state_0.pth", "rng_state_1.pth"]
        assert len(found["whole.loss"]) == 12
        assert_same(found, found, "resumed.", "whole.", 0.0)


def test_layers_that_accelerate_shards() -> None:
    for found in world(2)["sharded"]:
        assert "error" not in found, found
        assert found["HuggingFaceTrainer.graphs"] == 1 and found["Trainer.graphs"] == 0
        np.testing.assert_allclose(found["HuggingFaceTrainer.losses"], found["Trainer.losses"], rtol=1e-6)


def test_a_loader_of_accelerate() -> None:
    (alone,), together = world(1)["loader"], world(2)["loader"]
    assert len(alone["losses"]) == 10
    np.testing.assert_allclose(np.mean([found["losses"] for found in together], axis=0), alone["losses"], rtol=1e-6)
    for found in together:
        assert_same(found, alone, "weight.", "weight.", 1e-6)
        np.testing.assert_allclose(found["history"], alone["history"], rtol=1e-6)
