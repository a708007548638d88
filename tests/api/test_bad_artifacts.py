"""Missing, damaged or mixed-up artifacts, and inputs that they don't accept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from ort_trainer.api import CheckpointState, LinearLRScheduler, Module, Optimizer, TrainingSession

from .artifacts import FLOAT, Artifacts, make_artifacts
from .test_module import batches, load


def state_of(artifacts: Artifacts) -> CheckpointState:
    return CheckpointState.load_checkpoint_from_buffer(artifacts.checkpoint)


def test_models_that_are_none(artifacts: Artifacts, tmp_path: Path) -> None:
    state = state_of(artifacts)
    with pytest.raises(FileNotFoundError, match=r"there is no model .*nothing.onnx' \(train_model_uri\)"):
        Module(tmp_path / "nothing.onnx", state)
    with pytest.raises(TypeError, match="train_model_uri must be a path or the bytes of a model, but 3 was given"):
        Module(3, state)
    with pytest.raises(TypeError, match="state must be a CheckpointState"):
        Module(artifacts.training, "checkpoint")
    path = tmp_path / "model.onnx"
    path.write_bytes(artifacts.training[:-50])
    with pytest.raises(ValueError, match=r"model.onnx' can't be loaded by ONNX Runtime .* damaged, truncated"):
        Module(path, state)
    with pytest.raises(ValueError, match=r"given as eval_model_uri can't be loaded"):
        Module(artifacts.training, state, b"nonsense")
    path.write_bytes(b"\x18\x00\x00\x00ORTM" + bytes(64))
    with pytest.raises(ValueError, match=r"ORT format \(.ort\), which can't be trained"):
        Module(path, state)
    plain = onnx.load_from_string(artifacts.training)
    del plain.metadata_props[:]
    with pytest.raises(ValueError, match=r"not an ort_trainer artifact: write artifacts with"):
        Module(plain.SerializeToString(), state)
    graph = helper.make_graph(
        [helper.make_node("InPlaceAccumulatorV2", ["a", "b"], ["c"], domain="com.microsoft")],
        "graph",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "ab"],
        [helper.make_tensor_value_info("c", TensorProto.BOOL, [1])],
    )
    with pytest.raises(ValueError, match=r"artifact of onnxruntime-training, but .*: use the checkpoint"):
        Module(helper.make_model(graph).SerializeToString(), state)


def test_models_that_reach_out_of_their_file(artifacts: Artifacts, tmp_path: Path) -> None:
    """For a model given as bytes, ONNX Runtime would read external data from any path and the current folder."""
    (tmp_path / "secret.bin").write_bytes(np.ones(4, np.float32).tobytes())
    state = state_of(artifacts)

    def refused(model: onnx.ModelProto, match: str, path: bool) -> None:
        data = model.SerializeToString()
        (tmp_path / "model.onnx").write_bytes(data)
        with pytest.raises(ValueError, match=match):
            Module(tmp_path / "model.onnx" if path else data, state)

    for location in ("secret.bin", str(tmp_path / "secret.bin"), f"../{tmp_path.name}/secret.bin"):
        model = onnx.load_from_string(artifacts.training)
        tensor = model.graph.initializer.add(name="leak", data_type=FLOAT, dims=[4])
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=location)
        for path in (True, False):
            refused(model, "keeps the data of 'leak' in another file. No exported model does", path)
    # A constant in a body.
    model = onnx.load_from_string(artifacts.training)
    body = model.graph.node[-1].attribute[0].g
    body.node.append(helper.make_node("Constant", [], ["c"], value=tensor))
    refused(model, "keeps the data of 'leak' in another file", False)
    for domain, operator in (
        ("org.pytorch.aten", "ATen"),
        ("com.microsoft", "PythonOp"),
        ("com.microsoft", "EPContext"),
    ):
        model = onnx.load_from_string(artifacts.training)
        model.graph.node.append(helper.make_node(operator, ["y"], ["z"], name="out", domain=domain))
        refused(model, f"has the node 'out', operator {operator} of domain '{domain}', which calls Python", False)
    # If a field occurs twice, the last one is used.
    data = artifacts.training.replace(b"org.pytorch.aten", b"")
    node = (
        helper.make_node("ATen", ["y"], ["z"], name="out").SerializeToString()
        + b"\x3a\x00"
        + b"\x3a\x10org.pytorch.aten"
    )
    graph = b"\x0a" + bytes([len(node)]) + node
    with pytest.raises(ValueError, match="has the node 'out', operator ATen of domain 'org.pytorch.aten'"):
        Module(data + b"\x3a" + bytes([len(graph)]) + graph, state)


def test_libraries_of_operators_are_the_users_own(artifacts: Artifacts) -> None:
    model = onnx.load_from_string(artifacts.training)
    model.graph.node.append(helper.make_node("Strange", ["y"], ["z"], name="out", domain="own"))
    model.opset_import.add(domain="own", version=1)
    text = r"custom operators, .*node 'out', operator 'Strange' of domain 'own'.*register_custom_ops_library\(path\)"
    with pytest.raises(ValueError, match=text):
        Module(model.SerializeToString(), state_of(artifacts))


def test_what_metadata_and_graph_say_differently(artifacts: Artifacts) -> None:
    """Loading the model refuses each of them, without using the time or memory that they would imply."""
    changes: dict[str, Any] = {
        "output 'loss' is a tensor.float., but its metadata say int8": lambda d: d["outputs"][0].update(dtype="int8"),
        "output 'loss' has shape": lambda d: d["outputs"][0].update(shape=[0]),
        "output 'y' has shape": lambda d: d["outputs"][1].update(shape=["dim('batch')", 1 << 50]),
        "disagree about the inputs .'gone'": lambda d: d["state"].update(w="gone"),
        "disagree about the outputs .'gone'": lambda d: d["gradients"].update(w=["w_grad.accumulation.buffer", "gone"]),
        "state has an invalid value": lambda d: d.update(state=[1]),
        "inputs or outputs: dtype": lambda d: d["inputs"][0].update(dtype="O"),
        "inputs or outputs: shape": lambda d: d["outputs"][1].update(shape=[-5, 2]),
        "guards": lambda d: d.update(guards=[3.5]),
        "not arithmetic over dimensions": lambda d: d.update(guards=["(" * 5000 + ")" * 5000]),
        r"\"round\(dim\('batch'\), -2000000000\)\" is not allowed": lambda d: d["outputs"][1].update(
            shape=["round(dim('batch'), -2000000000)", 2]
        ),
        "more than 1000 operations": lambda d: d.update(guards=["-" * 200 + "dim('batch')"]),
        "missing 1 required keyword-only argument": lambda d: d.pop("state"),
        "update ort_trainer, or export again": lambda d: d.update(format=99),
        "unknown kind 'x'": lambda d: d.update(kind="x"),
    }
    for message, change in changes.items():
        model = onnx.load_from_string(artifacts.training)
        (entry,) = model.metadata_props
        found = json.loads(entry.value)
        change(found)
        entry.value = json.dumps(found)
        with pytest.raises(ValueError, match=message):
            Module(model.SerializeToString(), state_of(artifacts))
    model = onnx.load_from_string(artifacts.training)
    found = json.loads(model.metadata_props[0].value)
    found["guards"] = ["dim('batch') ** dim('batch') ** 999999 > 0"]
    model.metadata_props[0].value = json.dumps(found)
    with pytest.raises(ValueError, match=r"is too large for a size"):
        Module(model.SerializeToString(), state_of(artifacts))(*batches(1)[0])


def test_an_optimizer_model_that_asks_for_too_much(artifacts: Artifacts) -> None:
    model = onnx.load_from_string(artifacts.optimizer)
    found = json.loads(model.metadata_props[0].value)
    found["state"]["w.Moment"]["shape"] = [1 << 40]
    model.metadata_props[0].value = json.dumps(found)
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith("w.Moment"):
            value.type.CopyFrom(helper.make_tensor_type_proto(FLOAT, [1 << 40]))
    del model.graph.node[:]
    made = [value.name for value in model.graph.output]
    model.graph.node.extend(helper.make_node("Identity", [name.replace(".updated", "")], [name]) for name in made)
    with pytest.raises(ValueError, match="asks for .* elements of state"):
        Optimizer(model.SerializeToString(), Module(artifacts.training, state_of(artifacts)))


def test_models_in_the_wrong_place(artifacts: Artifacts) -> None:
    state = state_of(artifacts)
    with pytest.raises(ValueError, match="expected the training model of an export, but .* is the evaluation model"):
        Module(artifacts.evaluation, state)
    with pytest.raises(ValueError, match="expected the evaluation model of an export, but .* is the training model"):
        Module(artifacts.training, state, artifacts.training)
    with pytest.raises(ValueError, match="expected the training or evaluation model .* is the optimizer model"):
        Module(artifacts.optimizer, state)
    module = Module(artifacts.training, state)
    with pytest.raises(ValueError, match="expected the optimizer model of an export, but .* is the training model"):
        Optimizer(artifacts.training, module)
    with pytest.raises(TypeError, match="module must be a Module"):
        Optimizer(artifacts.optimizer, state)


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
        ("tpu", "unknown device 'tpu': use 'cpu', 'cuda' or 'cuda:N'"),
        ("cpu:1", "unknown device"),
        ("cuda:x", "unknown device"),
    ):
        with pytest.raises(ValueError, match=text):
            Module(artifacts.training, state, device=device)
    with pytest.raises(TypeError, match="device must be a str"):
        Module(artifacts.training, state, device=0)
    with pytest.raises(TypeError, match=r"must be an onnxruntime.SessionOptions, but \{\} was given"):
        Module(artifacts.training, state, session_options={})
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.load_model_format", "ORT")
    with pytest.raises(ValueError, match="session.load_model_format to 'ORT', but artifacts are in ONNX format"):
        Module(artifacts.training, state, session_options=options)
    session = TrainingSession(state, artifacts.training, artifacts.evaluation, artifacts.optimizer)
    for step in (session.train_step, session.eval_step):
        with pytest.raises(TypeError, match=r"run_options must be an onnxruntime.RunOptions, but \{\} was given"):
            step(list(batches(1)[0]), {})
    with pytest.raises(TypeError, match="run_options must be"):
        session.optimizer_step(3)
    with pytest.raises(TypeError, match="inference_model_uri must be a path, but 3 was given"):
        session.export_model_for_inferencing(3, ["y"])
    with pytest.raises(TypeError, match="mode must be a bool"):
        Module(artifacts.training, state).train("eval")


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
        ((np.ma.masked_array(X, False), TARGET), {}, TypeError, r"is a masked array.*filled\(\)"),
        ((X.astype(np.float64), TARGET), {}, TypeError, r"'x' has dtype float64, but .* takes float32: use .astype"),
        ((X[0], TARGET), {}, ValueError, r"input 'x' has 1 dimensions, shape \[3\], but the model takes 2"),
        ((X[:, :2], TARGET), {}, ValueError, r"input 'x' has size 2 in dimension 1, but the model takes 3"),
        ((X, TARGET[:3]), {}, ValueError, r"'target' has shape \[3, 2\], which makes dimension 'batch' 3, but it is 4"),
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
    with pytest.raises(ValueError, match=r"is valid only if dim\('batch'\) > 2, but the inputs have batch = 2"):
        module(X[:2], TARGET[:2])
    _, module, _ = load(make_artifacts(fixed={"batch": 4}))
    module(X, TARGET)
    with pytest.raises(ValueError, match=r"dimension 'batch' is 2, but .* has it fixed at 4"):
        module(X[:2], TARGET[:2])


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        ("0.1", TypeError, "learning_rate must be a number, but '0.1' was given"),
        (-1, ValueError, "must be finite, at most 3.4e\\+38, and not negative, but -1 was given"),
        (float("nan"), ValueError, "must be finite"),
        (1e39, ValueError, "and not negative, but 1e\\+39 was given"),  # which is inf in float32
        (10**400, ValueError, "must be finite"),
        (np.float16("inf"), ValueError, "must be finite"),
    ],
)
def test_wrong_rates(artifacts: Artifacts, value: object, error: type[Exception], text: str) -> None:
    _, _, optimizer = load(artifacts)
    with pytest.raises(error, match=text):
        optimizer.set_learning_rate(value)
    assert optimizer.get_learning_rate() == 0.1


@pytest.mark.parametrize(
    ("args", "error", "text"),
    [
        ((6, 2, 0.1), ValueError, r"warmup_step_count is 6 and total_step_count is 2 .* swaps the two"),
        ((0, 0, 0.1), ValueError, "total_step_count > 0"),
        ((1.5, 2, 0.1), TypeError, "warmup_step_count must be an int, but 1.5 was given"),
        ((1, 2, None), TypeError, "initial_lr must be a number"),
    ],
)
def test_wrong_schedules(artifacts: Artifacts, args: tuple, error: type[Exception], text: str) -> None:
    _, _, optimizer = load(artifacts)
    with pytest.raises(error, match=text):
        LinearLRScheduler(optimizer, *args)
    with pytest.raises(TypeError, match="optimizer must be an Optimizer"):
        LinearLRScheduler(None, 1, 2, 0.1)
    assert optimizer.get_learning_rate() == 0.1


def test_wrong_buffer_sizes(artifacts: Artifacts) -> None:
    _, module, _ = load(artifacts)
    assert (module.get_parameters_size(), module.get_parameters_size(trainable_only=False)) == (8, 10)
    text = (
        r"the buffer has 10 elements, but the parameters have 8 with trainable_only=True; 10 with trainable_only=False"
    )
    with pytest.raises(ValueError, match=text):
        module.copy_buffer_to_parameters(module.get_contiguous_parameters())
