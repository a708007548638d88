"""TrainingSession and TrainingParameters: ONNX Runtime's former class, with PyTorch's numbers."""

from __future__ import annotations

import copy
import types
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F

from ort_trainer import ExportError, TrainingParameters, TrainingSession
from ort_trainer.compat.c_session import TrainingSession as CSession
from ort_trainer.compat.trainer import TrainingSession as OldSession
from ort_trainer.compat.training_session import TrainerSession
from ort_trainer.compat.training_session import parameters as settings
from ort_trainer.compat.training_session.io_binding import IOBinding
from ort_trainer.engine.programs.runner import ProgramRunner

from ...helpers import MLP, assert_close, assert_same_state, mlp_batches, mlp_trainer

pytestmark = pytest.mark.engine

RATE = "Learning_Rate"


@pytest.fixture(scope="module")
def model() -> MLP:
    torch.manual_seed(4)
    return MLP()


@pytest.fixture(scope="module")
def path(model: MLP, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with a loss, as an ONNX file."""
    trainer = mlp_trainer(model=model)
    trainer.eval_step(*mlp_batches(1)[0])
    target = tmp_path_factory.mktemp("model") / "m.onnx"
    trainer.save_as_onnx(target)
    return target


def parameters(**properties: Any) -> TrainingParameters:
    found = TrainingParameters()
    given = {"loss_output_name": "loss", "training_optimizer_name": "AdamOptimizer", "enable_grad_norm_clip": False}
    for name, value in {**given, **properties}.items():
        setattr(found, name, value)
    return found


def feed(x: torch.Tensor, y: torch.Tensor, **more: float) -> dict[str, Any]:
    return {"x": x.numpy(), "label": y.numpy(), **{name: np.array([value], np.float32) for name, value in more.items()}}


def evaluation() -> Any:
    """Returns options for evaluation; a stock onnxruntime's have no such attribute."""
    options = onnxruntime.RunOptions()
    if not hasattr(options, "training_mode"):
        return types.SimpleNamespace(training_mode=False)
    options.training_mode = False
    return options


def test_adam_with_attributes_per_weight_is_pytorchs(model: MLP, path: Path) -> None:
    session = TrainingSession(
        str(path),
        parameters(
            optimizer_attributes_map={"fc1.weight": {"lambda": 0.1, "alpha": 0.8}, "fc2.bias": {"epsilon": 1e-3}},
            optimizer_int_attributes_map={"fc1.bias": {"do_bias_correction": 1, "weight_decay_mode": 0}},
            weights_not_to_train={"fc2.weight"},
        ),
    )
    theirs = copy.deepcopy(model)
    named = dict(theirs.named_parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [named["fc1.weight"]], "weight_decay": 0.1, "betas": (0.8, 0.999)},
            {"params": [named["fc1.bias"]]},
            {"params": [named["fc2.bias"]], "eps": 1e-3},
        ],
        weight_decay=0.0,
    )
    for step, (x, y) in enumerate(mlp_batches(20)):
        rate = 1e-2 / (step + 1)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = F.cross_entropy(theirs(x), y)
        loss.backward()
        optimizer.step()
        theirs.zero_grad()
        ours, logits = session.run(["loss", "logits"], feed(x, y, **{RATE: rate}))
        assert ours == pytest.approx(loss.item(), rel=1e-4) and logits.shape == (5, 3)
    state = session.get_state()
    trained = ["fc1.bias", "fc1.weight", "fc2.bias"]
    moments = [f"{key}_{name}" for key in ("Moment_1", "Moment_2", "Update_Count") for name in trained]
    assert sorted(state) == sorted([*trained, *moments])
    for name in trained:
        assert_close(torch.from_numpy(state[name]), named[name].detach(), 1e-4, name)
    assert session.get_optimizer_state()["fc1.bias"]["Update_Count"] == [21]
    assert set(session.get_model_state()["full_precision"]) == set(trained)
    (loss_now,) = session.run(["loss"], feed(x, y), evaluation())
    assert loss_now == pytest.approx(F.cross_entropy(theirs(x), y).item(), rel=1e-4)


