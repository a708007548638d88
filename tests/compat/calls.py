"""Calls of documented names by their old paths, with default arguments; each check asserts what the call promises."""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ..helpers import MLP, MLP_DESC, Checks, assert_same_state, assert_same_weights, mlp_batches, resolve
from .effects import RATE, exported

HERE = Path(__file__).parent
SIGNATURES = {
    line.partition("(")[0]: line.partition("(")[2][:-1]
    for line in (HERE / "documented_signatures.txt").read_text().splitlines()
}
CHECKS = Checks()
checks = CHECKS.register


def documented(name: str) -> inspect.Signature:
    """Returns a signature as the documentation has it."""
    return inspect.signature(eval(f"lambda {SIGNATURES[name]}: None"))


def defaults(name: str) -> dict[str, Any]:
    parameters = documented(name).parameters.values()
    return {entry.name: entry.default for entry in parameters if entry.default is not entry.empty}


class World:
    """Objects of the old classes, which the checks share, so a check takes them as another has left them.

    Args:
        folder: A folder for files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.x, self.y = mlp_batches(1)[0]

    @cached_property
    def training(self) -> Any:
        return importlib.import_module("onnxruntime.training")

    @cached_property
    def older(self) -> Any:
        return importlib.import_module("onnxruntime.capi.ort_trainer")

    @cached_property
    def checkpoint(self) -> Any:
        return importlib.import_module("onnxruntime.training.checkpoint")

    @cached_property
    def bindings(self) -> Any:
        return importlib.import_module("onnxruntime.capi._pybind_state")

    @cached_property
    def trainer(self) -> Any:
        """A trainer with the defaults of its arguments, before its first step."""
        return self.training.ORTTrainer(MLP(), MLP_DESC, self.training.optim.AdamConfig(), F.cross_entropy)

    def trained(self) -> Any:
        """Returns the trainer after a step."""
        self.trainer.train_step(self.x, self.y)
        return self.trainer

    @cached_property
    def older_trainer(self) -> Any:
        return self.make_older()

    def make_older(self, **others: Any) -> Any:
        """Returns a trainer of the older API with the defaults of its arguments, and the weights of seed 0."""
        describe = self.older.IODescription
        description = self.older.ModelDescription(
            [describe("x", ["batch", 8]), describe("label", ["batch"])],
            [describe("loss", []), describe("logits", ["batch", 3])],
        )
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return self.older.ORTTrainer(
                MLP(), F.cross_entropy, description, "SGDOptimizer", None, describe("lr", [1]), "cpu", **others
            )

    def older_step(self, trainer: Any = None) -> Any:
        return (trainer or self.older_trainer).train_step(self.x, self.y, torch.tensor([0.1]))

    @property
    def parameters(self) -> Any:
        parameters = self.bindings.TrainingParameters()
        parameters.loss_output_name, parameters.training_optimizer_name = "loss", "AdamOptimizer"
        return parameters

    @cached_property
    def session(self) -> Any:
        return sys.modules["onnxruntime"].TrainingSession(exported(), self.parameters)

    @property
    def feed(self) -> dict[str, Any]:
        return {"x": self.x.numpy(), "label": self.y.numpy(), RATE: np.array([0.1], np.float32)}


def with_weights(weights: dict[str, Any]) -> MLP:
    model = MLP()
    model.load_state_dict({name: torch.as_tensor(value) for name, value in weights.items()})
    return model


def expected(model: nn.Module, world: World) -> list[torch.Tensor]:
    """Returns PyTorch's loss and logits."""
    logits = model(world.x)
    return [F.cross_entropy(logits, world.y), logits]


def close(found: Any, wanted: Any) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs.detach(), rtol=1e-4, atol=1e-6)


# ---- onnxruntime.training

TRAINING = "onnxruntime.training."
TRAINER = f"{TRAINING}ORTTrainer"


@checks(TRAINER, *(f"{TRAINER}({name})" for name in ("model", "model_desc", "optim_config", "loss_fn", "options")))
def trainer(world: World) -> None:
    model = MLP()
    ours = world.training.ORTTrainer(
        model=model,
        model_desc=MLP_DESC,
        optim_config=world.training.optim.AdamConfig(),
        loss_fn=F.cross_entropy,
        options=None,
    )
    theirs = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.001, weight_decay=0.0)
    wanted = expected(theirs, world)
    wanted[0].backward()
    nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
    optimizer.step()
    close(ours.train_step(world.x, world.y), wanted)
    assert_same_weights(ours, theirs, 1e-5)


