"""Adasum in several processes matches its formula in plain NumPy."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from .adasum_cases import LOSS, SHAPES, batches, gradients, mlp, part
from .data_parallel_cases import Batch
from .world import run

CASES = ("of_any", "of_known", "of_overflows", "of_training", "of_skipped", "of_own_loop")


@functools.cache
def world(size: int) -> dict[str, list[dict[str, Any]]]:
    return run("adasum_cases", CASES, size)


def adasum(given: list[np.ndarray]) -> np.ndarray:
    """Returns the Adasum of the gradients of 2^n ranks, neighbours first."""
    if len(given) == 1:
        return given[0].astype(np.float64)
    middle = len(given) // 2
    a, b = adasum(given[:middle]), adasum(given[middle:])
    product, of_a, of_b = (a * b).sum(), (a * a).sum(), (b * b).sum()
    return (1 - product / (2 * of_a) if of_a else 1) * a + (1 - product / (2 * of_b) if of_b else 1) * b


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_all_processes_have_the_same(case: str, size: int) -> None:
    for found in world(size)[case]:
        for name, value in found.items():
            np.testing.assert_array_equal(value, world(size)[case][0][name])


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", SHAPES)
def test_the_formula(name: str, size: int) -> None:
    wanted = adasum([gradients(rank)[name] for rank in range(size)])
    assert np.abs(wanted).max() > 0
    np.testing.assert_allclose(world(size)["of_any"][0][name], wanted, rtol=1e-5, atol=1e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("size", [2, 4])
def test_what_it_is_for(size: int) -> None:
    found = world(size)["of_known"][0]
    np.testing.assert_allclose(found["equal"], np.arange(1, 7).reshape(2, 3), rtol=1e-6)  # their mean
    np.testing.assert_allclose(found["orthogonal"], np.ones(size), rtol=1e-6)  # their sum
    # With two processes 2 and -2 become 3 - 3; with four processes each pair does.
    np.testing.assert_allclose(found["opposite"], [0.0], atol=1e-6)


@pytest.mark.parametrize("size", [2, 4])
def test_what_is_not_finite_stays_so(size: int) -> None:
    found = world(size)["of_overflows"][0]
    assert not np.isfinite(found["infinite"]).all() and not np.isfinite(found["unknown"]).all()
    np.testing.assert_allclose(found["fine"], adasum([np.array([float(rank)]) for rank in range(size)]), rtol=1e-6)
    assert world(size)["of_skipped"][0]["updates"] == 3


def gradients_of(model: nn.Module, window: Sequence[Batch], rank: int, size: int) -> dict[str, np.ndarray]:
    """Returns a process's mean gradients, computed by PyTorch."""
    model.zero_grad()
    for batch in window:
        x, y = part(batch, rank, size)
        (LOSS(model(x), y) / len(window)).backward()
    return {name: parameter.grad.numpy().copy() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("size", [2, 4])
def test_training(size: int) -> None:
    """Windows of two micro-batches."""
    model, given, result = mlp(), batches(4), world(size)["of_training"][0]
    for window in (given[:2], given[2:]):
        found = [gradients_of(model, window, rank, size) for rank in range(size)]
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter -= 0.5 * torch.from_numpy(adasum([one[name] for one in found])).float()
    assert result["updates"] == 2
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(result[name], parameter.detach().numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [2, 4])
def test_a_loop_of_ones_own(size: int) -> None:
    found = [gradients_of(mlp(), batches(1), rank, size) for rank in range(size)]
    for name, value in world(size)["of_own_loop"][0].items():
        np.testing.assert_allclose(value, adasum([one[name] for one in found]), rtol=1e-5, atol=1e-6)
