"""``generate_artifacts(memory_budget=...)`` trains as much as fits, and says what that takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ort_trainer import optim
from ort_trainer.api import CheckpointState
from ort_trainer.artifacts import LossType, generate_artifacts
from ort_trainer.artifacts.memory_budget import choose_trained, parse_budget

from ..helpers import MLP

SIZE = 1200


def deep() -> nn.Module:
    """Four layers, of which each of the first three takes 6 MB, 23 MB with gradient and moments."""
    torch.manual_seed(0)
    layers = [part for _ in range(3) for part in (nn.Linear(SIZE, SIZE), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(SIZE, 3))


def test_a_large_model_trains_within_a_budget(tmp_path: Path) -> None:
    found: dict[str, Any] = {}
    for budget in ("1GB", "60MB"):
        generate_artifacts(
            deep(),
            loss=LossType.CrossEntropyLoss,
            optimizer=optim.AdamWConfig(lr=0.01),
            artifact_directory=tmp_path,
            sample_batch=(torch.randn(4, SIZE), torch.tensor([0, 1, 2, 0])),
            memory_budget=budget,
        )
        found[budget] = json.loads((tmp_path / "memory.json").read_text())
    whole, part = found.values()
    assert len(whole["trained"]) == 8 and whole["peak"] > 80e6
    assert part["peak"] <= part["memory_budget"] == 60_000_000
    assert "6.weight" in part["trained"] and "0.weight" not in part["trained"]
    assert part["batch"] == {"0": [4, SIZE], "1": [4]}
    state = CheckpointState.load_checkpoint(tmp_path / "checkpoint")
    assert [name for name, value in state.parameters.items() if value.requires_grad] == part["trained"]
    generate_artifacts(
        MLP(), loss=LossType.CrossEntropyLoss, artifact_directory=tmp_path,
        sample_batch=(torch.randn(4, 8), torch.tensor([0, 1, 2, 0])),
    )  # fmt: skip
    assert not (tmp_path / "memory.json").exists(), "it belongs to the earlier export"


def test_frozen_weights_are_neither_chosen_nor_said_to_be_trained(tmp_path: Path) -> None:
    model = MLP()
    model.fc1.requires_grad_(False)
    arguments: dict[str, Any] = {"loss": LossType.CrossEntropyLoss, "artifact_directory": tmp_path}
    batch = (torch.randn(4, 8), torch.tensor([0, 1, 2, 0]))
    generate_artifacts(model, sample_batch=batch, memory_budget="1GB", quantize_frozen="int8", **arguments)
    said = json.loads((tmp_path / "memory.json").read_text())
    assert said["trained"] == ["fc2.weight", "fc2.bias"]
    assert "fc1.weight" not in CheckpointState.load_checkpoint(tmp_path / "checkpoint").parameters


def test_an_onnx_model_with_a_predefined_loss(tmp_path: Path) -> None:
    from .test_blocks import model

    batch = (torch.randn(5, 3), torch.randn(5, 4))
    generate_artifacts(
        model(), loss=LossType.MSELoss, artifact_directory=tmp_path, sample_batch=batch, memory_budget="1GB"
    )
    assert json.loads((tmp_path / "memory.json").read_text())["batch"] == {"0": [5, 3], "1": [5, 4]}


def test_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights before biases, the first layer first, the last layer never; as few as necessary."""
    import numpy as np

    from ort_trainer.artifacts import memory_budget
    from ort_trainer.state.state import State

    names = [f"{layer}.{part}" for layer in "abc" for part in ("weight", "bias")]
    values = {name: np.zeros((2, 2) if "weight" in name else 2) for name in names}
    frozen: list[list[str]] = []
    monkeypatch.setattr(memory_budget, "read_checkpoint", lambda path: State(parameters=values))
    monkeypatch.setattr(memory_budget, "_measured", lambda folder: 100 - 10 * len(frozen[-1]))
    for budget, expected in (
        (100, []),
        (95, ["a.weight"]),
        (80, ["a.weight", "b.weight"]),
        (60, ["a.weight", "b.weight", "a.bias", "b.bias"]),
    ):
        chosen, _ = choose_trained(names, budget, [np.zeros(1)], lambda more, folder: frozen.append(list(more)))
        assert chosen == expected
    with pytest.raises(ValueError, match=r"memory_budget is 0.0 MB, but training takes 0.0 MB even if only the last"):
        choose_trained(names, 59, [np.zeros(1)], lambda more, folder: frozen.append(list(more)))


def test_budgets() -> None:
    assert [parse_budget(given) for given in (7, "7", "64MB", "1.5 GiB", "2KiB")] == [
        *(7, 7, 64_000_000, 3 << 29, 2048)
    ]
    for wrong in ("64 mb", "", "-1", 0, True, "MB", 1.5e6j):
        with pytest.raises(ValueError, match="memory_budget must be a number of bytes or a text such as '64MB'"):
            parse_budget(wrong)


def test_a_batch_is_needed(tmp_path: Path) -> None:
    from .test_blocks import model, onnxblock

    with pytest.raises(TypeError, match="memory_budget needs sample_batch"):
        generate_artifacts(model(), loss=onnxblock.loss.MSELoss(), artifact_directory=tmp_path, memory_budget="64MB")