@checks(f"{TRAINER}.train_step", f"{TRAINER}.eval_step")
def steps(world: World) -> None:
    info = world.trained()._train_step_info
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((world.x, world.y), {}),
        ((), {"label": world.y, "x": world.x}),
        ((world.x,), {"label": world.y}),
    ]
    for step, moves in ((world.trainer.train_step, 1), (world.trainer.eval_step, 0)):
        for args, kwargs in calls:
            count, wanted = info.optimization_step, expected(with_weights(world.trainer.state_dict(True)), world)
            close(step(*args, **kwargs), wanted)
            assert info.optimization_step == count + moves


@checks(f"{TRAINER}.save_as_onnx")
def save_as_onnx(world: World) -> None:
    with pytest.raises(RuntimeWarning):  # as documented
        world.training.ORTTrainer(MLP(), MLP_DESC, world.training.optim.SGDConfig(), F.cross_entropy).save_as_onnx("m")
    trainer = world.trained()
    assert trainer.save_as_onnx(str(world.folder / "m.onnx")) is None
    session = onnxruntime.InferenceSession(world.folder / "m.onnx", providers=["CPUExecutionProvider"])
    close(session.run(None, {"x": world.x.numpy(), "label": world.y.numpy()}), trainer.eval_step(world.x, world.y))
    with pytest.raises(ValueError, match="nowhere"):
        trainer.save_as_onnx(str(world.folder / "nowhere" / "m.onnx"))


@checks(f"{TRAINER}.state_dict", f"{TRAINER}.load_state_dict")
def state_dict(world: World) -> None:
    trainer = world.trained()
    state = trainer.state_dict()
    names = set(MLP().state_dict())
    assert set(state["model"]["full_precision"]) == set(state["optimizer"]) == names
    moments = state["optimizer"]["fc1.weight"]
    assert moments["Moment_1"].shape == moments["Moment_2"].shape == (16, 8)
    assert moments["Update_Count"] == [trainer._train_step_info.optimization_step + 1]
    assert {"optimization_step", "step"} <= set(state["train_step_info"])
    assert (
        state["trainer_options"].items()
        >= {
            "mixed_precision": False,
            "zero_stage": 0,
            "world_rank": 0,
            "world_size": 1,
            "optimizer_name": "AdamOptimizer",
            "data_parallel_size": 1,
            "horizontal_parallel_size": 1,
        }.items()
    )
    assert "partition_info" not in state
    weights = trainer.state_dict(pytorch_format=True)
    assert set(weights) == names and all(isinstance(value, torch.Tensor) for value in weights.values())
    losses = [trainer.train_step(world.x, world.y)[0] for _ in range(2)]
    assert trainer.load_state_dict(state) is None
    assert_same_state(trainer.state_dict(), state)
    assert [trainer.train_step(world.x, world.y)[0] for _ in range(2)] == losses
    del state["model"]["full_precision"]["fc1.weight"]
    with pytest.raises(RuntimeError, match="Missing keys"):  # strict
        trainer.load_state_dict(state)


@checks(f"{TRAINER}.save_checkpoint", f"{TRAINER}.load_checkpoint")
def checkpoint(world: World) -> None:
    trainer, path = world.trained(), str(world.folder / "checkpoint")
    assert trainer.save_checkpoint(path) is None
    state = trainer.state_dict()
    world.trained()
    assert trainer.load_checkpoint(path) == {}
    assert_same_state(trainer.state_dict(), state)
    with pytest.raises(FileExistsError):
        trainer.save_checkpoint(path)
    trainer.save_checkpoint(path + "2", {"epoch": 3, "seen": {(1, 2)}})
    assert trainer.load_checkpoint(path + "2") == {"epoch": 3, "seen": {(1, 2)}}