@pytest.mark.parametrize("optimizer", ["SGDOptimizer", "LambOptimizer"])
def test_accumulation(model: MLP, path: Path, optimizer: str) -> None:
    session = TrainingSession(path, parameters(training_optimizer_name=optimizer, gradient_accumulation_steps=2))
    before = session.get_state()["fc1.weight"]
    (x, y), (x2, y2) = mlp_batches(2)
    session.run(["loss"], feed(x, y, **{RATE: 0.1}))
    assert np.array_equal(session.get_state()["fc1.weight"], before)
    session.run(["loss"], feed(x2, y2, **{RATE: 0.1}))
    assert not np.array_equal(session.get_state()["fc1.weight"], before)
    if optimizer == "SGDOptimizer":
        theirs = copy.deepcopy(model)
        (F.cross_entropy(theirs(x), y) + F.cross_entropy(theirs(x2), y2)).div(2).backward()
        expected = theirs.fc1.weight - 0.1 * theirs.fc1.weight.grad
        assert_close(torch.from_numpy(session.get_state()["fc1.weight"]), expected.detach(), 1e-5, "fc1.weight")
    else:
        assert session.get_state()["Step"] == [2] and "Step" in session.get_optimizer_state()["shared_optimizer_state"]


def test_gradients_as_outputs_without_an_optimizer(model: MLP, path: Path) -> None:
    session = TrainingSession(
        path.read_bytes(), parameters(training_optimizer_name="", set_gradients_as_graph_outputs=True)
    )
    names = [f"{name}_grad" for name, _ in model.named_parameters()]
    assert [entry.name for entry in session.get_outputs()] == ["loss", "logits", *names]
    assert [entry.name for entry in session.get_inputs()] == ["x", "label"]
    for x, y in mlp_batches(3):
        theirs = copy.deepcopy(model)
        F.cross_entropy(theirs(x), y).backward()
        for (name, parameter), found in zip(theirs.named_parameters(), session.run(names, feed(x, y)), strict=True):
            assert_close(torch.from_numpy(found), parameter.grad, 1e-5, name)
    assert session.get_optimizer_state() == {}


def test_mixed_precision_feeds_a_scale(path: Path) -> None:
    session = TrainingSession(path, parameters(use_mixed_precision=True))
    x, y = mlp_batches(1)[0]
    assert [entry.name for entry in session.get_inputs()] == ["x", "label", RATE, session.loss_scale_input_name]
    with pytest.raises(
        TypeError, match=r"inputs \['loss_scale'\] are missing: pass a float32 array of shape \[1\] for each"
    ):
        session.run(None, feed(x, y, **{RATE: 0.1}))
    before = session.get_state()
    results = session.run(["all_gradients_finite"], feed(x * torch.inf, y, **{RATE: 0.1, "loss_scale": 4.0}))
    assert results == [[False]]
    assert all(np.array_equal(value, before[name]) for name, value in session.get_state().items())
    scaled = session.run(["loss", "all_gradients_finite"], feed(x, y, **{RATE: 0.1, "loss_scale": 1024.0}))
    assert scaled[1] == [True]
    plain = TrainingSession(path, parameters())
    assert scaled[0] == pytest.approx(plain.run(["loss"], feed(x, y, **{RATE: 0.1}))[0], rel=1e-2)
    state = session.get_model_state(include_mixed_precision_weights=True)
    assert state["mixed_precision"]["fc1.weight"].dtype == np.float16
    assert session.is_output_fp32_node("loss") and not session.is_output_fp32_node("all_gradients_finite")
    fixed = TrainingSession(path, parameters(use_mixed_precision=True, loss_scale=1024.0))
    assert fixed.loss_scale_input_name == ""
    fixed.run(["loss"], feed(x, y, **{RATE: 0.1}))
    assert_close(
        torch.from_numpy(fixed.get_state()["fc1.weight"]), torch.from_numpy(session.get_state()["fc1.weight"]), 1e-6, ""
    )


def test_bindings_and_ort_values(path: Path) -> None:
    sessions = [TrainingSession(path, parameters()) for _ in range(3)]
    x, y = mlp_batches(1)[0]
    inputs = feed(x, y, **{RATE: 0.1})
    expected = [sessions[0].run(["logits", "loss"], inputs) for _ in range(2)]

    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(value) for name, value in inputs.items()}
    for logits, loss in expected:
        assert np.array_equal(sessions[1].run_with_ort_values(["loss"], values, evaluation())[0].numpy(), loss)
        found = sessions[1].run_with_ort_values(["logits", "loss"], values)
        assert np.array_equal(found[0].numpy(), logits) and np.array_equal(found[1].numpy(), loss)

    binding = sessions[2].io_binding()
    memory = torch.zeros(5, 3)
    binding.bind_input("x", "cpu", 0, np.float32, [5, 8], x.data_ptr())
    binding.bind_cpu_input("label", inputs["label"])
    binding.bind_ortvalue_input(RATE, values[RATE])
    binding.bind_output("logits", "cpu", 0, np.float32, [5, 3], memory.data_ptr())
    binding.bind_output("loss")
    for logits, loss in expected:
        binding.synchronize_inputs()
        sessions[2].run_with_iobinding(binding)
        binding.synchronize_outputs()
        assert np.array_equal(memory.numpy(), logits)
        assert np.array_equal(binding.copy_outputs_to_cpu()[1], loss)
        assert np.array_equal(binding.get_outputs()[1].numpy(), loss)
    binding.bind_output("logits", "cpu", 0, np.float32, [5, 4], memory.data_ptr())
    with pytest.raises(ValueError, match=r"output 'logits' is bound to memory of shape \[5, 4\]"):
        sessions[2].run_with_iobinding(binding, evaluation())
    with pytest.raises(ValueError, match="also needs element_type and shape"):
        binding.bind_output("loss", buffer_ptr=memory.data_ptr())
    with pytest.raises(ValueError, match="device_type must be 'cpu' or 'cuda', but 'tpu' was given"):
        binding.bind_output("loss", "tpu")
    binding.clear_binding_inputs()
    binding.clear_binding_outputs()
    assert binding.get_outputs() == []


