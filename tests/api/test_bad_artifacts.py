"""Artifacts that are not there, damaged or mixed up, and inputs that they do not take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from ort_trainer.api import CheckpointState, LinearLRScheduler, Module, Optimizer

from .artifacts import Artifacts, make_artifacts
from .test_module import batches, load


def state_of(artifacts: Artifacts) -> CheckpointState:
    return CheckpointState.load_checkpoint_from_buffer(artifacts.checkpoint)


def test_models_that_are_none(artifacts: Artifacts, tmp_path: Path) -> None:
    state = state_of(artifacts)
    with pytest.raises(FileNotFoundError, match=r"there is no model .*nothing.onnx' \(train_model_uri\)"):
        Module(tmp_path / "nothing.onnx", state)
    with pytest.raises(TypeError, match="train_model_uri must be a path or the bytes of a model, but 3 was given"):
        Module(3, state)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="state must be a CheckpointState"):
        Module(artifacts.training, "checkpoint")  # type: ignore[arg-type]
    path = tmp_path / "model.onnx"
    path.write_bytes(artifacts.training[:-50])
    with pytest.raises(ValueError, match=r"model.onnx' can't be loaded by ONNX Runtime .* damaged, cut short"):
        Module(path, state)
    with pytest.raises(ValueError, match=r"given as eval_model_uri can't be loaded"):
        Module(artifacts.training, state, b"nonsense")
    path.write_bytes(b"\x18\x00\x00\x00ORTM" + bytes(64))
    with pytest.raises(ValueError, match=r"ORT format \(.ort\), which can't be trained"):
        Module(path, state)
    plain = onnx.load_from_string(artifacts.training)
    del plain.metadata_props[:]
    with pytest.raises(ValueError, match=r"no artifact of ort_trainer: write artifacts with"):
        Module(plain.SerializeToString(), state)
    graph = helper.make_graph(
        [helper.make_node("InPlaceAccumulatorV2", ["a", "b"], ["c"], domain="com.microsoft")],
        "graph",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "ab"],
        [helper.make_tensor_value_info("c", TensorProto.BOOL, [1])],
    )
    with pytest.raises(ValueError, match=r"flavor 'onnxruntime-training', which only onnxruntime.training.api"):
        Module(helper.make_model(graph).SerializeToString(), state)


def test_models_in_the_wrong_place(artifacts: Artifacts) -> None:
    state = state_of(artifacts)
    with pytest.raises(ValueError, match="is the evaluation model of an export, where the training model belongs"):
        Module(artifacts.evaluation, state)
    with pytest.raises(ValueError, match="is the training model of an export, where the evaluation model belongs"):
        Module(artifacts.training, state, artifacts.training)
    with pytest.raises(ValueError, match="is the optimizer model of an export, where the training or evaluation"):
        Module(artifacts.optimizer, state)
    module = Module(artifacts.training, state)
    with pytest.raises(ValueError, match="is the training model of an export, where the optimizer model belongs"):
        Optimizer(artifacts.training, module)
    with pytest.raises(TypeError, match="module must be a Module"):
        Optimizer(artifacts.optimizer, state)  # type: ignore[arg-type]


def test_exports_are_not_mixed(artifacts: Artifacts, tmp_path: Path) -> None:
    other = make_artifacts("f" * 64)
    path = tmp_path / "checkpoint"
    path.write_bytes(other.checkpoint)
    foreign = CheckpointState.load_checkpoint(path)
    message = r"train_model_uri and checkpoint .*checkpoint' come from different exports \('eeeeeeeeeeee' and 'ffff"
    with pytest.raises(ValueError, match=message):
        Module(artifacts.training, foreign)
    state = state_of(artifacts)
    with pytest.raises(ValueError, match=r"eval_model_uri and the checkpoint given as bytes come from different"):
        Module(artifacts.training, state, other.evaluation)
    with pytest.raises(ValueError, match=r"optimizer_uri and the checkpoint given as bytes come from different"):
        Optimizer(other.optimizer, Module(artifacts.training, state))


def test_devices_and_options(artifacts: Artifacts) -> None:
    state = state_of(artifacts)
    for device, text in (
        ("tpu", "'tpu' is unknown: use 'cpu', 'cuda' or 'cuda:N'"),
        ("cpu:1", "unknown"),
        ("cuda:x", "unknown"),
    ):
        with pytest.raises(ValueError, match=text):
            Module(artifacts.training, state, device=device)
    with pytest.raises(TypeError, match="device must be a str"):
        Module(artifacts.training, state, device=0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"must be an onnxruntime.SessionOptions, but \{\} was given"):
        Module(artifacts.training, state, session_options={})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="mode must be a bool"):
        Module(artifacts.training, state).train("eval")  # type: ignore[arg-type]


def test_cuda_that_is_not_there(artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(ValueError, match=r"'cuda:1' needs CUDAExecutionProvider, but the installed ONNX Runtime"):
        Module(artifacts.training, state_of(artifacts), device="cuda:1")


X, TARGET = batches(1)[0]


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "text"),
    [
        ((X,), {}, TypeError, r"1 inputs were given, but .* takes 2: x \(float32 \['batch', 3\]\), target"),
        ((X, TARGET, X), {}, TypeError, r"3 inputs were given, but .* takes 2"),
        ((X,), {"y": TARGET}, TypeError, r"unknown inputs \['y'\]: the model takes \['x', 'target'\]"),
        ((X, TARGET), {"x": X}, TypeError, r"inputs \['x'\] were given both by position and by name"),
        ((), {"x": X}, TypeError, r"inputs \['target'\] are missing"),
        ((X, TARGET.tolist()), {}, TypeError, "input 'target' must be a numpy array or an OrtValue"),
        ((X.astype(np.float64), TARGET), {}, TypeError, r"'x' has dtype float64, but .* takes float32: use .astype"),
        ((X[0], TARGET), {}, ValueError, r"input 'x' has 1 dimensions, shape \[3\], but the model takes 2"),
        ((X[:, :2], TARGET), {}, ValueError, r"input 'x' has size 2 in dimension 1, but the model takes 3"),
        ((X, TARGET[:3]), {}, ValueError, r"'target' has shape \[3, 2\], so that dimension 'batch' is 3, but it is 4"),
        ((X[:0], TARGET[:0]), {}, ValueError, r"input 'x' is empty"),
    ],
)
def test_wrong_inputs(artifacts: Artifacts, args: tuple, kwargs: dict, error: type[Exception], text: str) -> None:
    state, module, _ = load(artifacts)
    before = CheckpointState.save_checkpoint_to_buffer(state, include_optimizer_state=True)
    for mode in (True, False):
        with pytest.raises(error, match=text):
            module.train(mode)(*args, **kwargs)
    assert CheckpointState.save_checkpoint_to_buffer(state, include_optimizer_state=True) == before


def test_sizes_that_the_graph_is_not_right_for() -> None:
    _, module, _ = load(make_artifacts(guards=("dim('batch') > 2",), fixed={"length": 3}))
    module(X, TARGET)
    with pytest.raises(ValueError, match=r"holds only where dim\('batch'\) > 2, but the inputs have batch = 2"):
        module(X[:2], TARGET[:2])
    _, module, _ = load(make_artifacts(fixed={"batch": 4}))
    module(X, TARGET)
    with pytest.raises(ValueError, match=r"dimension 'batch' is 2, but .* has it fixed at 4"):
        module(X[:2], TARGET[:2])


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        ("0.1", TypeError, "learning_rate must be a number, but '0.1' was given"),
        (-1, ValueError, "must be finite and not negative, but -1 was given"),
        (float("nan"), ValueError, "must be finite"),
    ],
)
def test_wrong_rates(artifacts: Artifacts, value: object, error: type[Exception], text: str) -> None:
    _, _, optimizer = load(artifacts)
    with pytest.raises(error, match=text):
        optimizer.set_learning_rate(value)  # type: ignore[arg-type]
    assert optimizer.get_learning_rate() == 0.1


@pytest.mark.parametrize(
    ("args", "error", "text"),
    [
        ((6, 2, 0.1), ValueError, r"warmup_step_count 6 and total_step_count 2 .* swaps the two"),
        ((0, 0, 0.1), ValueError, "total > 0"),
        ((1.5, 2, 0.1), TypeError, "warmup_step_count must be an int, but 1.5 was given"),
        ((1, 2, None), TypeError, "initial_lr must be a number"),
    ],
)
def test_wrong_schedules(artifacts: Artifacts, args: tuple, error: type[Exception], text: str) -> None:
    _, _, optimizer = load(artifacts)
    with pytest.raises(error, match=text):
        LinearLRScheduler(optimizer, *args)
    with pytest.raises(TypeError, match="optimizer must be an Optimizer"):
        LinearLRScheduler(None, 1, 2, 0.1)  # type: ignore[arg-type]
    assert optimizer.get_learning_rate() == 0.1


def test_wrong_buffer_sizes(artifacts: Artifacts) -> None:
    _, module, _ = load(artifacts)
    assert (module.get_parameters_size(), module.get_parameters_size(trainable_only=False)) == (8, 10)
    text = (
        r"the buffer has 10 elements, but the parameters have 8 with trainable_only=True; 10 with trainable_only=False"
    )
    with pytest.raises(ValueError, match=text):
        module.copy_buffer_to_parameters(module.get_contiguous_parameters())