@checks(*(f"{TRAINING}ORTTrainerOptions{part}" for part in ("", "(options)", "(_validate)")))
def options(world: World) -> None:
    plain = world.training.ORTTrainerOptions()
    assert plain.batch.gradient_accumulation_steps == 1 and plain.mixed_precision.enabled is False
    assert plain.lr_scheduler is None and plain._internal_use.onnx_opset_version == 14
    assert plain == world.training.ORTTrainerOptions({}) == world.training.ORTTrainerOptions(options={}, _validate=True)
    # The example of the documentation, with the argument that the schedule needs.
    schedule = world.training.optim.lr_scheduler.LinearWarmupLRScheduler(10)
    example = world.training.ORTTrainerOptions(
        {
            "batch": {"gradient_accumulation_steps": 128},
            "device": {"id": "cuda:0", "mem_limit": 2 * 1024 * 1024 * 1024},
            "lr_scheduler": schedule,
            "mixed_precision": {
                "enabled": True,
                "loss_scaler": world.training.amp.LossScaler(loss_scale=float(1 << 16)),
            },
        }
    )
    assert example.mixed_precision.enabled and example.lr_scheduler is schedule
    with pytest.raises(ValueError, match="Invalid options: .*gradient_accumulation_steps"):
        world.training.ORTTrainerOptions({"batch": {"gradient_accumulation_steps": 0}}, _validate=False)


@checks(f"{TRAINING}TrainStepInfo")
def train_step_info(world: World) -> None:
    config = world.training.optim.SGDConfig()
    info = world.training.TrainStepInfo(config)
    assert (info.optimizer_config, info.all_finite, info.fetches) == (config, True, [])
    assert (info.optimization_step, info.step) == (0, 0)


@checks(f"{TRAINING}ORTModule")
def ort_module(world: World) -> None:
    theirs = MLP()
    ours = world.training.ORTModule(copy.deepcopy(theirs))
    for model in (ours, theirs):
        F.cross_entropy(model(world.x), world.y).backward()
    for (name, parameter), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, msg=name)


@checks(f"{TRAINING}PropagateCastOpsStrategy")
def strategies(world: World) -> None:
    kinds = world.training.PropagateCastOpsStrategy
    assert [int(kind) for kind in (kinds.NONE, kinds.INSERT_AND_REDUCE, kinds.FLOOD_FILL)] == [0, 1, 2]
    casts = {"propagate_cast_ops_config": {"propagate_cast_ops_strategy": kinds.FLOOD_FILL}}
    found = world.training.ORTTrainerOptions({"graph_transformer": casts}).graph_transformer.propagate_cast_ops_config
    assert found.propagate_cast_ops_strategy == kinds.FLOOD_FILL


CONFIGS = ("SGDConfig", "AdamConfig", "LambConfig", "LambConfig(param_groups)", "_OptimizerConfig")


@checks(*(f"{TRAINING}optim.{name}" for name in CONFIGS))
def configs(world: World) -> None:
    optim = world.training.optim
    found = [getattr(optim, f"{name}Config")() for name in ("SGD", "Adam", "Lamb")]
    assert [config.name for config in found] == ["SGDOptimizer", "AdamOptimizer", "LambOptimizer"]
    assert all(config.lr == 0.001 and config.params == [] for config in found)
    assert all(isinstance(config, optim._OptimizerConfig) for config in found)
    assert found[1].do_bias_correction and not found[2].do_bias_correction
    # The example of the documentation.
    groups = [
        {"params": ["model_param0"], "alpha": 0.8, "beta": 0.7},
        {"params": ["model_param1", "model_param_2"], "alpha": 0.0},
    ]
    config = optim.LambConfig(param_groups=groups, alpha=0.9, beta=0.999)
    assert [(group["alpha"], group["beta"]) for group in config.params] == [(0.8, 0.7), (0.0, 0.999)]
    own = optim._OptimizerConfig("AdamOptimizer", groups[:1], {"lr": 0.5, "alpha": 0.9, "beta": 0.999})
    assert (own.name, own.lr, own.params[0]["beta"]) == ("AdamOptimizer", 0.5, 0.7)


# By class: the rate of a second update of ten, for the base rate 1.
SCHEDULES = {
    "lr_scheduler.LinearWarmupLRScheduler": 0.9018036,
    "ConstantWarmupLRScheduler": 1.0,
    "CosineWarmupLRScheduler": 0.9763961,
    "PolyWarmupLRScheduler": 0.9018036,
}