def test_memory_of_every_kind_is_bound(path: Path) -> None:
    x, y = mlp_batches(1)[0]
    inputs = feed(x, y, **{RATE: 0.1, "loss_scale": 4.0})
    expected = TrainingSession(path, parameters(use_mixed_precision=True)).run(["loss", "logits"], inputs)
    session = TrainingSession(path, parameters(use_mixed_precision=True))
    binding = session.io_binding()
    for name, value in inputs.items():
        binding.bind_cpu_input(name, value)
    binding.bind_input("x", "cpu", 0, onnx.TensorProto.FLOAT, x.shape, x.data_ptr())
    finite = onnxruntime.OrtValue.ortvalue_from_numpy(np.array([False]))
    loss = onnxruntime.OrtValue.ortvalue_from_numpy(np.array(0, np.float32))
    logits = np.zeros((5, 3), np.float16)
    binding.bind_ortvalue_output("all_gradients_finite", finite)
    binding.bind_ortvalue_output("loss", loss)
    binding.bind_output("logits", "cpu", 0, np.float16, (5, 3), logits.ctypes.data)
    session.run_with_iobinding(binding)
    assert finite.numpy() == [True] and loss.numpy() == expected[0] and np.array_equal(logits, expected[1])
    vector = binding.get_outputs_as_ortvaluevector()
    assert [value.numpy().tolist() for value in vector] == [[True], expected[0].tolist(), logits.tolist()]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("tpu", 0, np.float32, [2], 1), ValueError, "device_type must be 'cpu' or 'cuda', but 'tpu' was given"),
        (("cpu", 3, np.float32, [2], 1), ValueError, "there is no device cpu:3: PyTorch has 1 of this type"),
        (("cpu", 0, "text", [2], 1), TypeError, "element_type must be a numpy type of numbers.* but 'text' was given"),
        (("cpu", 0, np.str_, [2], 1), TypeError, "element_type must be a numpy type of numbers"),
        (("cpu", 0, onnx.TensorProto.STRING, [2], 1), TypeError, "element_type must be .* but 8 was given"),
        (("cpu", 0, np.float32, [2], 0), ValueError, r"buffer_ptr must be the address of memory of shape \[2\], but 0"),
        (("cpu", 0, np.float32, [-2], 1), ValueError, r"buffer_ptr must be the address of memory of shape \[-2\]"),
    ],
)
def test_memory_that_can_not_be_bound(arguments: Any, error: type[Exception], message: str) -> None:
    binding = IOBinding()
    with pytest.raises(error, match=message):
        binding.bind_input("x", *arguments)
    with pytest.raises(error, match=message):
        binding.bind_output("x", *arguments)
    assert not binding.inputs and not binding.output_names


def test_state_goes_into_another_session(path: Path) -> None:
    batches = mlp_batches(6)
    first = TrainingSession(path, parameters())
    for x, y in batches[:3]:
        first.run(["loss"], feed(x, y, **{RATE: 0.1}))
    second = TrainingSession(path, parameters())
    second.load_state(first.get_state(), strict=True)
    third = parameters()
    third.set_optimizer_initial_state(first.get_optimizer_state())
    begun = TrainingSession(path, third)
    weights = {name: value for name, value in first.get_state().items() if name.startswith("fc")}
    begun.load_state(weights)
    first.set_providers(["CPUExecutionProvider"])
    for x, y in batches[3:]:
        losses = [s.run(["loss"], feed(x, y, **{RATE: 0.1}))[0] for s in (first, second, begun)]
        assert losses[0] == losses[1] == losses[2]
    with pytest.raises(RuntimeError, match="fc2.bias"):
        second.load_state({name: value for name, value in weights.items() if name != "fc2.bias"}, strict=True)
    with pytest.raises(ValueError, match="fc2.bias"):
        second.load_state({**weights, "fc2.bias": np.zeros(9, np.float32)})


