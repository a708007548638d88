"""Checks each documented name about the state of training."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Mapping, MutableMapping

import numpy as np
import pytest
import torch

from ort_trainer.api import CheckpointState, Parameter, Parameters, Properties

from .exported import NAMES, RATE, TRAINED
from .world import PYTHON, World, checks, close, same_weights


@checks("LoadCheckpoint", "Ort::CheckpointState::LoadCheckpoint", f"{PYTHON}CheckpointState.load_checkpoint")
def loads(world: World) -> None:
    same_weights(CheckpointState.load_checkpoint(world.exported.file("checkpoint")), world.weights())
    nominal = CheckpointState.load_checkpoint(world.exported.file("nominal_checkpoint"))
    assert [p.shape for p in nominal.parameters.values()] == [v.shape for v in world.weights().values()]


@checks("LoadCheckpointFromBuffer")
def loads_bytes(world: World) -> None:
    data = world.exported.file("checkpoint").read_bytes()
    same_weights(CheckpointState.load_checkpoint_from_buffer(data), world.weights())


@checks("SaveCheckpoint", "Ort::CheckpointState::SaveCheckpoint", f"{PYTHON}CheckpointState.save_checkpoint")
def saves(world: World) -> None:
    world.step()
    for include, model in ((True, world.trained([RATE, RATE])), (False, None)):
        CheckpointState.save_checkpoint(world.state, world.folder / "saved", include_optimizer_state=include)
        again = World(world.exported, world.folder)
        again.state = CheckpointState.load_checkpoint(world.folder / "saved")
        same_weights(again.state, world.weights(world.trained([RATE])))
        again.step()
        if model is not None:  # its second update has the moments of the first
            same_weights(again.state, world.weights(model))
        else:
            bias = again.state.parameters["head.bias"].data
            assert abs(bias - world.weights(world.trained([RATE, RATE]))["head.bias"]).max() > 1e-5


@checks(f"{PYTHON}CheckpointState", "ReleaseCheckpointState")
def a_state_lives_as_long_as_it_is_used(world: World) -> None:
    with pytest.raises(TypeError, match="load_checkpoint"):
        CheckpointState(None)
    reference = weakref.ref(world.state._state)
    session = world.session
    del world.state
    close(session.eval_step(list(world.batches[0]))[0], world.outputs()[0])
    del world.session, session
    assert reference() is None


@checks("GetParameter", f"{PYTHON}checkpoint_state.Parameters.__getitem__", f"{PYTHON}checkpoint_state.Parameter")
def gets_a_parameter(world: World) -> None:
    parameter = world.state.parameters["head.bias"]
    assert isinstance(parameter, Parameter)
    close(parameter.data, world.weights()["head.bias"])
    with pytest.raises(KeyError, match="head.bia"):
        world.state.parameters["head.bia"]


@checks("UpdateParameter", f"{PYTHON}checkpoint_state.Parameters.__setitem__")
def updates_a_parameter(world: World) -> None:
    session = world.session
    world.state.parameters["head.bias"] = np.array([1, 2, 3], np.float32)
    model = copy.deepcopy(world.exported.model)
    with torch.no_grad():
        model.head.bias.copy_(torch.tensor([1.0, 2.0, 3.0]))
    close(session.eval_step(list(world.batches[0]))[1], world.outputs(model)[1])
    with pytest.raises(KeyError, match="unknown parameter 'bias'"):
        world.state.parameters["bias"] = np.zeros(3, np.float32)


@checks(f"{PYTHON}checkpoint_state.Parameter.data")
def data_of_a_parameter(world: World) -> None:
    parameter = world.state.parameters["head.bias"]
    parameter.data = parameter.data + 1
    close(parameter.data, world.weights()["head.bias"] + 1)
    with pytest.raises(ValueError, match="shape"):
        parameter.data = np.zeros(4, np.float32)


@checks(f"{PYTHON}checkpoint_state.Parameter.grad")
def gradient_of_a_parameter(world: World) -> None:
    module = world.module
    assert not np.any(world.state.parameters["head.bias"].grad)
    module(*world.batches[0])
    close(world.state.parameters["head.bias"].grad, world.gradients(0)["head.bias"])
    assert world.state.parameters["body.weight"].grad is None


@checks("AddProperty", f"{PYTHON}checkpoint_state.Properties.__setitem__")
def adds_properties(world: World) -> None:
    world.state.properties.update({"epoch": 3, "best": 0.5, "name": "run"})
    data = CheckpointState.save_checkpoint_to_buffer(world.state)
    assert dict(CheckpointState.load_checkpoint_from_buffer(data).properties) == {
        "epoch": 3,
        "best": 0.5,
        "name": "run",
    }


@checks("GetProperty", f"{PYTHON}checkpoint_state.Properties.__getitem__")
def gets_properties(world: World) -> None:
    world.state.properties["epoch"] = 3
    world.state.properties["epoch"] += 1
    assert world.state.properties["epoch"] == 4
    with pytest.raises(KeyError, match="unknown property 'step'"):
        world.state.properties["step"]


@checks("OrtPropertyType")
def types_of_properties(world: World) -> None:
    properties = world.state.properties
    properties.update({"int": np.int64(1), "float": np.float32(0.5), "str": "a", "bool": True})
    assert [type(value) for value in properties.values()] == [int, float, str, int]
    with pytest.raises(TypeError, match="int, a float or a str"):
        properties["list"] = [1]
    assert "list" not in properties


STATE = f"{PYTHON}checkpoint_state."
MAPPING = ("contains", "iter", "len", "repr")


@checks(f"{PYTHON}CheckpointState.parameters", f"{STATE}Parameters", "GetParameterTypeAndShape")
@checks(*(f"{STATE}Parameters.__{name}__" for name in MAPPING))
@checks(*(f"{STATE}Parameter.{name}" for name in ("name", "requires_grad", "__repr__")))
def parameters_are_a_mapping(world: World) -> None:
    parameters = world.state.parameters
    assert isinstance(parameters, Parameters) and isinstance(parameters, Mapping)
    assert tuple(parameters) == tuple(name for name, _ in parameters.items()) == NAMES and len(parameters) == len(NAMES)
    assert "head.bias" in parameters and "head" not in parameters
    assert [parameter.name for parameter in parameters.values()] == list(NAMES)
    assert [parameter.name for parameter in parameters.values() if parameter.requires_grad] == list(TRAINED)
    weight = parameters["head.weight"]
    assert weight.shape == (3, 5) and weight.dtype == np.float32
    shown = repr(parameters["head.bias"])
    assert "'head.bias'" in shown and "requires_grad=True" in shown and shown in repr(parameters)


@checks(f"{PYTHON}CheckpointState.properties", f"{STATE}Properties")
@checks(*(f"{STATE}Properties.__{name}__" for name in MAPPING))
def properties_are_a_mapping(world: World) -> None:
    properties = world.state.properties
    assert isinstance(properties, Properties) and isinstance(properties, MutableMapping)
    properties["epoch"] = 3
    assert "epoch" in properties and "step" not in properties and list(properties) == ["epoch"] and len(properties) == 1
    assert "'epoch': 3" in repr(properties)
    del properties["epoch"]
    assert properties == {}