@checks(f"{TRAINING}optim._LRScheduler", *(f"{TRAINING}optim.{name}" for name in SCHEDULES))
def schedules(world: World) -> None:
    optim = world.training.optim
    info = world.training.TrainStepInfo(optim.SGDConfig(lr=1.0), optimization_step=1)
    for name, rate in SCHEDULES.items():
        schedule = resolve(f"{TRAINING}optim.{name}")(total_steps=10)
        assert isinstance(schedule, optim._LRScheduler)
        assert schedule.get_lr(info) == pytest.approx([rate]) and schedule.get_last_lr() == []

    class Halving(optim._LRScheduler):  # type: ignore[misc,name-defined]
        def get_lr(self, train_step_info: Any) -> list[float]:
            return [train_step_info.optimizer_config.lr / 2]

    own = Halving()
    assert own._step(info) == own.get_last_lr() == [0.5]


@checks(f"{TRAINING}amp.LossScaler", f"{TRAINING}amp.DynamicLossScaler")
def loss_scalers(world: World) -> None:
    info = world.training.TrainStepInfo(world.training.optim.SGDConfig(), all_finite=False)
    constant, dynamic = world.training.amp.LossScaler(8.0), world.training.amp.DynamicLossScaler()
    assert isinstance(dynamic, world.training.amp.LossScaler)
    assert (constant.loss_scale, constant.update(info)) == (8.0, 8.0)
    assert (dynamic.loss_scale, dynamic.update(info)) == (65536.0, 32768.0)
    assert (dynamic.up_scale_window, dynamic.min_loss_scale, dynamic.max_loss_scale) == (2000, 1.0, 16777216.0)
    dynamic.reset()
    assert dynamic.loss_scale == 65536.0


CHECKPOINT = f"{TRAINING}checkpoint."


@checks(*(f"{CHECKPOINT}experimental_{name}" for name in ("state_dict", "load_state_dict", "save_checkpoint")))
@checks(f"{CHECKPOINT}experimental_load_checkpoint")
def experimental(world: World) -> None:
    trainer, found = world.trained(), world.checkpoint
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        state = found.experimental_state_dict(trainer)
        assert set(state) >= {"fc1.weight", "Moment_1_fc1.weight", "Update_Count_fc1.weight"}
        assert found.experimental_save_checkpoint(trainer, str(world.folder)) is None
        assert (world.folder / "ORT_checkpoint.ort.pt").is_file()
        for restore in (
            lambda: found.experimental_load_state_dict(trainer, state),
            lambda: found.experimental_load_checkpoint(trainer, str(world.folder)),
        ):
            world.trained()
            restore()
            assert_same_state(found.experimental_state_dict(trainer), state)


@checks(f"{CHECKPOINT}aggregate_checkpoints")
def aggregate(world: World) -> None:
    with pytest.warns(UserWarning, match="pickle"):
        weights = world.checkpoint.aggregate_checkpoints([HERE.parent / "state" / "data" / "legacy_1_16.h5"])
    assert weights["fc1.weight"].shape == (16, 8) and weights["fc1.weight"].dtype == torch.float32


# ---- onnxruntime.capi.ort_trainer

OLDER = "onnxruntime.capi.ort_trainer."
DESCRIPTIONS = {"IODescription": ("name", "shape", "dtype", "num_classes"), "ModelDescription": ("inputs", "outputs")}


@checks(f"{OLDER}generate_sample")
@checks(*(f"{OLDER}{kind}" for kind in DESCRIPTIONS))
@checks(*(f"{OLDER}{kind}({name})" for kind, names in DESCRIPTIONS.items() for name in names))
def descriptions(world: World) -> None:
    plain = world.older.IODescription("x", ["batch", 8])
    assert (plain.name_, plain.shape_, plain.dtype_, plain.num_classes_) == ("x", ["batch", 8], None, None)
    label = world.older.IODescription(name="label", shape=[40], dtype=torch.int32, num_classes=3)
    found = world.older.ModelDescription(inputs=[plain, label], outputs=[])
    assert (found.inputs_, found.outputs_) == ([plain, label], [])
    assert world.older.generate_sample(plain).shape == (1, 8)
    sample = world.older.generate_sample(label)
    assert sample.dtype == torch.int32 and set(sample.tolist()) == {0, 1, 2}


@checks(f"{OLDER}LossScaler")
def older_scaler(world: World) -> None:
    scaler = world.older.LossScaler("loss_scale", True)
    assert (scaler.loss_scale_, scaler.up_scale_window_) == (65536.0, 2000)
    scaler.update_loss_scale(False)
    assert (scaler.loss_scale_, scaler.min_loss_scale_, scaler.max_loss_scale_) == (32768.0, 1.0, 16777216.0)


ARGUMENTS = documented(f"{OLDER}ORTTrainer").parameters


