"""Indices out of range: an export records the ranges, and its steps raise the same errors as the trainer's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnxruntime import OrtValue
from torch import nn
from torch.nn import functional as F

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.api import CheckpointState, Module, Optimizer, TrainingSession

pytestmark = pytest.mark.engine

WORDS = 7
DESCRIPTION = {
    "inputs": [("ids", ["batch", "length"]), ("labels", ["batch", "length"])],
    "outputs": [("loss", [], True), ("logits", ["batch", "length", WORDS])],
}
IDS = np.array([[1, 2, 3, 4], [6, 5, 0, 1], [2, 2, 2, 2]])


class Language(nn.Module):
    """Predicts the next word; the first label of each row is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 8)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, WORDS)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(self.dropout(self.words(ids)))
        following = F.pad(labels, (0, 1), value=-100)[..., 1:]
        return F.cross_entropy(logits.flatten(0, 1), following.flatten()), logits


def made(folder: Path, **debug: bool) -> ORTTrainer:
    """Returns a trainer that has exported artifacts to a folder."""
    torch.manual_seed(0)
    options = ORTTrainerOptions({"debug": debug})
    trainer = ORTTrainer(Language(), DESCRIPTION, optim.SGDConfig(lr=0.1), options=options)
    trainer.prepare((torch.from_numpy(IDS), torch.from_numpy(IDS)))
    trainer.export_artifacts(folder)
    return trainer


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ORTTrainer]:
    folder = tmp_path_factory.mktemp("indices")
    return folder, made(folder)


def session(folder: Path) -> tuple[CheckpointState, TrainingSession]:
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    models = [folder / f"{kind}_model.onnx" for kind in ("training", "eval", "optimizer")]
    return state, TrainingSession(state, *models)


def batch(**changes: tuple[tuple[int, int], int]) -> dict[str, np.ndarray]:
    found = {"ids": IDS.copy(), "labels": IDS.copy()}
    for name, (place, value) in changes.items():
        found[name][place] = value
    return found


BAD = [
    batch(ids=((0, 0), WORDS)),
    batch(ids=((2, 3), -1)),
    batch(labels=((1, 1), -5)),
    batch(labels=((0, 3), WORDS), ids=((0, 0), 0)),
]


@pytest.mark.parametrize("given", BAD, ids=["row too high", "row negative", "label negative", "label too high"])
def test_steps_refuse_what_the_trainer_refuses(exported: tuple[Path, ORTTrainer], given: dict) -> None:
    folder, trainer = exported
    with pytest.raises(IndexError) as raised:
        trainer.train_step(**{name: torch.from_numpy(values) for name, values in given.items()})
    text = str(raised.value).partition("; ")[0]  # an artifact does not name the user's files
    state, training = session(folder)
    training.train_step(batch())
    before = CheckpointState.save_checkpoint_to_buffer(state, include_optimizer_state=True)
    for step in (training.train_step, training.eval_step):
        for convert in (np.asarray, np.asfortranarray, OrtValue.ortvalue_from_numpy):
            with pytest.raises(IndexError) as found:
                step({name: convert(values) for name, values in given.items()})
            assert str(found.value) == text
    assert CheckpointState.save_checkpoint_to_buffer(state, include_optimizer_state=True) == before
    module = Module(folder / "training_model.onnx", state, folder / "eval_model.onnx")
    with pytest.raises(IndexError, match=r"has the value .* at \[\d, \d\].*must be from 0 to 6"):
        module(**given)


def test_what_counts_for_nothing_is_allowed(exported: tuple[Path, ORTTrainer]) -> None:
    _, training = session(exported[0])
    for given in (batch(labels=((0, 0), 99)), batch(labels=((1, 1), -100)), batch(ids=((0, 0), WORDS - 1))):
        training.train_step(given)
        loss, _ = training.eval_step(given)
        torch.manual_seed(0)
        expected, _ = Language().eval()(**{name: torch.from_numpy(values) for name, values in given.items()})
        np.testing.assert_allclose(loss, expected.item(), rtol=1e-5)


def test_the_check_can_be_left_out_of_an_export(exported: tuple[Path, ORTTrainer], tmp_path: Path) -> None:
    made(tmp_path, check_indices=False)
    for kind in ("training", "eval"):
        data, other = ((folder / f"{kind}_model.onnx").read_bytes() for folder in (tmp_path, exported[0]))
        assert b'"index_ranges": []' in data and b'"index_ranges": [{"input": "ids"' in other
        assert __file__.encode() not in other
    state, training = session(tmp_path)
    # The graph itself allows negative indices, so this is a valid label.
    loss, _ = training.eval_step(batch(labels=((1, 1), -1)))
    assert loss == training.eval_step(batch(labels=((1, 1), WORDS - 1)))[0]
    with pytest.raises(Exception, match="out of data bounds"):
        training.train_step(BAD[0])
    Optimizer(tmp_path / "optimizer_model.onnx", Module(tmp_path / "training_model.onnx", state)).step()
