"""Checks each documented name about training, comparing numbers with PyTorch's."""

from __future__ import annotations

import inspect
import weakref
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch

from ort_trainer.api import (
    CheckpointState,
    LinearLRScheduler,
    Module,
    Optimizer,
    TrainingSession,
    random_numbers,
    set_seed,
)
from ort_trainer.core import masks
from ort_trainer.step.contract import RandomInput

from .exported import NAMES, RATE, TRAINED
from .world import PYTHON, World, checks, close, flat, same_weights

# Creating a session or a module.


@checks("CreateTrainingSession", "Ort::TrainingSession::TrainingSession")
def creates_a_session(world: World) -> None:
    files = [world.file(kind) for kind in ("training", "eval", "optimizer")]
    session = TrainingSession(world.state, *files, session_options=onnxruntime.SessionOptions())
    close(session.train_step(list(world.batches[0]))[0], world.outputs()[0])
    training_only = TrainingSession(world.state, files[0])
    with pytest.raises(RuntimeError, match="evaluation model"):
        training_only.eval_step(list(world.batches[0]))


@checks("CreateTrainingSessionFromBuffer")
def creates_a_session_from_bytes(world: World) -> None:
    session = TrainingSession(world.state, *(world.bytes(kind) for kind in ("training", "eval", "optimizer")))
    close(session.train_step(list(world.batches[0]))[0], world.outputs()[0])
    session.optimizer_step()
    same_weights(world.state, world.weights(world.trained([RATE])))


MEMORY = ("contained_type", "operator contained_type*", "p_", "Base", "operator=", "release", "~Base")


@checks("ReleaseTrainingSession", *(f"Ort::TrainingSession::{name}" for name in MEMORY))
def releases_a_session(world: World) -> None:
    reference, other = weakref.ref(world.session), world.session
    del world.session
    assert reference() is other
    del other
    assert reference() is None


MODULE = ("train_model_uri", "state", "eval_model_uri", "device", "session_options")


@checks(f"{PYTHON}Module", *(f"{PYTHON}Module({name})" for name in MODULE))
def makes_a_module(world: World) -> None:
    assert list(inspect.signature(Module).parameters) == list(MODULE)
    options = onnxruntime.SessionOptions()
    values: tuple[Any, ...] = (world.file("training"), world.state, world.file("eval"), "cpu", options)
    for module in (Module(*values), Module(**dict(zip(MODULE, values, strict=True)))):
        close(module(*world.batches[0])[0], world.outputs()[0])
    for number in range(len(MODULE)):
        wrong = (*values[:number], 3.5, *values[number + 1 :])
        with pytest.raises(TypeError, match=MODULE[number]):
            Module(*wrong)


# Steps.


@checks("TrainStep", "Ort::TrainingSession::TrainStep")
def train_step(world: World) -> None:
    for found, expected in zip(world.session.train_step(list(world.batches[0])), world.outputs(), strict=True):
        close(found, expected)
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(value) for value in world.batches[1]]
    outputs = world.session.train_step(values, onnxruntime.RunOptions())
    assert all(isinstance(value, onnxruntime.OrtValue) for value in outputs)
    for name, gradient in world.gradients(0, 1).items():  # the sum of both
        close(world.state.parameters[name].grad, gradient)


@checks("EvalStep", "Ort::TrainingSession::EvalStep")
def eval_step(world: World) -> None:
    for found, expected in zip(world.session.eval_step(list(world.batches[0])), world.outputs(), strict=True):
        close(found, expected)
    assert not any(np.any(world.state.parameters[name].grad) for name in TRAINED)


@checks("LazyResetGrad", "Ort::TrainingSession::LazyResetGrad", f"{PYTHON}Module.lazy_reset_grad")
def lazy_reset(world: World) -> None:
    for trainer in (world.session, world.module):
        trainer.lazy_reset_grad()
        world.module(*world.batches[0])
        trainer.lazy_reset_grad()
        close(world.state.parameters["head.bias"].grad, world.gradients(0)["head.bias"])  # still there
        world.module(*world.batches[1])
        close(world.state.parameters["head.bias"].grad, world.gradients(1)["head.bias"])


@checks("OptimizerStep", "Ort::TrainingSession::OptimizerStep")
def optimizer_step(world: World) -> None:
    for _ in range(3):
        world.step()
    same_weights(world.state, world.weights(world.trained([RATE] * 3)))


@checks(*(f"{prefix}{verb}LearningRate" for prefix in ("", "Ort::TrainingSession::") for verb in ("Set", "Get")))
def rates_of_a_session(world: World) -> None:
    assert world.session.get_learning_rate() == pytest.approx(RATE)
    world.session.set_learning_rate(0.5)
    assert world.session.get_learning_rate() == 0.5
    world.step()
    same_weights(world.state, world.weights(world.trained([0.5])))