@checks(f"{OLDER}ORTTrainer", f"{OLDER}DEFAULT_OPSET_VERSION", *(f"{OLDER}ORTTrainer({name})" for name in ARGUMENTS))
def older_trainer(world: World) -> None:
    given = defaults(f"{OLDER}ORTTrainer")
    assert given["_opset_version"] == world.older.DEFAULT_OPSET_VERSION == 14
    trainers = [world.make_older(), world.make_older(**given)]
    torch.manual_seed(0)
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        wanted = expected(model, world)
        for ours in trainers:
            close(world.older_step(ours), wanted)
        optimizer.zero_grad()
        wanted[0].backward()
        optimizer.step()


@checks(*(f"{OLDER}ORTTrainer.{name}" for name in ("train_step", "eval_step", "train", "eval")))
def older_steps(world: World) -> None:
    trainer, rate = world.older_trainer, torch.tensor([0.1])
    world.older_step()
    wanted = expected(with_weights(trainer.state_dict()), world)
    close(trainer.eval_step(world.x, world.y), wanted)
    close([trainer.eval_step(world.x, fetches=["logits"])], wanted[1:])
    trainer.eval()
    close(trainer(x=world.x, label=world.y), wanted)
    trainer.train()
    close(trainer(world.x, label=world.y, lr=rate), wanted)
    (loss,) = expected(with_weights(trainer.state_dict()), world)[:1]
    close([trainer.train_step(world.x, world.y, rate, fetches=["loss"])], [loss])
    assert loss < wanted[0]


@checks(*(f"{OLDER}ORTTrainer.{name}" for name in ("state_dict", "load_state_dict", "save_as_onnx")))
@checks(f"{OLDER}save_checkpoint", f"{OLDER}load_checkpoint")
def older_state(world: World) -> None:
    trainer, folder = world.older_trainer, world.folder / "older"
    folder.mkdir()
    world.older_step()
    state = trainer.state_dict()
    assert {name: tuple(value.shape) for name, value in state.items()}["fc1.weight"] == (16, 8)
    trainer.save_as_onnx(str(folder / "m.onnx"))
    (weight,) = (w for w in onnx.load(folder / "m.onnx").graph.initializer if w.name == "fc1.weight")
    assert np.array_equal(onnx.numpy_helper.to_array(weight), state["fc1.weight"].numpy())
    world.older.save_checkpoint(trainer, str(folder))
    for restore in (
        lambda: trainer.load_state_dict(state),
        lambda: world.older.load_checkpoint(trainer, str(folder)),
    ):
        world.older_step()
        restore()
        assert_same_state(trainer.state_dict(), state)


# ---- onnxruntime.training.artifacts

ARTIFACTS = f"{TRAINING}artifacts."
GENERATE = f"{ARTIFACTS}generate_artifacts"
ARTIFACT_ARGUMENTS = (
    *("model", "requires_grad", "frozen_params", "loss", "optimizer", "artifact_directory", "prefix"),
    *("additional_output_names", "nominal_checkpoint", "loss_input_names"),
)
LOSSES = {"MSELoss": F.mse_loss, "CrossEntropyLoss": F.cross_entropy, "L1Loss": F.l1_loss}


def network() -> tuple[onnx.ModelProto, nn.Linear]:
    """Returns a linear layer, in ONNX and in PyTorch."""
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18]> g (float[N,8] x) => (float[N,3] y) '
        "{ y = Gemm<transB=1>(x, weight, bias) }"
    )
    model = nn.Linear(8, 3)
    for name, value in model.state_dict().items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value.numpy(), name))
    return proto, model


