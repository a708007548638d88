"""The layer of ``onnxruntime.capi.ort_trainer``: arguments, call protocol, state, files."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import CheckpointError, optim
from ort_trainer.compat import older_api
from ort_trainer.compat.older_api import IODescription, LossScaler, ModelDescription, ORTTrainer

from ..helpers import MLP, mlp_batches

pytestmark = pytest.mark.filterwarnings("ignore:onnxruntime.capi.ort_trainer.ORTTrainer is only for old scripts")
RATE = IODescription("lr", [1], torch.float32)
DESCRIPTION = ModelDescription(
    [IODescription("x", ["batch", 8], torch.float32), IODescription("label", ["batch"], torch.int64, 3)],
    [IODescription("loss", [], torch.float32), IODescription("logits", ["batch", 3], torch.float32)],
)


def older(model: nn.Module | None = None, optimizer: str = "SGDOptimizer", **arguments: Any) -> ORTTrainer:
    values: dict[str, Any] = {
        "loss_fn": F.cross_entropy,
        "model_desc": DESCRIPTION,
        "training_optimizer_name": optimizer,
        "map_optimizer_attributes": None,
        "learning_rate_description": RATE,
        "device": "cpu",
        **arguments,
    }
    return ORTTrainer(MLP() if model is None else model, **values)


def test_all_ways_to_call_a_step_give_the_numbers_of_pytorch() -> None:
    model = MLP()
    reference = copy.deepcopy(model)
    trainer = older(model)
    (x, y), rate = mlp_batches(1)[0], torch.tensor([0.1])
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((x, y, rate), {}),
        (([x, y, rate],), {}),
        ((x,), {"lr": 0.1, "label": y}),
        ((), {"label": y, "x": x, "lr": rate}),
    ]
    optimizer = torch.optim.SGD(reference.parameters(), 0.1)
    for number, (args, kwargs) in enumerate(calls, start=1):
        logits = reference(x)
        expected = F.cross_entropy(logits, y)
        loss, found = trainer(*args, **kwargs)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        assert torch.allclose(found, logits, rtol=1e-4, atol=1e-6)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        assert trainer.current_step == trainer.global_step_ == number
    bad: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((x, y), {}, "inputs ['lr'] are missing: a step takes ['x', 'label', 'lr']"),
        ((x, y, rate, rate), {}, "4 inputs were given, but a step takes 3"),
        ((x, y), {"lr": rate, "z": x}, "inputs ['z'] are unknown: a step takes ['x', 'label', 'lr']"),
        ((x, y, rate), {"label": y}, "inputs ['label'] were given twice"),
        ((x, y, "fast"), {}, "the learning rate must be one number, but 'fast' was given"),
        ((x, y, torch.ones(2)), {}, "the learning rate must be one number"),
    ]
    for args, kwargs, message in bad:
        with pytest.raises(TypeError, match=re.escape(message)):
            trainer.train_step(*args, **kwargs)
    assert trainer.current_step == 4
    # Fetches are an argument of the call, in the order asked for; evaluation needs no label for the logits.
    logits, loss = trainer.train_step(x, y, rate, fetches=["logits", "loss"])
    assert logits.shape == (5, 3) and loss.shape == ()
    trainer.eval()
    optimizer.zero_grad()
    F.cross_entropy(reference(x), y).backward()
    optimizer.step()
    assert torch.allclose(trainer(x, fetches=["logits"]), reference(x), rtol=1e-4, atol=1e-6)
    assert len(trainer(x, y)) == 2
    trainer.train()
    assert trainer.trainer.train_step_info.fetches == [] and trainer.current_step == 5


def test_the_trainer_can_ask_for_the_learning_rate() -> None:
    asked = []

    def rate(step: int) -> Any:
        asked.append(step)
        return torch.tensor(0.1) if step % 2 else 0.1

    model = MLP()
    trainer = older(model, get_lr_this_step=rate, gradient_accumulation_steps=2, global_step=6)
    x, y = mlp_batches(1)[0]
    for _ in range(4):
        trainer.train_step(x, y)
    assert asked == [6, 6, 7, 7] and (trainer.global_step_, trainer.current_step) == (8, 4)
    reference = copy.deepcopy(model)
    optimizer = torch.optim.SGD(reference.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(reference(x), y).backward()
        optimizer.step()
    for name, value in trainer.state_dict().items():
        assert torch.allclose(value, reference.state_dict()[name], rtol=1e-4, atol=1e-6), name
    with pytest.raises(TypeError, match=re.escape("inputs ['lr'] are unknown")):
        trainer.train_step(x, y, lr=0.1)


def test_mixed_precision_with_a_scale_of_the_callers_and_then_a_scaler() -> None:
    trainer = older(use_mixed_precision=True)
    (x, y), rate, scale = mlp_batches(1)[0], torch.tensor([0.1]), torch.tensor([128.0])
    assert trainer.loss_scale_input_name == "default_loss_scale_input_name"
    loss, logits, all_finite = trainer.train_step(x, y, rate, default_loss_scale_input_name=scale)
    assert all_finite.tolist() == [True] and trainer.trainer.loss_scaler is not None
    assert trainer.trainer.loss_scaler.loss_scale == 128.0
    assert torch.allclose(loss, F.cross_entropy(logits.float(), y), rtol=1e-2)
    before = trainer.state_dict()
    named = {trainer.loss_scale_input_name: 3e38}
    assert trainer.train_step(x, y, rate, **named)[-1].tolist() == [False]
    assert all(torch.equal(value, before[name]) for name, value in trainer.state_dict().items())
    assert (trainer.global_step_, trainer.current_step) == (1, 2)
    with pytest.raises(TypeError, match="inputs .'default_loss_scale_input_name'. are missing"):
        trainer.train_step(x, y, rate)
    # A scaler, even one that is assigned later, supplies the scale and is updated after every step.
    scaler = trainer.loss_scaler_ = LossScaler("scale", True, loss_scale=3e38, up_scale_window=2)
    assert len(trainer.train_step(x, y, rate)) == 2
    assert (scaler.loss_scale_, scaler.stable_steps_) == (1.5e38, 0)
    scaler.loss_scale_ = 64.0
    for _ in range(2):
        trainer.train_step(x, y, rate)
    assert (scaler.loss_scale_, scaler.stable_steps_) == (128.0, 0)


def test_a_sample_of_a_description() -> None:
    plain = IODescription("x", ["batch", 8])
    assert (plain.name_, plain.shape_, plain.dtype_, plain.num_classes_) == ("x", ["batch", 8], None, None)
    assert older_api.generate_sample(plain).shape == (1, 8)
    sample = older_api.generate_sample(IODescription("label", [40], torch.int32, num_classes=3))
    assert sample.dtype == torch.int32 and set(sample.tolist()) == {0, 1, 2}


def test_loss_scaler() -> None:
    scaler = LossScaler("scale", True, loss_scale=8.0, up_scale_window=2, min_loss_scale=4.0, max_loss_scale=16.0)
    assert scaler.loss_scale_input_name_ == "scale"
    found = []
    for finite in (True, True, True, True, False, True, False, False):
        scaler.update_loss_scale(finite)
        found.append(scaler.loss_scale_)
    assert found == [8, 16, 16, 16, 8, 8, 4, 4]
    scaler.update_loss_scale(True)
    scaler.reset()
    assert (scaler.loss_scale_, scaler.stable_steps_) == (8.0, 0)
    static = LossScaler("scale", False)
    static.update_loss_scale(False)
    assert static.loss_scale_ == 65536.0


def test_state_and_files_go_on_where_they_stopped(tmp_path: Path) -> None:
    def attributes(name: str) -> dict[str, float]:
        return {"lambda": 0.0 if "bias" in name else 0.01}

    trainer = older(optimizer="AdamOptimizer", map_optimizer_attributes=attributes)
    with pytest.warns(UserWarning, match="there is no state yet"):
        assert trainer.state_dict() == {}
    (x, y), rate = mlp_batches(1)[0], 0.01
    trainer.train_step(x, y, rate)
    assert set(trainer.state_dict(include_optimizer_state=False)) == set(MLP().state_dict())
    state = trainer.state_dict()
    assert {"Moment_1_fc1.weight", "Moment_2_fc2.bias", "Update_Count_fc1.bias"} < set(state)
    older_api.save_checkpoint(trainer, tmp_path, "run", {"epoch": 1})
    with pytest.warns(UserWarning, match="run.ort.pt already exists, overwriting"):
        older_api.save_checkpoint(trainer, tmp_path, "run", {"epoch": 2})
    expected = [trainer.train_step(x, y, rate)[0].item() for _ in range(3)]
    resumed = older(optimizer="AdamOptimizer", map_optimizer_attributes=attributes)
    resumed.load_state_dict(state, strict=True)
    assert [resumed.train_step(x, y, rate)[0].item() for _ in range(3)] == expected
    assert older_api.load_checkpoint(resumed, tmp_path, "run") == {"epoch": 2}
    assert [resumed.train_step(x, y, rate)[0].item() for _ in range(3)] == expected
    resumed.load_state_dict({name: state[name] for name in MLP().state_dict()})
    with pytest.raises(RuntimeError, match=r"Missing keys: \['fc1.weight'\]"):
        resumed.load_state_dict({name: value for name, value in state.items() if name != "fc1.weight"}, strict=True)
    with pytest.raises(TypeError, match="state_dict must be a dict"):
        resumed.load_state_dict([])
    with pytest.raises(FileNotFoundError, match="other.ort.pt"):
        older_api.load_checkpoint(resumed, tmp_path, "other")
    torch.save({"model": state}, tmp_path / "pickle.ort.pt")
    with pytest.raises(CheckpointError, match="was written by torch.save"):
        older_api.load_checkpoint(resumed, tmp_path, "pickle")
    trainer.save_as_onnx(tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").exists()


# Every argument that becomes an option of the current trainer, with the option and its value.
OPTIONS = [
    ("device", torch.device("cpu"), "device.id", "cpu"),
    ("gradient_accumulation_steps", 3, "batch.gradient_accumulation_steps", 3),
    ("world_rank", 1, "distributed.world_rank", 1),
    ("world_size", 2, "distributed.world_size", 2),
    ("use_mixed_precision", True, "mixed_precision.enabled", True),
    ("allreduce_post_accumulation", True, "distributed.allreduce_post_accumulation", True),
    ("deepspeed_zero_stage", 1, "distributed.deepspeed_zero_optimization.stage", 1),
    ("enable_grad_norm_clip", False, "utils.grad_norm_clip", False),
    ("frozen_weights", ["fc1.bias"], "utils.frozen_weights", ["fc1.bias"]),
    ("_opset_version", 18, "_internal_use.onnx_opset_version", 18),
    ("_enable_internal_postprocess", False, "_internal_use.enable_internal_postprocess", False),
    ("_use_deterministic_compute", True, "debug.deterministic_compute", True),
    ("use_memory_efficient_gradient", True, "utils.memory_efficient_gradient", True),
    ("run_symbolic_shape_infer", True, "utils.run_symbolic_shape_infer", True),
    ("enable_adasum", True, "distributed.enable_adasum", True),
    (
        "optimized_model_filepath",
        "graph.onnx",
        "debug.graph_save_paths.model_with_training_graph_after_optimization_path",
        "graph.onnx",
    ),
]


@pytest.mark.parametrize(("argument", "value", "path", "expected"), OPTIONS, ids=[entry[0] for entry in OPTIONS])
def test_arguments_become_options(
    argument: str, value: Any, path: str, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(Exception):
        pass

    def record(options: dict[str, Any]) -> None:
        found: Any = options
        for key in path.split("."):
            found = found[key]
        assert found == expected and type(found) is type(expected)
        raise Stop

    monkeypatch.setattr(older_api, "ORTTrainerOptions", record)
    with pytest.raises(Stop):
        older(**{argument: value})


def test_an_option_that_is_not_supported_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match="distributed.world_size is 2, but this process was launched alone: start"):
        older(world_size=2)


def test_extra_postprocess_changes_the_model_in_place() -> None:
    def change(model: Any) -> str:
        model.doc_string = "changed"
        return "not used"

    trainer = older(_extra_postprocess=change)
    postprocess = trainer.trainer.options._internal_use.extra_postprocess
    model = type("Model", (), {})()
    assert postprocess(model) is model and model.doc_string == "changed"


def test_attributes_of_weights_become_parameter_groups() -> None:
    def attributes(name: str) -> dict[str, float]:
        if name == "fc2.weight":
            return {}
        return {"lambda": 0.0 if "bias" in name else 0.5, "do_bias_correction": 1, "alpha": 0.8}

    config = older(optimizer="LambOptimizer", map_optimizer_attributes=attributes).trainer.optim_config
    assert isinstance(config, optim.LambConfig)
    assert config.hyper_parameters(config.group_of("fc1.bias"))["lambda_coef"] == 0.0
    found = config.hyper_parameters(config.group_of("fc1.weight"))
    assert (found["lambda_coef"], found["do_bias_correction"], found["alpha"]) == (0.5, True, 0.8)
    assert config.hyper_parameters(config.group_of("fc2.weight")) == optim.LambConfig().hyper_parameters(0)
    assert isinstance(older().trainer.optim_config, optim.SGDConfig)


def test_attributes_of_an_onnx_models_weights(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    first = older(frozen_weights=["fc1.bias"])
    first.train_step(*mlp_batches(1)[0], 0.1)
    first.save_as_onnx(path)
    asked: list[str] = []

    def attributes(name: str) -> dict[str, float]:
        asked.append(name)
        return {"lambda": 0.0 if "bias" in name else 0.5}

    for model in (path, str(path), onnx.load(path)):
        asked.clear()
        arguments = {"loss_fn": None, "optimizer": "AdamOptimizer", "map_optimizer_attributes": attributes}
        config = older(model, **arguments).trainer.optim_config
        assert sorted(asked) == ["fc1.weight", "fc2.bias", "fc2.weight"], "trained weights, not constants of the code"
        assert config.hyper_parameters(config.group_of("fc1.weight"))["lambda_coef"] == 0.5
        assert config.hyper_parameters(config.group_of("fc2.bias"))["lambda_coef"] == 0.0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"frozen_weights": None}, TypeError, "frozen_weights must be a list of names of weights, but None"),
        ({"frozen_weights": 3}, TypeError, "frozen_weights must be a list of names of weights, but 3"),
        ({"frozen_weights": "fc1.weight"}, TypeError, "frozen_weights must be a list of names of weights, but 'fc1"),
        ({"model_desc": ModelDescription([1], [2])}, TypeError, "the inputs of a ModelDescription are"),
        ({"map_optimizer_attributes": lambda name: 3}, TypeError, "for 'fc1.weight' it returned 3"),
        ({"optimizer": "Adam"}, ValueError, "training_optimizer_name must be one of ['AdamOptimizer', 'LambOptimizer'"),
        ({"map_optimizer_attributes": {}}, TypeError, "map_optimizer_attributes must be a function or None"),
        ({"map_optimizer_attributes": lambda name: {"speed": 1}, "optimizer": "AdamOptimizer"}, ValueError, "'speed'"),
        ({"get_lr_this_step": 0.1}, TypeError, "get_lr_this_step must be a function or None, but 0.1 was given"),
        ({"_extra_postprocess": 1}, TypeError, "_extra_postprocess must be a function or None"),
        ({"learning_rate_description": "lr"}, TypeError, "learning_rate_description must be an IODescription"),
        ({"global_step": -1}, ValueError, "global_step must be an int, at least 0, but -1 was given"),
        ({"loss_scaler": 2.0, "use_mixed_precision": True}, TypeError, "loss_scaler must be a LossScaler of"),
        ({"model_desc": {}}, TypeError, "model_desc must be a ModelDescription, but {} was given"),
        ({"model_desc": ModelDescription(DESCRIPTION.inputs_, [])}, ValueError, "model_desc needs outputs"),
        (
            {"model_desc": ModelDescription(DESCRIPTION.inputs_, DESCRIPTION.outputs_[::-1])},
            ValueError,
            "the first output is the loss, which is a scalar, but 'logits' has the shape ['batch', 3]",
        ),
        ({"frozen_weights": ["none"]}, ValueError, "unknown parameters ['none'] in utils.frozen_weights"),
        ({"device": "gpu"}, ValueError, "device.id"),
        ({"gradient_accumulation_steps": 0}, ValueError, "gradient_accumulation_steps: must be an int of at least 1"),
        ({"use_mixed_precision": 1}, ValueError, "mixed_precision.enabled: must be True or False"),
        ({"enable_grad_norm_clip": 1}, ValueError, "utils.grad_norm_clip: must be True or False"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        older(**arguments)


def test_warnings_at_construction() -> None:
    with pytest.warns(FutureWarning, match="use ort_trainer.ORTTrainer"):
        older()
    with pytest.warns(UserWarning, match="loss_scaler has no effect without use_mixed_precision"):
        older(loss_scaler=LossScaler("scale", True))


def test_the_session_and_the_model_that_scripts_read() -> None:
    trainer = older(optimizer="AdamOptimizer", frozen_weights=["fc1.bias"])
    assert trainer.session is None and trainer.onnx_model_ is None
    x, y = mlp_batches(1)[0]
    trainer.train_step(x, y, 0.1)
    assert trainer.session is not None and trainer.onnx_model_ is not None
    state = trainer.session.get_state()
    trained = {"fc1.weight", "fc2.weight", "fc2.bias"}
    slots = ("Moment_1", "Moment_2", "Update_Count")
    assert set(state) == trained | {f"{slot}_{name}" for slot in slots for name in trained}
    assert trainer.session.get_providers() == ["CPUExecutionProvider"]
    weights = {value.name: onnx.numpy_helper.to_array(value) for value in trainer.onnx_model_.graph.initializer}
    assert set(weights) == set(MLP().state_dict())
    assert all((weights[name] == value.numpy()).all() for name, value in trainer.state_dict(False).items())
    assert [value.name for value in trainer.onnx_model_.graph.output] == ["loss", "logits"]
    expected = [trainer.train_step(x, y, 0.1)[0].item() for _ in range(2)]
    trainer.session.load_state(state, strict=True)
    assert [trainer.train_step(x, y, 0.1)[0].item() for _ in range(2)] == expected


def test_a_scaler_of_another_class(tmp_path: Path) -> None:
    class Scaler:
        def __init__(self) -> None:
            self.loss_scale_ = 64.0
            self.seen: list[bool] = []

        def update_loss_scale(self, is_all_finite: bool) -> None:
            self.seen.append(is_all_finite)
            self.loss_scale_ *= 2

    def trainer() -> ORTTrainer:
        scaler: Any = Scaler()
        return older(use_mixed_precision=True, loss_scaler=scaler, get_lr_this_step=lambda step: 0.1)

    first = trainer()
    for x, y in mlp_batches(2):
        first.train_step(x, y)
    scaler: Any = first.loss_scaler_
    assert scaler.seen == [True, True] and scaler.loss_scale_ == 256.0
    older_api.save_checkpoint(first, tmp_path, "run")
    second = trainer()
    older_api.load_checkpoint(second, tmp_path, "run")
    assert second.loss_scaler_ is not None and second.loss_scaler_.loss_scale_ == 256.0
    with pytest.raises(TypeError, match="or have loss_scale_ and update_loss_scale"):
        older(use_mixed_precision=True, loss_scaler=torch.nn.Identity())


def test_the_window_can_be_assigned() -> None:
    trainer = older(get_lr_this_step=lambda step: 0.1)
    trainer.gradient_accumulation_steps = 3
    for x, y in mlp_batches(6):
        trainer.train_step(x, y)
    assert trainer.global_step_ == 2 and trainer.gradient_accumulation_steps == 3
    with pytest.raises(TypeError, match="gradient_accumulation_steps must be an int"):
        trainer.gradient_accumulation_steps = 1.5


def test_a_checkpoint_has_the_step_and_the_scaler(tmp_path: Path) -> None:
    def trainer(**arguments: Any) -> ORTTrainer:
        scaler = LossScaler("scale", True, loss_scale=64.0, up_scale_window=2)
        return older(use_mixed_precision=True, loss_scaler=scaler, get_lr_this_step=lambda step: 0.1, **arguments)

    first = trainer(global_step=5)
    for x, y in mlp_batches(3):
        first.train_step(x, y)
    older_api.save_checkpoint(first, tmp_path, "run", {"epoch": 1})
    second = trainer()
    assert older_api.load_checkpoint(second, tmp_path, "run") == {"epoch": 1}
    assert second.global_step_ == first.global_step_ == 8
    assert second.loss_scaler_ is not None
    assert (second.loss_scaler_.loss_scale_, second.loss_scaler_.stable_steps_) == (128.0, 1)
    first.trainer.save_checkpoint(tmp_path / "plain.ort.pt")
    with pytest.warns(UserWarning, match=r"global_step_ stays 8, loss_scaler_ keeps the scale 128\.0"):
        older_api.load_checkpoint(second, tmp_path, "plain")
    with pytest.raises(TypeError, match="checkpoint_state_dict must be a dict or None, but 3"):
        older_api.save_checkpoint(first, tmp_path, "bad", 3)


def test_inputs_with_names_of_their_own_are_positional() -> None:
    description = ModelDescription([IODescription("image", ["batch", 8]), DESCRIPTION.inputs_[1]], DESCRIPTION.outputs_)
    model = MLP()
    trainer = older(model, model_desc=description, get_lr_this_step=lambda step: 0.0)
    x, y = mlp_batches(1)[0]
    expected = F.cross_entropy(model(x), y).item()
    assert trainer.train_step(x, y)[0].item() == pytest.approx(expected, rel=1e-5)
    assert trainer.train_step(label=y, image=x)[0].item() == pytest.approx(expected, rel=1e-5)
    assert trainer.eval_step(x, y)[0].item() == pytest.approx(expected, rel=1e-5)
    with pytest.raises(TypeError, match=re.escape("inputs ['x'] are unknown: a step takes ['image', 'label']")):
        trainer.train_step(x=x, label=y)
    more = [IODescription("mask", ["batch"]), *description.inputs_]
    with pytest.raises(ValueError, match="mask"):
        older(model_desc=ModelDescription(more, DESCRIPTION.outputs_))