# Warm-up of 2 updates, 6 updates in total, rate 0.1.
LINEAR = [0.0, 0.05, 0.1, 0.075, 0.05, 0.025, 0.0, 0.0]


@checks("RegisterLinearLRScheduler", "Ort::TrainingSession::RegisterLinearLRScheduler")
@checks("SchedulerStep", "Ort::TrainingSession::SchedulerStep")
def registers_a_schedule(world: World) -> None:
    with pytest.raises(RuntimeError, match=r"no scheduler to step: call register_linear_lr_scheduler\(\) first"):
        world.session.scheduler_step()
    world.session.register_linear_lr_scheduler(2, 6, 0.1)
    rates = []
    for _ in LINEAR:
        rates.append(world.session.get_learning_rate())
        world.step()
        world.session.scheduler_step()
    close(rates, LINEAR)
    same_weights(world.state, world.weights(world.trained(LINEAR)))


# Inputs, outputs, buffers, inference, seeds.


@checks(*(f"TrainingSessionGet{m}Model{v}" for m in ("Training", "Eval") for v in ("InputCount", "InputName")))
@checks(*(f"TrainingSessionGet{m}Model{v}" for m in ("Training", "Eval") for v in ("OutputCount", "OutputName")))
@checks("Ort::TrainingSession::InputNames", "Ort::TrainingSession::OutputNames")
def names_of_a_session(world: World) -> None:
    for training in (True, False):
        assert world.session.input_names(training) == ["x", "label"]
        assert world.session.output_names(training) == ["loss", "logits"]


@checks("GetParametersSize", f"{PYTHON}Module.get_parameters_size")
def sizes(world: World) -> None:
    assert world.module.get_parameters_size(False) == 4 * 5 + 5 + 5 * 3 + 3
    assert world.module.get_parameters_size() == world.module.get_parameters_size(True) == 5 + 5 * 3 + 3
    assert [world.session.get_parameters_size(flag) for flag in (True, False)] == [5 + 5 * 3 + 3, 4 * 5 + 5 + 5 * 3 + 3]


@checks("CopyParametersToBuffer", "Ort::TrainingSession::ToBuffer")
def to_buffer(world: World) -> None:
    buffer = world.session.to_buffer(False)
    assert isinstance(buffer, onnxruntime.OrtValue)
    close(buffer.numpy(), flat(world.weights()))
    close(world.session.to_buffer(True).numpy(), flat(world.weights(), TRAINED))


@checks("CopyBufferToParameters", "Ort::TrainingSession::FromBuffer")
def from_buffer(world: World) -> None:
    for only_trainable, names in ((False, NAMES), (True, TRAINED)):
        values = {name: value + 1 for name, value in world.weights().items()}
        buffer = onnxruntime.OrtValue.ortvalue_from_numpy(flat(values, names))
        other = World(world.exported, world.folder)
        other.session.from_buffer(buffer)
        same_weights(other.state, {**world.weights(), **{name: values[name] for name in names}})
        close(other.session.to_buffer(only_trainable).numpy(), buffer.numpy())
    world.state = CheckpointState.load_checkpoint(world.exported.file("nominal_checkpoint"))
    with pytest.raises(RuntimeError, match="from_buffer"):
        world.session.train_step(list(world.batches[0]))
    world.session.from_buffer(flat(world.weights()))
    close(world.session.train_step(list(world.batches[0]))[0], world.outputs()[0])


def computes_logits(world: World) -> None:
    session = onnxruntime.InferenceSession(str(world.folder / "inference.onnx"), providers=["CPUExecutionProvider"])
    assert [i.name for i in session.get_inputs()] == ["x"]
    close(session.run(None, {"x": world.batches[0][0]})[0], world.outputs(world.trained([RATE]))[1])


@checks("ExportModelForInferencing", "Ort::TrainingSession::ExportModelForInferencing")
def exports_for_inference(world: World) -> None:
    world.step()
    world.session.export_model_for_inferencing(world.folder / "inference.onnx", ["logits"])
    computes_logits(world)


@checks("SetSeed")
def seeds(world: World) -> None:
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(random_numbers._Seed, "value", None)
    mask = RandomInput("mask", "mask", "uint8", (64,), (0.5, 0))
    random, drawn = world.state._state.random, []
    for seed in (7, 7, 8):
        set_seed(seed)
        drawn.append(random.draw([(mask, mask.shape)])[0])
        torch.manual_seed(seed)
        key = int(torch.randint(2**62, ()))  # the key of the trainer's masks
        np.testing.assert_array_equal(drawn[-1], masks.unpacked(masks.draw_mask(key, 64, 0, 0.5), 64))
    monkeypatch.undo()
    assert (drawn[0] == drawn[1]).all() and (drawn[1] != drawn[2]).any()