@checks(GENERATE, *(f"{GENERATE}({name})" for name in ARTIFACT_ARGUMENTS))
@checks(*(f"{ARTIFACTS}{kind}" for kind in ("LossType", "OptimType", "OptimType.AdamW", "OptimType.SGD")))
@checks(*(f"{ARTIFACTS}LossType.{name}" for name in ("BCEWithLogitsLoss", *LOSSES)))
def artifacts(world: World) -> None:
    found = importlib.import_module("onnxruntime.training.artifacts")
    api = importlib.import_module("onnxruntime.training.api")
    kinds, rules = found.LossType, found.OptimType
    assert [kind.value for kind in (kinds.MSELoss, kinds.CrossEntropyLoss, kinds.BCEWithLogitsLoss, kinds.L1Loss)] == [
        1, 2, 3, 4
    ]  # fmt: skip
    x, target = world.x.numpy(), torch.rand(5, 3)
    proto, model = network()
    folder = world.folder / "artifacts"
    found.generate_artifacts(proto, ["weight"], ["bias"], kinds.BCEWithLogitsLoss, rules.AdamW, str(folder))
    assert {path.name for path in folder.iterdir()} == {
        *("training_model.onnx", "eval_model.onnx", "optimizer_model.onnx", "checkpoint")
    }
    state = api.CheckpointState.load_checkpoint(str(folder / "checkpoint"))
    module = api.Module(str(folder / "training_model.onnx"), state, str(folder / "eval_model.onnx"))
    wanted = F.binary_cross_entropy_with_logits(model(world.x), target)
    close([module(x, target.numpy())], [wanted])
    assert {name: parameter.requires_grad for name, parameter in state.parameters} == {"weight": True, "bias": False}
    before = state.parameters["weight"].data
    api.Optimizer(str(folder / "optimizer_model.onnx"), module).step()
    moves = np.abs(state.parameters["weight"].data - before)
    assert moves.max() == pytest.approx(0.001, rel=1e-3) and moves.min() > 0.0005  # of AdamW's first update
    for name, function in LOSSES.items():
        labels = world.y if name == "CrossEntropyLoss" else target
        found.generate_artifacts(
            model=proto,
            loss=getattr(kinds, name),
            optimizer=rules.SGD,
            artifact_directory=str(folder),
            prefix=f"{name}_",
            additional_output_names=["y"],
            nominal_checkpoint=True,
            loss_input_names=["y"],
        )
        state = api.CheckpointState.load_checkpoint(str(folder / f"{name}_checkpoint"))
        assert (folder / f"{name}_nominal_checkpoint").is_file()
        module = api.Module(str(folder / f"{name}_training_model.onnx"), state)
        close(module(x, labels.numpy()), [function(model(world.x), labels), model(world.x)])


# ---- onnxruntime.TrainingSession

SESSION = "onnxruntime.TrainingSession"
SESSION_ARGUMENTS = ("path_or_bytes", "parameters", "sess_options", "providers", "provider_options")


@checks(SESSION, f"{SESSION}.__init__", *(f"{SESSION}({name})" for name in SESSION_ARGUMENTS))
def makes_a_session(world: World) -> None:
    path = world.folder / "model.onnx"
    path.write_bytes(exported())
    given = {"sess_options": onnxruntime.SessionOptions(), "providers": ["CPUExecutionProvider"]}
    session = resolve(SESSION)(str(path), world.parameters, **given, provider_options=[{}])
    others = resolve(SESSION)(exported(), world.parameters, providers=[("CPUExecutionProvider", {})])
    wanted = expected(with_weights(session.get_model_state()["full_precision"]), world)
    for made in (session, others):
        close(made.run(None, world.feed), wanted)


@checks(*(f"{SESSION}.{name}" for name in ("run", "run_with_ort_values", "run_with_iobinding", "io_binding")))
def runs(world: World) -> None:
    session = world.session
    wanted = expected(with_weights(session.get_model_state()["full_precision"]), world)
    close(session.run(["loss", "logits"], world.feed), wanted)
    losses = [wanted[0].item()]
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(value) for name, value in world.feed.items()}
    losses.append(float(session.run_with_ort_values(["loss"], values)[0].numpy()))
    binding = session.io_binding()
    for name, value in world.feed.items():
        binding.bind_cpu_input(name, value)
    binding.bind_output("loss")
    assert session.run_with_iobinding(binding) is None
    losses.append(float(binding.copy_outputs_to_cpu()[0]))
    losses.append(float(session.run(None, world.feed)[0]))
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == 4  # each run was a step


@checks(*(f"{SESSION}.get_{name}" for name in ("inputs", "outputs", "overridable_initializers", "modelmeta")))
@checks(f"{SESSION}.is_output_fp32_node")
def describes(world: World) -> None:
    session = world.session
    assert [(entry.name, entry.type, entry.shape) for entry in session.get_inputs()] == [
        ("x", "tensor(float)", ["batch", 8]),
        ("label", "tensor(int64)", ["batch"]),
        (RATE, "tensor(float)", [1]),
    ]
    assert [entry.name for entry in session.get_outputs()] == ["loss", "logits"]
    assert session.get_overridable_initializers() == [] and session.is_output_fp32_node("logits") is True
    theirs = onnxruntime.InferenceSession(exported(), providers=["CPUExecutionProvider"]).get_modelmeta()
    names = [name for name in dir(theirs) if not name.startswith("_")]
    ours = session.get_modelmeta()
    assert len(names) >= 7
    for name in names:
        assert getattr(ours, name) == getattr(theirs, name), name