def test_outputs_have_the_types_that_a_run_returns(path: Path) -> None:
    session = TrainingSession(path, parameters(use_mixed_precision=True, loss_scale=1.0))
    x, y = mlp_batches(1)[0]
    described = session.get_outputs()
    for entry, value in zip(described, session.run(None, feed(x, y, **{RATE: 0.1})), strict=True):
        assert entry.type.replace("float)", "float32)") == f"tensor({value.dtype})"
        assert session.is_output_fp32_node(entry.name) == (value.dtype == np.float32)
    assert [entry.type for entry in described[:2]] == ["tensor(float)", "tensor(float16)"]


def test_a_partial_run_never_updates(path: Path) -> None:
    session = TrainingSession(path, parameters())
    before = session.get_state()["fc1.weight"]
    partial = onnxruntime.RunOptions()
    partial.only_execute_path_to_fetches = True
    x, y = mlp_batches(1)[0]
    session.run(["loss"], feed(x, y), partial)
    assert np.array_equal(session.get_state()["fc1.weight"], before)
    # In evaluation, outputs that need no label can be computed without one.
    assert session.run(["logits"], {"x": x.numpy()}, evaluation())[0].shape == (5, 3)


def test_a_session_describes_its_model(path: Path, tmp_path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    session = TrainingSession(path, parameters(lr_params_feed_name="rate"), options, ["CPUExecutionProvider"], [{}])
    plain = TrainingSession(path, parameters())
    assert [(entry.name, entry.type, entry.shape) for entry in session.get_inputs()] == [
        ("x", "tensor(float)", ["batch", 8]),
        ("label", "tensor(int64)", ["batch"]),
        ("rate", "tensor(float)", [1]),
    ]
    theirs = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).get_modelmeta()
    names = [name for name in dir(theirs) if not name.startswith("_")]
    assert len(names) >= 7
    assert {name: getattr(session.get_modelmeta(), name) for name in names} == {n: getattr(theirs, n) for n in names}
    assert session.get_overridable_initializers() == [] and session.get_partition_info_map() == {}
    session.run(None, feed(*mlp_batches(1)[0], rate=0.1))
    assert session.get_session_options() is options
    assert list(session.get_provider_options()) == session.get_providers() == ["CPUExecutionProvider"]
    assert session.get_profiling_start_time_ns() > 0 and "kernel_time" in Path(session.end_profiling()).read_text()
    assert plain.get_profiling_start_time_ns() == 0 and plain.end_profiling() == ""
    state = session.get_state()
    for reset in (session.set_providers, lambda: session._create_inference_session(["CPUExecutionProvider"], [{}])):
        reset()
        assert_same_state(session.get_state(), state)


def test_what_has_no_effect_is_a_warning_for_old_scripts(path: Path) -> None:
    """test_effects.py has each property; this is about the class that old scripts get."""
    given = parameters(enable_adasum=True, loss_scale=4.0, num_pipeline_micro_batches=2)
    with pytest.raises(ValueError, match="Invalid options: "):
        TrainingSession(path, given)
    with pytest.warns(UserWarning) as caught:
        session = OldSession(str(path), given)
    texts = [str(warning.message) for warning in caught]
    for name in ("enable_adasum", "loss_scale", "num_pipeline_micro_batches"):
        assert any(name in text for text in texts), name
    inputs = feed(*mlp_batches(1)[0], **{RATE: 0.1})
    assert session.run(["loss"], inputs) == TrainingSession(path, parameters()).run(["loss"], inputs)


def test_the_loss_may_be_any_output(path: Path) -> None:
    proto = onnx.load(path)
    proto.graph.node.append(onnx.helper.make_node("Add", ["loss", "loss"], ["twice"]))
    proto.graph.output.append(onnx.helper.make_tensor_value_info("twice", onnx.TensorProto.FLOAT, []))
    settings = {"training_optimizer_name": "", "set_gradients_as_graph_outputs": True}
    single, double = (
        TrainingSession(proto.SerializeToString(), parameters(loss_output_name=name, **settings)).run(
            ["fc2.bias_grad"], feed(*mlp_batches(1)[0])
        )[0]
        for name in ("loss", "twice")
    )
    np.testing.assert_allclose(double, 2 * single, rtol=1e-5)


