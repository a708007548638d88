"""``debug.graph_save_paths`` writes four files; the one with the optimizer trains like the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F

from ort_trainer import ORTTrainer, ORTTrainerOptions, amp, optim
from ort_trainer.optim import rules

from ..helpers import MLP, MLP_DESC, mlp_batches, mlp_trainer

pytestmark = pytest.mark.engine

FIRST = ["fc1.weight", "fc1.bias"]
KEYS = (
    "after_graph_transforms",
    "with_gradient_graph",
    "with_training_graph",
    "with_training_graph_after_optimization",
)


def in_folder(folder: Path) -> dict[str, str]:
    return {f"model_{key}_path": str(folder / f"{key}.onnx") for key in KEYS}


def load(path: Path) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("kernels", ["auto", "onnxruntime"])
def test_four_files(kernels: str, tmp_path: Path) -> None:
    trainer = mlp_trainer({"debug": {"graph_save_paths": in_folder(tmp_path)}, "utils": {"kernels": kernels}})
    x, y = mlp_batches(1)[0]
    trainer.eval_step(x, y)
    assert not list(tmp_path.iterdir()), "there is no training graph yet"
    weights = {name: value.numpy() for name, value in trainer.state_dict(pytorch_format=True).items()}
    loss, logits = trainer.train_step(x, y)
    assert sorted(p.stem for p in tmp_path.iterdir()) == sorted(KEYS)
    feeds = {**weights, "x": x.numpy(), "label": y.numpy()}
    forward = load(tmp_path / f"{KEYS[0]}.onnx")
    assert [output.name for output in forward.get_outputs()] == ["loss", "logits"]
    found = forward.run(None, feeds)
    np.testing.assert_allclose(found[0], loss.numpy(), rtol=1e-6)
    np.testing.assert_allclose(found[1], logits.numpy(), rtol=1e-5)
    feeds["__loss_scale_input_name"] = np.array(2.0, np.float32)
    for key in (KEYS[1], KEYS[3]):
        session = load(tmp_path / f"{key}.onnx")
        names = [output.name for output in session.get_outputs()]
        assert names[:2] == ["loss", "logits"] and set(names[2:]) == {f"{name}.grad" for name in weights}
        found = dict(zip(names, session.run(None, feeds), strict=True))
        model = MLP()
        model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
        (2 * F.cross_entropy(model(x), y)).backward()
        for name, parameter in model.named_parameters():
            np.testing.assert_allclose(found[f"{name}.grad"], parameter.grad.numpy(), rtol=1e-4, atol=1e-7)
    optimized = onnx.load(tmp_path / f"{KEYS[3]}.onnx")
    assert len(optimized.graph.node) != len(onnx.load(tmp_path / f"{KEYS[1]}.onnx").graph.node)
    before = [p.stat().st_mtime_ns for p in sorted(tmp_path.iterdir())]
    trainer.train_step(x, y)
    assert before == [p.stat().st_mtime_ns for p in sorted(tmp_path.iterdir())], "written once"
    assert trainer.loop.kernels == ("PyTorch's" if kernels == "auto" else "ONNX Runtime's")


def test_files_in_an_older_operator_set(tmp_path: Path) -> None:
    options = {"debug": {"graph_save_paths": in_folder(tmp_path)}, "_internal_use": {"onnx_opset_version": 14}}
    mlp_trainer(options).train_step(*mlp_batches(1)[0])
    found = {key: onnx.load(tmp_path / f"{key}.onnx").opset_import[0].version for key in KEYS}
    assert found == dict(zip(KEYS, (14, 14, 14, 18), strict=True)), "ONNX Runtime writes the last one"


GROUP = [{"params": FIRST, "lr": 0.05}]
CONFIGS: dict[str, Any] = {
    **{name: (config(lr=0.01), {}) for name, config in rules.CONFIGS.items()},
    "sgd": (optim.SGDConfig(GROUP, lr=0.1), {"utils": {"max_grad_norm": 0.3, "max_grad_value": 0.05}}),
    "momentum": (optim.SGDConfig(lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.1), {}),
    "nesterov": (optim.SGDConfig(lr=0.1, momentum=0.9, nesterov=True), {}),
    "lion": (optim.LionConfig(lr=0.01, weight_decay=0.1), {}),
    "adam": (optim.AdamConfig([{**GROUP[0], "alpha": 0.5, "max_norm_clip": 0.2}], lr=0.01, lambda_coef=0.1), {}),
    "adam after": (optim.AdamConfig(lr=0.01, lambda_coef=0.1, epsilon=1e-3, weight_decay_mode=1), {}),
    "uncorrected": (optim.AdamConfig(lr=0.01, do_bias_correction=False), {"utils": {"grad_norm_clip": False}}),
    "lamb": (optim.LambConfig(lr=0.01, lambda_coef=0.1, do_bias_correction=True, ratio_max=2.0), {}),
    "accumulated": (optim.AdamWConfig(lr=0.01), {"batch": {"gradient_accumulation_steps": 2}}),
    "bfloat16": (
        optim.AdamConfig(lr=0.01),
        {"mixed_precision": {"enabled": True, "dtype": "bfloat16", "loss_scaler": amp.DynamicLossScaler()}},
    ),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_graph_with_the_optimizer_trains(kind: str, tmp_path: Path) -> None:
    config, options = CONFIGS[kind]
    path = tmp_path / "training.onnx"
    options = {**options, "debug": {"graph_save_paths": {"model_with_training_graph_path": str(path)}}}
    trainer = ORTTrainer(MLP(), MLP_DESC, config, loss_fn=F.cross_entropy, options=ORTTrainerOptions(options))
    batches = mlp_batches(6)
    trainer.prepare(batches[0])
    onnx.checker.check_model(onnx.load(path), full_check=True)
    session = load(path)
    inputs = {value.name for value in session.get_inputs()}
    outputs = [value.name for value in session.get_outputs()]
    state = trainer.state_dict()
    feeds: dict[str, Any] = dict(state["model"]["full_precision"])
    optimizer = state["optimizer"]
    shared = optimizer.pop("shared_optimizer_state", {})
    feeds |= {f"{name}.{key}": value for name, entry in optimizer.items() for key, value in entry.items()}
    feeds |= shared
    feeds["__learning_rate"] = np.array(config.learning_rates, np.float32)
    scale = 65536.0 if kind == "bfloat16" else 1.0
    feeds["__loss_scale_input_name"] = np.array(scale, np.float32)
    every = 2 if kind == "accumulated" else 1
    for number, (x, y) in enumerate(batches, start=1):
        loss, _ = trainer.train_step(x, y)
        if number % every:
            accumulated = {f"{n}.grad.accumulated": trainer.get_gradient(n).numpy() for n in MLP().state_dict()}
            continue
        if every == 2:
            feeds |= {**accumulated, "__gradient_divisor": np.array(2.0, np.float32)}
        feeds |= {"x": x.numpy(), "label": y.numpy()}
        assert inputs == set(feeds)
        found = dict(zip(outputs, session.run(None, feeds), strict=True))
        np.testing.assert_allclose(found["loss"], loss.numpy(), rtol=1e-3 if kind == "bfloat16" else 1e-5)
        feeds |= {key.removesuffix(".updated"): v for key, v in found.items() if key.endswith(".updated")}
    after = trainer.state_dict()
    for name, value in after["model"]["full_precision"].items():
        np.testing.assert_allclose(feeds[name], value, rtol=1e-3 if kind == "bfloat16" else 1e-4, atol=1e-6)
    for name, entry in after["optimizer"].items():
        if name == "shared_optimizer_state":
            assert feeds["Step"] == entry["Step"] == 7
            continue
        assert feeds.get(f"{name}.Update_Count", 7) == entry.get("Update_Count", 7)
        tolerance = 2e-2 if kind == "bfloat16" else 1e-4
        for slot in entry.keys() - {"Update_Count"}:
            np.testing.assert_allclose(feeds[f"{name}.{slot}"], entry[slot], rtol=tolerance, atol=1e-4)
    if kind == "bfloat16":
        assert found["__all_finite"]
        found = dict(zip(outputs, session.run(None, {**feeds, "x": x.numpy() * np.float32(np.inf)}), strict=True))
        assert not found["__all_finite"]
        for key, value in found.items():
            if key.endswith(".updated"):
                np.testing.assert_array_equal(value, feeds[key.removesuffix(".updated")])


def test_bad_paths_are_told_before_any_work(tmp_path: Path) -> None:
    def options(path: Path) -> dict[str, Any]:
        return {"debug": {"graph_save_paths": {"model_with_gradient_graph_path": str(path)}}}

    with pytest.raises(
        FileNotFoundError, match="model_with_gradient_graph_path: can't write .*nowhere' does not exist"
    ):
        mlp_trainer(options(tmp_path / "nowhere" / "x.onnx"))
    with pytest.raises(IsADirectoryError, match="model_with_gradient_graph_path: can't write .* it is a folder"):
        mlp_trainer(options(tmp_path))
    folder = tmp_path / "gone"
    folder.mkdir()
    trainer = mlp_trainer(options(folder / "x.onnx"))
    folder.rmdir()
    with pytest.raises(FileNotFoundError, match="does not exist"):
        trainer.train_step(*mlp_batches(1)[0])
    assert trainer.session is None and trainer.train_step_info.step == 0
    folder.mkdir()
    trainer.train_step(*mlp_batches(1)[0])
    assert (folder / "x.onnx").is_file()
    same = {f"model_{key}_path": str(tmp_path / "a.onnx") for key in KEYS[:2]}
    with pytest.raises(
        ValueError, match="model_with_gradient_graph_path: .*a.onnx' is also the path of model_after_graph_tran"
    ):
        ORTTrainerOptions({"debug": {"graph_save_paths": same}})
