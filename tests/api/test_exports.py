"""Continuing from an export equals continuing in the trainer that wrote it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ort_trainer import ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.api import CheckpointState, Module, Optimizer, TrainingSession

pytestmark = pytest.mark.engine

DESCRIPTION = {
    "inputs": [("x", ["batch", 6]), ("label", ["batch"])],
    "outputs": [("loss", [], True), ("logits", ["batch", 3])],
}


class Net(nn.Module):
    """Has running statistics and dropout, and no bias before the norm, because its gradient would be pure noise."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(4 + number % 3, 6), torch.randint(3, (4 + number % 3,))) for number in range(18)]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ORTTrainer, list]:
    """Returns a folder of artifacts exported in the middle of a window, the trainer and the following batches."""
    torch.manual_seed(0)
    options = ORTTrainerOptions(
        {
            "batch": {"gradient_accumulation_steps": 3},
            "lr_scheduler": optim.LinearWarmupLRScheduler(total_steps=9, warmup=0.3),
        }
    )
    model, data = Net(), batches()
    groups = [{"params": ["layers.0.weight"], "lr": 0.02}]
    trainer = ORTTrainer(model, DESCRIPTION, optim.AdamConfig(groups, lr=0.05), F.cross_entropy, options)
    for batch in data[:7]:
        trainer.train_step(*batch)
    folder = tmp_path_factory.mktemp("exports") / "artifacts"
    trainer.export_artifacts(folder)
    return folder, trainer, data[7:]


def test_the_trainer_and_both_styles_step_on_alike(exported: tuple[Path, ORTTrainer, list]) -> None:
    folder, trainer, data = exported
    models = [folder / f"{kind}_model.onnx" for kind in ("training", "eval", "optimizer")]
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(models[0], state, models[1])
    optimizer = Optimizer(models[2], module)
    other = CheckpointState.load_checkpoint(folder / "checkpoint")
    session = TrainingSession(other, *(model.read_bytes() for model in models))
    for number, batch in enumerate(data, start=7):
        if number == 13:  # continue from a saved checkpoint
            saved = CheckpointState.save_checkpoint_to_buffer(other, include_optimizer_state=True)
            other = CheckpointState.load_checkpoint_from_buffer(saved)
            session = TrainingSession(other, *models)
        arrays = [value.numpy() for value in batch]
        expected = trainer.train_step(*batch)
        for found in (module(*arrays), session.train_step(arrays)):
            for value, wanted in zip(found, expected, strict=True):
                np.testing.assert_allclose(value, wanted.numpy(), rtol=1e-5, atol=1e-6)
        if number % 3 == 2:
            assert optimizer.get_learning_rate() == pytest.approx(session.get_learning_rate())
            optimizer.step()
            session.optimizer_step()
            module.lazy_reset_grad()
            session.lazy_reset_grad()
    weights = trainer.state_dict()["model"]["full_precision"]
    for name, parameter in state.parameters.items():
        np.testing.assert_allclose(parameter.data, weights[name], rtol=1e-5, atol=1e-6)
        assert np.array_equal(parameter.data, other.parameters[name].data)
    expected = trainer.eval_step(*data[0])
    for value, wanted in zip(module.eval()(*(value.numpy() for value in data[0])), expected, strict=True):
        np.testing.assert_allclose(value, wanted.numpy(), rtol=1e-5, atol=1e-6)


def test_models_for_inference(exported: tuple[Path, ORTTrainer, list], tmp_path: Path) -> None:
    folder, _, data = exported
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, (folder / "eval_model.onnx").read_bytes())
    x, label = (value.numpy() for value in data[0])
    module(x, label)
    path = tmp_path / "inference.onnx"
    module.export_model_for_inferencing(path, ["logits"])
    run = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [entry.name for entry in run.get_inputs()] == ["x"]
    np.testing.assert_allclose(run.run(None, {"x": x})[0], module.eval()(x, label)[1], rtol=1e-5, atol=1e-6)
    before = path.read_bytes()
    session = TrainingSession(state, folder / "training_model.onnx", folder / "eval_model.onnx")
    session.export_model_for_inferencing(tmp_path / "of_a_session.onnx", ["logits"])
    assert (tmp_path / "of_a_session.onnx").read_bytes() == before
    for names, error in ((["nothing"], ValueError), ("logits", TypeError), ([3], TypeError), ([], ValueError)):
        with pytest.raises(error):
            module.export_model_for_inferencing(path, names)
    assert path.read_bytes() == before
    with pytest.raises(FileNotFoundError, match="does not exist"):
        module.export_model_for_inferencing(tmp_path / "nothing" / "model.onnx", ["logits"])
    with pytest.raises(RuntimeError, match="needs the evaluation model"):
        Module(folder / "training_model.onnx", state).export_model_for_inferencing(path, ["logits"])