def test_a_session_whose_model_is_loaded_by_a_method(path: Path) -> None:
    """The class in C."""
    session = CSession()
    with pytest.raises(RuntimeError, match=r"the session has no model: call load_model\(\) or read_bytes\(\) first"):
        session.get_state()
    assert session.load_model(str(path), parameters(), ["CPUExecutionProvider"], [{}]).loss_scale_input_name == ""
    state = session.get_state()
    session.run(["loss"], feed(*mlp_batches(1)[0], **{RATE: 0.1}), None)
    session.load_state(state, True)
    assert_same_state(session.get_state(), state)
    session.finalize()
    with pytest.raises(RuntimeError, match="the session has no model"):
        session.get_state()
    options = onnxruntime.SessionOptions()
    other = CSession(options)
    mixed = other.read_bytes(path.read_bytes(), parameters(use_mixed_precision=True), [], [])
    assert mixed.loss_scale_input_name == "loss_scale" and other.get_session_options() is options


def test_windows(model: MLP, path: Path) -> None:
    (x, y), (x2, y2) = mlp_batches(2)
    partial = onnxruntime.RunOptions()
    partial.only_execute_path_to_fetches = True
    session = TrainingSession(path, parameters(training_optimizer_name="SGDOptimizer", use_mixed_precision=True))
    session.run(["loss"], feed(x, y, loss_scale=4.0), partial)
    with pytest.raises(ValueError, match=r"the loss scale is 8.0, but the accumulation window began with 4.0"):
        session.run(["loss"], feed(x2, y2, **{RATE: 0.1, "loss_scale": 8.0}))
    session.set_providers(["CPUExecutionProvider"])  # in the middle of a window
    session.run(["loss"], feed(x2, y2, **{RATE: 0.1, "loss_scale": 4.0}))
    theirs = copy.deepcopy(model)
    (F.cross_entropy(theirs(x), y) + F.cross_entropy(theirs(x2), y2)).div(2).backward()
    expected = theirs.fc1.weight - 0.1 * theirs.fc1.weight.grad
    assert_close(torch.from_numpy(session.get_state()["fc1.weight"]), expected.detach(), 1e-3, "fc1.weight")
    # Memory of the wrong size is detected before anything changes.
    before = session.get_state()["fc1.weight"]
    binding = session.io_binding()
    with pytest.raises(ValueError, match="no output is bound"):
        session.run_with_iobinding(binding)
    for name, value in feed(x, y, **{RATE: 0.1, "loss_scale": 4.0}).items():
        binding.bind_cpu_input(name, value)
    memory = torch.zeros(3)
    binding.bind_output("logits", "cpu", 0, np.float32, [3], memory.data_ptr())
    with pytest.raises(ValueError, match=r"bound to memory of shape \[3\]"):
        session.run_with_iobinding(binding)
    assert np.array_equal(before, session.get_state()["fc1.weight"])


def test_weights_that_the_file_froze_can_be_trained(path: Path, tmp_path: Path) -> None:
    trainer = mlp_trainer({"utils": {"frozen_weights": ["fc1.weight"]}})
    trainer.eval_step(*mlp_batches(1)[0])
    trainer.save_as_onnx(tmp_path / "m.onnx")
    assert "fc1.weight" not in TrainingSession(tmp_path / "m.onnx", parameters()).get_state()
    chosen = TrainingSession(tmp_path / "m.onnx", parameters(weights_to_train={"fc1.weight"})).get_state()
    assert "fc1.weight" in chosen and "fc1.bias" not in chosen


