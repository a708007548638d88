"""onnxruntime.TrainingSession for old scripts: settings without effect cause a warning."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import ort_trainer
from ort_trainer import TrainingParameters, compat

from ..helpers import MLP, assert_close, mlp_batches, mlp_trainer

WITHOUT_EFFECT: dict[str, Any] = {
    "attn_dropout_recompute": True,
    "deepspeed_zero_stage": 1,
    "enable_adasum": True,
    "gelu_recompute": True,
    "loss_scale": 4.0,
    "num_pipeline_micro_batches": 2,
    "number_recompute_layers": 1,
    "pipeline_cut_info_string": "a",
    "propagate_cast_ops_allow": ["Add"],
    "propagate_cast_ops_level": 2,
    "sliced_axes": {"a": 0},
    "sliced_schema": {"a": [1]},
    "sliced_tensor_names": ["a"],
    "transformer_layer_recompute": True,
}


@pytest.fixture
def session_class() -> Iterator[Any]:
    compat.install()
    yield sys.modules["onnxruntime"].TrainingSession
    compat.uninstall()


def test_a_script_that_asks_for_all_that_has_no_effect_trains(session_class: Any, tmp_path: Path) -> None:
    model = MLP()
    trainer = mlp_trainer(model=model)
    trainer.prepare(mlp_batches(1)[0])
    trainer.save_as_onnx(tmp_path / "m.onnx")
    parameters = TrainingParameters(
        loss_output_name="loss", training_optimizer_name="SGDOptimizer", enable_grad_norm_clip=False
    )
    for name, value in WITHOUT_EFFECT.items():
        setattr(parameters, name, value)
    with pytest.raises(ValueError, match="Invalid options: "):
        ort_trainer.TrainingSession(tmp_path / "m.onnx", parameters)
    with pytest.warns(UserWarning) as caught:
        session = session_class(str(tmp_path / "m.onnx"), parameters)
    texts = [str(warning.message) for warning in caught]
    options = {"number_recompute_layers": None, "deepspeed_zero_stage": "deepspeed_zero_optimization.stage"}
    for name in WITHOUT_EFFECT:
        # This model has no layers, and their number causes no second warning.
        shown = options.get(
            name, name.removeprefix("use_").replace("propagate_cast_ops_", "propagate_cast_ops_config.")
        )
        assert shown is None or any(shown in text for text in texts), name
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in mlp_batches(20):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        feed = {"x": x.numpy(), "label": y.numpy(), "Learning_Rate": np.array([0.1], np.float32)}
        assert session.run(["loss"], feed)[0] == pytest.approx(loss.item(), rel=1e-4)
    assert_close(torch.from_numpy(session.get_state()["fc1.weight"]), model.fc1.weight.detach(), 1e-4, "fc1.weight")
