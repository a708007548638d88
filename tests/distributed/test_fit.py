"""``trainer.fit`` in several processes equals one process with the batches of all."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from .fit_cases import data, model
from .world import run

CASES = ("even", "uneven", "within", "stop", "monitored", "interrupt", "different")


@functools.cache
def world(size: int) -> dict[str, list[dict[str, Any]]]:
    return run("fit_cases", CASES if size > 1 else ("even",), size)


def together(case: str) -> list[dict[str, Any]]:
    """Returns the result of each rank, after checking that all have the same history and weights."""
    found = world(2)[case]
    for rank, row in enumerate(found):
        assert "error" not in row, (rank, row)
        for name in row:
            if name.startswith(("history.", "weight.", "status", "reason", "batch")):
                np.testing.assert_array_equal(row[name], found[0][name], err_msg=name)
    return found


def test_as_one_process() -> None:
    (alone,), found = world(1)["even"], together("even")
    assert alone["history.loss"].shape == (3,)
    for row in found:
        for name in (key for key in alone if key.startswith(("history.", "weight."))):
            np.testing.assert_allclose(row[name], alone[name], rtol=1e-6, atol=1e-7, err_msg=name)
        assert row["status"] == "completed" and row["lines"] == alone["lines"] == 10 and row["last"]
    assert "epoch 3/3  done" in str(found[0]["shown"]) and not str(found[1]["shown"])


def test_different_numbers_of_batches() -> None:
    """A process at its end contributes the rest of its window to the next update of the others."""
    batches = list(DataLoader(data(88), batch_size=8))
    first, second = batches[7:], batches[:7]
    windows = [first[:3] + second[:3], first[3:] + second[3:6], second[6:]]
    reference, loss = model(), nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.01)
    losses: list[list[float]] = []
    for _ in range(2):
        losses.append([])
        for window in windows:
            values = [loss(reference(x), label) for x, label in window]
            optimizer.zero_grad()
            (sum(values) / len(values)).backward()
            optimizer.step()
            losses[-1] += [value.item() for value in values]
        with torch.no_grad():
            evaluated = loss(reference(second[0][0]), second[0][1]).item()
    for row, steps, left in zip(together("uneven"), (8, 14), (4, 9), strict=True):
        assert row["steps"] == steps and row["update"] == 6 and row["left"] == left
        np.testing.assert_allclose(row["history.loss"], np.mean(losses, axis=1), rtol=1e-5)
        np.testing.assert_allclose(row["history.eval_loss"][-1], evaluated, rtol=1e-5)
        np.testing.assert_array_equal(row["history.step"], [7, 14])
        for name, value in reference.state_dict().items():
            np.testing.assert_allclose(row[f"weight.{name}"], value.numpy(), rtol=1e-4, atol=1e-6)
            np.testing.assert_allclose(row[f"resumed.weight.{name}"], row[f"weight.{name}"], rtol=1e-5, atol=1e-7)


def test_evaluations_within_epochs() -> None:
    found = together("within")
    assert found[0]["history.epoch"].tolist() == [1, 1, 1, 2, 2] and found[0]["status"] == "completed"
    assert [row["steps"] for row in found] == [4 + 4, 7 + 4]


def test_a_stop_that_one_process_asks_for() -> None:
    """It asks after the third batch of the second epoch; all stop after the update with the fourth."""
    for row in together("stop"):
        assert (row["status"], row["reason"]) == ("stopped", "enough")
        assert (row["steps"], row["batch"]) == (12, 4)


def test_numbers_of_callbacks_are_means() -> None:
    for row in together("monitored"):
        np.testing.assert_array_equal(row["history.eval_drift"], [1.5, 2.5, 3.5, 4.5])
        assert (row["best"], row["status"], row["reason"]) == (1.5, "stopped", "late")


def test_an_interrupt_of_one_process() -> None:
    """All end after the next update, and resume bit for bit, each with its own batches and random numbers."""
    for row in together("interrupt"):
        assert row["status"] == "interrupted" and row["batch"] == 4 and row["handler"]
        assert row["status of the second"] == "interrupted" and row["batch of the second"] == 2
        assert row["resumed"] and row["same"] and row["loss"]


@pytest.mark.parametrize("text", ["another epochs in rank 1", "another eval_loader", "by 3 processes"])
def test_errors(text: str) -> None:
    for row in together("different"):
        assert text in str(row["errors"]) and row["status"] == "completed"