@checks(*(f"{SESSION}.{name}" for name in ("get_providers", "get_provider_options", "set_providers")))
@checks(*(f"{SESSION}.{name}" for name in ("_create_inference_session", "_reset_session", "get_session_options")))
def providers(world: World) -> None:
    session = world.session
    session.run(None, world.feed)
    assert session.get_providers()[-1] == "CPUExecutionProvider"
    assert list(session.get_provider_options()) == session.get_providers()
    assert isinstance(session.get_session_options(), onnxruntime.SessionOptions)
    state = session.get_state()
    for reset in (
        session.set_providers,
        lambda: session._reset_session(None, None),
        lambda: session._create_inference_session(["CPUExecutionProvider"], [{}]),
    ):
        assert reset() is None
        assert_same_state(session.get_state(), state)


@checks(f"{SESSION}.get_profiling_start_time_ns", f"{SESSION}.end_profiling")
def profiles(world: World) -> None:
    session = world.session
    assert session.get_profiling_start_time_ns() == 0 and session.end_profiling() == ""  # as it was not asked for
    options = onnxruntime.SessionOptions()
    options.enable_profiling = True
    options.profile_file_prefix = str(world.folder / "profile")
    profiled = resolve(SESSION)(exported(), world.parameters, options)
    assert profiled.get_session_options() is options
    profiled.run(None, world.feed)
    assert profiled.get_profiling_start_time_ns() > 0 and "kernel_time" in Path(profiled.end_profiling()).read_text()


@checks(f"{SESSION}.enable_fallback", f"{SESSION}.disable_fallback")
def falls_back(world: World) -> None:
    """The CPU's provider never fails, so this is about the calls; test_session.py tests a failure."""
    session = world.session
    for switch in (session.enable_fallback, session.disable_fallback):
        assert switch() is None
        session.run(None, world.feed)


STATE = ("get_state", "load_state", "get_model_state", "get_optimizer_state", "get_partition_info_map")


@checks(*(f"{SESSION}.{name}" for name in STATE))
def session_state(world: World) -> None:
    session = world.session
    session.run(None, world.feed)
    state = session.get_state()
    weights, optimizer = session.get_model_state(), session.get_optimizer_state()
    assert list(weights) == ["full_precision"] and session.get_partition_info_map() == {}
    assert np.array_equal(weights["full_precision"]["fc1.weight"], state["fc1.weight"])
    assert np.array_equal(optimizer["fc1.weight"]["Moment_1"], state["Moment_1_fc1.weight"])
    loss = session.run(["loss"], world.feed)
    assert session.load_state({**state, "unknown": np.ones(1, np.float32)}) is None  # not strict
    assert_same_state(session.get_state(), state)
    assert session.run(["loss"], world.feed) == loss


OBJECT = (
    *("__class__", "__del__", "__delattr__", "__dir__", "__eq__", "__format__", "__ge__", "__getattribute__"),
    *("__gt__", "__hash__", "__init_subclass__", "__le__", "__lt__", "__ne__", "__new__", "__reduce__"),
    *("__reduce_ex__", "__repr__", "__setattr__", "__sizeof__", "__str__", "__subclasshook__"),
)


@checks(*(f"{SESSION}.{name}" for name in OBJECT))
def is_an_object(world: World) -> None:
    session: Any = world.session
    kind: Any = resolve(SESSION)
    classes: Any = (kind.__class__, session.__class__)
    assert isinstance(kind, classes[0]) and classes == (type, kind)
    session.__setattr__("mine", 1)
    assert session.__getattribute__("mine") == 1 and "mine" in session.__dir__()
    session.__delattr__("mine")
    assert not hasattr(session, "mine")
    assert session.__eq__(session) is True and session.__ne__(session) is False
    assert hash(session) == session.__hash__() and {session: 1}[session] == 1
    for compare in (session.__lt__, session.__le__, session.__gt__, session.__ge__):
        assert compare(session) is NotImplemented
    assert "TrainingSession" in session.__repr__() == session.__str__() == session.__format__("")
    assert session.__sizeof__() > 0 and callable(session.__reduce__) and callable(session.__reduce_ex__)
    assert isinstance(kind.__new__(kind), kind) and kind.__subclasshook__(int) is NotImplemented

    class Own(kind):  # type: ignore[misc,valid-type]
        pass

    assert Own.__init_subclass__() is None
    assert session.__del__() is None
    assert session.run(["loss"], world.feed)[0] > 0