# The classes of the Python API.


@checks(f"{PYTHON}Module.__call__", f"{PYTHON}Module.training", f"{PYTHON}Module.train", f"{PYTHON}Module.eval")
def calls_a_module(world: World) -> None:
    module = world.module
    assert module.training is True
    close(module(*world.batches[0])[1], world.outputs()[1])
    assert module.eval() is module and module.training is False
    gradient = world.state.parameters["head.bias"].grad
    close(module(*world.batches[0])[0], world.outputs()[0])
    close(world.state.parameters["head.bias"].grad, gradient)
    assert module.train(False).training is False and module.train() is module and module.training is True
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(value) for value in world.batches[0]]
    loss, _ = module(*values)
    assert isinstance(loss, onnxruntime.OrtValue)
    close(world.state.parameters["head.bias"].grad, world.gradients(0, 0)["head.bias"])


@checks(f"{PYTHON}Module.get_contiguous_parameters", f"{PYTHON}Module.copy_buffer_to_parameters")
def buffers_of_a_module(world: World) -> None:
    close(world.module.get_contiguous_parameters().numpy(), flat(world.weights()))
    buffer = world.module.get_contiguous_parameters(trainable_only=True)
    close(buffer.numpy(), flat(world.weights(), TRAINED))
    world.module.copy_buffer_to_parameters(onnxruntime.OrtValue.ortvalue_from_numpy(buffer.numpy() * 2))
    same_weights(world.state, {n: v * (2 if n in TRAINED else 1) for n, v in world.weights().items()})
    with pytest.raises(ValueError, match=r"23 elements, but the parameters have 43"):
        world.module.copy_buffer_to_parameters(buffer, trainable_only=False)


@checks(f"{PYTHON}Module.export_model_for_inferencing")
def a_module_exports_for_inference(world: World) -> None:
    world.step()
    world.module.export_model_for_inferencing(world.folder / "inference.onnx", graph_output_names=["logits"])
    computes_logits(world)


@checks(f"{PYTHON}Module.input_names", f"{PYTHON}Module.output_names")
def names_of_a_module(world: World) -> None:
    for training in (True, False):
        world.module.train(training)
        assert world.module.input_names() == ["x", "label"] and world.module.output_names() == ["loss", "logits"]


@checks(*(f"{PYTHON}Optimizer{part}" for part in ("", "(optimizer_uri)", "(module)", ".step")))
def an_optimizer(world: World) -> None:
    optimizer = Optimizer(world.file("optimizer"), world.module)
    world.module(*world.batches[0])
    optimizer.step()
    same_weights(world.state, world.weights(world.trained([RATE])))
    assert Optimizer(optimizer_uri=world.bytes("optimizer"), module=world.module).get_learning_rate() > 0
    with pytest.raises(TypeError, match="module must be a Module"):
        Optimizer(world.file("optimizer"), world.state)


@checks(f"{PYTHON}Optimizer.set_learning_rate", f"{PYTHON}Optimizer.get_learning_rate")
def rates_of_an_optimizer(world: World) -> None:
    assert world.optimizer.get_learning_rate() == pytest.approx(RATE)
    world.optimizer.set_learning_rate(0.5)
    assert world.optimizer.get_learning_rate() == 0.5
    world.module(*world.batches[0])
    world.optimizer.step()
    same_weights(world.state, world.weights(world.trained([0.5])))


SCHEDULER = ("optimizer", "warmup_step_count", "total_step_count", "initial_lr")


@checks(f"{PYTHON}LinearLRScheduler", *(f"{PYTHON}LinearLRScheduler({name})" for name in SCHEDULER))
@checks(f"{PYTHON}LinearLRScheduler.step")
def a_linear_schedule(world: World) -> None:
    assert list(inspect.signature(LinearLRScheduler).parameters) == list(SCHEDULER)
    values: Any = dict(zip(SCHEDULER, (world.optimizer, 2, 6, 0.1), strict=True))
    scheduler = LinearLRScheduler(**values)
    assert repr(scheduler) == (
        "LinearLRScheduler(warmup_step_count=2, total_step_count=6, initial_lr=0.1, learning_rate=0.0)"
    )
    rates = []
    for _ in LINEAR:
        rates.append(world.optimizer.get_learning_rate())
        world.module(*world.batches[0])
        world.optimizer.step()
        world.module.lazy_reset_grad()
        scheduler.step()
    close(rates, LINEAR)