@pytest.mark.parametrize(
    ("properties", "error", "message"),
    [
        (
            {"loss_output_name": "x"},
            ValueError,
            r"the loss 'x' is not an output of the ONNX model: it has \['loss', 'logits'",
        ),
        ({"training_optimizer_name": "Adam"}, ValueError, "must be one of .*'AdamOptimizer'.* but 'Adam' was given"),
        ({"weights_to_train": {"w"}}, ValueError, r"weights_to_train has \['w'\], which are not weights of the model"),
        ({"weights_not_to_train": ["w"]}, ValueError, "weights_not_to_train has"),
        ({"optimizer_attributes_map": {"w": {}}}, ValueError, "optimizer_attributes_map has"),
        (
            {"optimizer_attributes_map": {"fc1.bias": {"x": 1.0}}},
            ValueError,
            "sets 'x', which AdamConfig lacks",
        ),
        (
            {"training_optimizer_name": "SGDOptimizer", "optimizer_attributes_map": {"fc1.bias": {"alpha": 1.0}}},
            ValueError,
            "sets 'alpha', which SGDConfig lacks",
        ),
        (
            {"training_optimizer_name": "", "optimizer_attributes_map": {"fc1.bias": {"alpha": 1.0}}},
            ValueError,
            "need a training_optimizer_name: set it",
        ),
        ({"lr_params_feed_name": "x"}, ValueError, "must be a new input name, but 'x' was given"),
        ({"lr_params_feed_name": ""}, ValueError, "must be a new input name, but '' was given"),
        ({"immutable_weights": {"Add": {"a": "b"}}}, TypeError, "must be a dict, input position -> number"),
        ({"optimizer_attributes_map": {"fc1.bias": 3}}, TypeError, "must be a dict of attributes, but it is 3"),
        ({"optimizer_initial_state": {"w": {}}}, ValueError, "set_optimizer_initial_state has 'w'"),
        ({"optimizer_initial_state": {"fc1.bias": {"Moment_3": 1}}}, ValueError, "has 'fc1.bias': .'Moment_3'."),
        (
            {"optimizer_initial_state": {"fc1.bias": {}}, "training_optimizer_name": ""},
            ValueError,
            "has no effect without training_optimizer_name",
        ),
        ({"loss_scale": 2.0}, ValueError, "loss_scale has no effect without use_mixed_precision"),
        ({"loss_scale": -2.0, "use_mixed_precision": True}, ValueError, "loss_scale must be at least 0, but -2.0"),
        ({"world_size": 2}, ValueError, "world_size is 2, but this process was launched alone"),
        ({"world_rank": 1}, ValueError, "world_rank is 1, but this process was launched alone"),
        ({"deepspeed_zero_stage": 2}, ValueError, "must be an int from 0 to 1"),
        ({"gradient_accumulation_steps": 0}, ValueError, "must be an int of at least 1"),
        ({"enable_adasum": True}, ValueError, "enable_adasum: has no effect in one process"),
        ({"gelu_recompute": True}, ExportError, "gelu_recompute: the training graph has no GELU"),
        (
            {"model_with_gradient_graph_path": "no/such/folder.onnx"},
            FileNotFoundError,
            "model_with_gradient_graph_path",
        ),
    ],
)
def test_refused_parameters(path: Path, properties: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TrainingSession(path, parameters(**properties))


def test_refused_arguments(path: Path) -> None:
    x, y = mlp_batches(1)[0]
    with pytest.raises(TypeError, match="path_or_bytes must be a path or a serialized model"):
        TrainingSession(3, parameters())
    with pytest.raises(TypeError, match="parameters must be TrainingParameters, but a dict"):
        TrainingSession(path, {})
    with pytest.raises(ExportError, match="not an ONNX model"):
        TrainingSession(b"abc", parameters())
    with pytest.raises(ValueError, match=r"providers has \['NoExecutionProvider'\], unknown to ONNX Runtime"):
        TrainingSession(path, parameters(), providers=["NoExecutionProvider"])
    with pytest.raises(ValueError, match="providers must not repeat a provider"):
        TrainingSession(path, parameters(), providers=["CPUExecutionProvider", ("CPUExecutionProvider", {"a": 1})])
    with pytest.raises(ValueError, match=r"there are 1 providers, \['CPUExecutionProvider'\], but 2 provider_options"):
        TrainingSession(path, parameters(), providers=["CPUExecutionProvider"], provider_options=[{}, {}])
    session = TrainingSession(path, parameters())
    before = session.get_state()
    with pytest.raises(ValueError, match=r"unknown outputs \['y'\]: the outputs are \['loss', 'logits'\]"):
        session.run(["y"], feed(x, y, **{RATE: 0.1}))
    with pytest.raises(TypeError, match=r"inputs \['Learning_Rate'\] are missing"):
        session.run(["loss"], feed(x, y))
    with pytest.raises(TypeError, match=r"inputs \['label'\] are missing"):
        session.run(["loss"], {"x": x.numpy(), RATE: np.ones(1, np.float32)})
    with pytest.raises(TypeError, match=r"unknown inputs \['z'\]"):
        session.run(["loss"], {**feed(x, y, **{RATE: 0.1}), "z": np.ones(1)})
    with pytest.raises(TypeError, match="iobinding must come from the training session's io_binding"):
        session.run_with_iobinding(3)
    for rate, message in ((np.nan, "finite number, at least 0, but nan"), (-1.0, "but -1.0 was given")):
        with pytest.raises(ValueError, match=message):
            session.run(["loss"], feed(x, y, **{RATE: rate}))
    with pytest.raises(
        ValueError, match=r"'Learning_Rate' must be a float32 array of shape \[1\], but it has shape \[2\]"
    ):
        session.run(["loss"], {**feed(x, y), RATE: np.ones(2, np.float32)})
    with pytest.raises(TypeError, match="the inputs must be a dict of names and values, but a list"):
        session.run(["loss"], [x])
    with pytest.raises(TypeError, match="output_names must be a list of names, but 'loss'"):
        session.run("loss", feed(x, y, **{RATE: 0.1}))
    cpu = "CPUExecutionProvider"
    for wrong in (cpu, 5, {cpu: {"a": 1}}, [1], [(cpu,)], [(cpu, None)], [(5, {})], [[cpu, {}]]):
        with pytest.raises(TypeError, match="^providers must be "):
            session.set_providers(wrong)
    for wrong in (5, {"a": 1}, [5]):
        with pytest.raises(TypeError, match="^provider_options must be a list of dicts, one for each of providers"):
            session.set_providers([cpu], wrong)
    with pytest.raises(ValueError, match="provider_options.CPUExecutionProvider: has no effect"):
        session.set_providers([cpu], [{"a": 1}])
    with pytest.raises(ValueError, match=r"disabled_optimizers \['A'\] can't be .*ORT_DISABLE_ALL"):
        session._create_inference_session(None, None, ["A"])
    with pytest.raises(ValueError, match="unknown output 'y'"):
        session.is_output_fp32_node("y")
    assert all(np.array_equal(value, before[name]) for name, value in session.get_state().items())


@pytest.mark.parametrize(
    ("providers", "options"),
    [
        (["CUDAExecutionProvider", "CPUExecutionProvider"], None),
        ([("CUDAExecutionProvider", {"device_id": 7}), "TensorrtExecutionProvider"], None),
        (["CUDAExecutionProvider", "CPUExecutionProvider"], [{"device_id": "0"}, {}]),
    ],
)
def test_providers_that_can_not_be_used_are_skipped(
    path: Path, providers: Any, options: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    x, y = mlp_batches(1)[0]
    with pytest.warns(
        UserWarning, match=r"skipping the providers \['CUDAExecutionProvider'.*\], which can't be used here"
    ):
        session = TrainingSession(path, parameters(), None, providers, options)
    plain = TrainingSession(path, parameters())
    for _ in range(2):
        found = [s.run(["loss"], feed(x, y, **{RATE: 0.1}))[0] for s in (session, plain)]
        assert found[0] == found[1]
    assert session.get_providers() == ["CPUExecutionProvider"]
    with pytest.warns(UserWarning, match="skipping the providers"):
        session.set_providers(providers, options)


def test_a_session_falls_back_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A provider that does not exist here stands for one that fails."""
    x, y = mlp_batches(1)[0]
    session, plain = (TrainingSession(path, parameters(gradient_accumulation_steps=2)) for _ in range(2))
    for each in (session, plain):
        each.run(["loss"], feed(x, y, **{RATE: 0.1}))
    calls = []

    def fail(runner: ProgramRunner, *args: Any, **kwargs: Any) -> Any:
        calls.append(runner)
        if len(calls) < 4:
            raise onnxruntime.capi.onnxruntime_pybind11_state.EPFail("no memory")
        return run(runner, *args, **kwargs)

    run = ProgramRunner.run
    monkeypatch.setattr(ProgramRunner, "run", fail)
    monkeypatch.setattr(TrainingSession, "get_providers", lambda self: ["DnnlExecutionProvider"])
    monkeypatch.setattr(settings, "has_cuda", lambda: False)
    with pytest.raises(Exception, match="no memory"):
        session.run(["loss"], feed(x, y, **{RATE: 0.1}))
    session.enable_fallback()
    with (
        pytest.warns(UserWarning, match=r"DnnlExecutionProvider failed: no memory; .* on \['CPUExecutionProvider'\]"),
        pytest.raises(Exception, match="no memory"),
    ):
        session.run(["loss"], feed(x, y, **{RATE: 0.1}))
    assert len(calls) == 3
    session.run(["loss"], feed(x, y, **{RATE: 0.1}))
    plain.run(["loss"], feed(x, y, **{RATE: 0.1}))
    state = plain.get_state()  # the failed runs did not count
    assert all(np.array_equal(value, state[name]) for name, value in session.get_state().items())


def test_where_a_session_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, cpu = "CUDAExecutionProvider", "CPUExecutionProvider"
    monkeypatch.setattr(settings, "has_cuda", lambda: True)
    for providers, others in (
        ([cpu], []),
        ([], []),
        ([cuda, cpu], [cpu]),
        (["TensorrtExecutionProvider", cuda, cpu], [cuda, cpu]),
    ):
        assert settings.fallback_providers(providers) == others
    monkeypatch.setattr(settings, "has_cuda", lambda: False)
    assert settings.fallback_providers(["DnnlExecutionProvider", cpu]) == [cpu]


def test_the_cpu_is_the_last_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, cpu = "CUDAExecutionProvider", "CPUExecutionProvider"
    monkeypatch.setattr(settings, "available_providers", lambda: [cuda, "DnnlExecutionProvider", cpu])
    monkeypatch.setattr(settings, "has_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert settings.providers_of([cuda, cpu], None) == ("cuda:0", {cuda: {}, cpu: {}})
    assert settings.providers_of([(cuda, {"device_id": "1"})], None) == ("cuda:1", {cuda: {"device_id": "1"}})
    # The CPU takes every node, so nothing is left for the providers after it.
    assert settings.providers_of([cpu, cuda], None) == ("cpu", {cpu: {}})
    assert settings.providers_of(["DnnlExecutionProvider"], [{"a": 1}]) == ("cpu", {"DnnlExecutionProvider": {"a": 1}})
    assert settings.providers_of(None, None) == ("", {})
    # Without names, the options belong to all available providers.
    assert settings.providers_of(None, [{"device_id": 1}, {}, {}])[0] == "cuda:1"
    for index in (2, "first"):
        with pytest.raises(ValueError, match=f"providers has {cuda} with device_id '{index}', but there are 2 CUDA"):
            settings.providers_of([cuda], [{"device_id": index}])
    with pytest.raises(ValueError, match="providers has .'cuda'., unknown to ONNX Runtime: choose from"):
        settings.providers_of(["cuda"], None)


def test_models_in_onnx_runtimes_own_format(path: Path, tmp_path: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.optimized_model_filepath = str(tmp_path / "m.ort")
    options.add_session_config_entry("session.save_model_format", "ORT")
    onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
    for model in (tmp_path / "m.ort", (tmp_path / "m.ort").read_bytes()):
        with pytest.raises(ExportError, match=r"is in ORT format \(.ort\), .* use the ONNX model"):
            TrainingSession(model, parameters())


@pytest.mark.parametrize("kind", ["ONNX", "ORT"])
def test_the_format_that_options_ask_for(kind: str) -> None:
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.load_model_format", kind)
    trainer = mlp_trainer({"session_options": options})
    x, y = mlp_batches(1)[0]
    if kind == "ONNX":
        trainer.train_step(x, y)
        return
    with pytest.raises(ValueError, match="session.load_model_format 'ORT', but models in ONNX Runtime's own format"):
        trainer.train_step(x, y)
    assert trainer.train_step_info.step == 0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("world_size", 1.0, "world_size must be a int, but 1.0"),
        ("world_size", True, "world_size must be a int, but True"),
        ("use_mixed_precision", 1, "use_mixed_precision must be a bool, but 1"),
        ("loss_scale", "1", "loss_scale must be a float or int, but '1'"),
        ("loss_output_name", None, "loss_output_name must be a str, but None"),
        ("weights_to_train", "fc1", "weights_to_train must be a set or frozenset or list or tuple, but 'fc1'"),
        ("optimizer_attributes_map", [], r"optimizer_attributes_map must be a dict, but \[\]"),
    ],
)
def test_properties_are_checked(name: str, value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        setattr(TrainingParameters(), name, value)


def test_parameters_are_values() -> None:
    one, other = TrainingParameters(), TrainingParameters()
    one.weights_to_train = ["a"]
    assert one.weights_to_train == {"a"} and other.weights_to_train == set() and one != other
    one.loss_scale = 2
    assert isinstance(one.loss_scale, float)
    with pytest.raises(AttributeError, match="TrainingParameters has no property 'wieghts'"):
        one.wieghts = 3
    with pytest.raises(TypeError, match="must be a dict of dicts"):
        one.set_optimizer_initial_state({"a": 3})


def test_methods_that_there_are_not_say_what_there_is_instead(model: MLP) -> None:
    session = TrainerSession(mlp_trainer(model=model))
    for name, instead in {
        "run": r"the trainer's train_step\(\) and eval_step\(\) run it",
        "run_async": r"call run\(\) in a thread",
        "load_model": "the constructor reads the model",
        "finalize": "there is nothing to finalize",
        "_sess": "there is no C session",
    }.items():
        with pytest.raises(AttributeError, match=f"^'TrainerSession' object has no attribute '{name}': {instead}"):
            getattr(session, name)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'$"):
        session.nothing()
    assert not hasattr(TrainingSession, "run_async") and hasattr(TrainingSession, "run")