# ---- onnxruntime.capi._pybind_state

BINDINGS = "onnxruntime.capi._pybind_state."
C_SESSION = f"{BINDINGS}TrainingSession"


@checks(f"{BINDINGS}TrainingParameters", f"{BINDINGS}TrainingParameters.__init__")
def parameters(world: World) -> None:
    found = world.bindings.TrainingParameters()
    assert (found.world_rank, found.world_size, found.gradient_accumulation_steps) == (0, 1, 1)
    assert found.enable_grad_norm_clip is True and found.lr_params_feed_name == "Learning_Rate"
    assert found.propagate_cast_ops_level == 1 and found.loss_scale == 0.0 and found.weights_to_train == set()
    assert found.set_optimizer_initial_state({}) is None


@checks(f"{BINDINGS}set_cuda_mem_limit")
def memory_limit(world: World) -> None:
    assert world.bindings.set_cuda_mem_limit(0) is None
    assert world.training.ORTTrainerOptions().device.mem_limit == 0


@checks(C_SESSION, f"{BINDINGS}TrainingConfigurationResult")
@checks(
    *(f"{C_SESSION}.{name}" for name in ("__init__", "load_model", "read_bytes", "finalize", "is_output_fp32_node"))
)
@checks(*(f"{C_SESSION}.{name}" for name in STATE))
def c_session(world: World) -> None:
    path = world.folder / "c_model.onnx"
    path.write_bytes(exported())
    mixed = world.parameters
    mixed.use_mixed_precision = True
    session = world.bindings.TrainingSession()
    with pytest.raises(RuntimeError, match=r"the session has no model: call load_model\(\) or read_bytes\(\) first"):
        session.get_state()
    result = session.load_model(str(path), world.parameters, ["CPUExecutionProvider"], [{}])
    assert isinstance(result, world.bindings.TrainingConfigurationResult) and result.loss_scale_input_name == ""
    state = session.get_state()
    session.run(["loss"], world.feed, None)
    assert session.is_output_fp32_node("loss") and session.get_partition_info_map() == {}
    assert session.load_state(state, True) is None
    assert_same_state(session.get_state(), state)
    assert np.array_equal(session.get_model_state(False)["full_precision"]["fc2.bias"], state["fc2.bias"])
    assert session.get_optimizer_state()["fc2.bias"]["Update_Count"] == [1]
    assert session.finalize() is None
    other = world.bindings.TrainingSession(onnxruntime.SessionOptions())
    assert other.read_bytes(exported(), mixed, [], []).loss_scale_input_name == "loss_scale"
    assert set(other.get_model_state(True)) == {"full_precision", "mixed_precision"}


BUILDER = f"{BINDINGS}GradientGraphBuilder"


@checks(BUILDER, *(f"{BUILDER}.{name}" for name in ("__init__", "build", "get_model", "save")))
def builds_gradients(world: World) -> None:
    source = onnx.ModelProto.FromString(exported())
    weights = {value.name: onnx.numpy_helper.to_array(value).copy() for value in source.graph.initializer}
    model = with_weights(weights)
    wanted = expected(model, world)
    wanted[0].backward()
    names = ["fc1.weight", "fc2.bias"]
    builder = world.bindings.GradientGraphBuilder(exported(), {"loss"}, set(names), "loss")
    assert builder.build() is None
    path = world.folder / "gradients.onnx"
    assert builder.save(str(path)) is None
    outputs = ["loss", "logits", *(f"{name}_grad" for name in names)]
    gradients = [dict(model.named_parameters())[name].grad for name in names]
    for found in (builder.get_model(), path):
        session = onnxruntime.InferenceSession(found, providers=["CPUExecutionProvider"])
        assert {value.name for value in session.get_inputs()} == {"x", "label"}
        assert {value.name for value in session.get_outputs()} == set(outputs)
        close(session.run(outputs, {"x": world.x.numpy(), "label": world.y.numpy()}), [*wanted, *gradients])
