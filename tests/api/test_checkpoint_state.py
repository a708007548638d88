from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from ort_trainer.api import CheckpointState, Module, Parameter
from ort_trainer.core.errors import CheckpointError

from .artifacts import PARAMETERS, Artifacts
from .test_module import batches, load


@pytest.fixture
def state(artifacts: Artifacts) -> CheckpointState:
    return CheckpointState.load_checkpoint_from_buffer(artifacts.checkpoint)


def test_parameters_are_a_mapping(state: CheckpointState) -> None:
    parameters = state.parameters
    assert list(parameters) == list(parameters.keys()) == ["w", "b", "mean"]
    assert len(parameters) == 3
    assert "w" in parameters and "count" not in parameters and 3 not in parameters  # type: ignore[comparison-overlap]
    assert [(name, parameter.name) for name, parameter in parameters.items()] == [(n, n) for n in ("w", "b", "mean")]
    assert parameters["w"] is parameters["w"]
    assert parameters.get("nothing") is None
    assert dict(parameters)["w"].requires_grad and not parameters["mean"].requires_grad
    assert repr(parameters["b"]) == "Parameter(name='b', shape=[2], dtype=float32, requires_grad=True)"
    assert repr(parameters).startswith("Parameters([Parameter(name='w', shape=[3, 2]")
    assert isinstance(parameters["w"], Parameter)


def test_values_of_parameters(state: CheckpointState) -> None:
    parameter = state.parameters["w"]
    parameter.data[0, 0] = 99  # changes a copy
    assert np.array_equal(parameter.data, PARAMETERS["w"])
    new = np.full((3, 2), 7, np.float32)
    parameter.data = new
    new[0, 0] = 1
    assert np.array_equal(parameter.data, np.full((3, 2), 7))
    state.parameters["b"] = onnxruntime.OrtValue.ortvalue_from_numpy(np.ones(2, np.float32))
    assert np.array_equal(state.parameters["b"].data, [1, 1])


def test_parameters_change_as_in_a_dict(state: CheckpointState, artifacts: Artifacts) -> None:
    parameters = state.parameters
    for remove in (parameters.pop, parameters.__delitem__, lambda name: parameters.popitem()):
        with pytest.raises(TypeError, match="parameter 'w' can't be removed: the model needs it"):
            remove("w")
    with pytest.raises(TypeError, match="can't be removed"):
        parameters.clear()
    with pytest.raises(KeyError, match="unknown parameter 'v'"):
        del parameters["v"]
    assert parameters.pop("v", None) is None
    assert parameters.setdefault("w", None) is parameters["w"] and len(parameters) == 3
    new = {"w": np.full((3, 2), 7, np.float32), "b": np.ones(2)}  # the second has a wrong dtype
    with pytest.raises(TypeError, match="'b' has dtype float32"):
        parameters.update(new)
    with pytest.raises(KeyError, match="unknown parameter 'v'"):
        parameters.update(w=new["w"], v=new["b"])
    assert np.array_equal(parameters["w"].data, PARAMETERS["w"])
    parameters.update(new, b=np.ones(2, np.float32))
    assert parameters["w"].data.min() == 7 and parameters["b"].data.tolist() == [1, 1]
    other = CheckpointState.load_checkpoint_from_buffer(artifacts.checkpoint)
    other.parameters.update(parameters)
    assert other.parameters["w"].data.min() == 7
    other.parameters["w"] = state.parameters["w"] = np.zeros((3, 2), np.float32)
    other.parameters["b"] = CheckpointState.load_checkpoint_from_buffer(artifacts.checkpoint).parameters["b"]
    assert np.array_equal(other.parameters["b"].data, PARAMETERS["b"])


def test_a_new_value_is_what_the_next_step_uses(artifacts: Artifacts) -> None:
    state, module, _ = load(artifacts)
    ((x, target),) = batches(1)
    module(x, target)
    state.parameters["w"] = np.zeros((3, 2), np.float32)
    assert np.array_equal(module(x, target)[1], np.tile(PARAMETERS["b"], (4, 1)))


@pytest.mark.parametrize(
    ("name", "value", "error", "text"),
    [
        ("v", np.zeros((3, 2), np.float32), KeyError, r"unknown parameter 'v': known are \['w', 'b', 'mean'\]"),
        ("meann", np.zeros(2, np.float32), KeyError, r"unknown parameter 'meann': did you mean 'mean'\?"),
        ("w", [[1.0]], TypeError, r"parameter 'w' must be a numpy array or an OrtValue, but \[\[1.0\]\] was given"),
        ("w", np.zeros((3, 2)), TypeError, r"'w' has dtype float32, but an array of float64 .*astype\(numpy.float32\)"),
        ("w", np.zeros((2, 3), np.float32), ValueError, r"'w' has shape \[3, 2\], but an array of shape \[2, 3\]"),
    ],
)
def test_wrong_values(state: CheckpointState, name: str, value: object, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        state.parameters[name] = value
    assert np.array_equal(state.parameters["w"].data, PARAMETERS["w"])
    with pytest.raises(KeyError, match="unknown parameter 'nothing'"):
        state.parameters["nothing"]


def test_properties_are_a_mapping(state: CheckpointState, tmp_path: Path) -> None:
    properties = state.properties
    properties["epoch"] = 3
    properties.update(best=0.5, name="run", count=np.int64(2**40), rate=np.float32(0.25), done=True)
    assert dict(properties) == {"epoch": 3, "best": 0.5, "name": "run", "count": 2**40, "rate": 0.25, "done": 1}
    assert [type(value) for value in properties.values()] == [int, float, str, int, float, int]
    assert repr(properties) == f"Properties({dict(properties)})"
    del properties["name"]
    assert "name" not in properties and len(properties) == 5
    path = tmp_path / "checkpoint"
    CheckpointState.save_checkpoint(state, path)
    assert CheckpointState.load_checkpoint(path).properties == properties
    assert CheckpointState.load_checkpoint(str(path)).parameters.keys() == state.parameters.keys()


def test_wrong_properties(state: CheckpointState) -> None:
    with pytest.raises(TypeError, match=r"property 'list' must be an int, a float or a str, but \[1\] was given"):
        state.properties["list"] = [1]
    with pytest.raises(TypeError, match="the name of a property must be a str, but 3 was given"):
        state.properties[3] = 1
    with pytest.raises(ValueError, match="property 'large' is an int of more than 8192 bits: use a str"):
        state.properties["large"] = 10**5000  # makes a checkpoint unreadable
    state.properties["epochs"] = 1
    with pytest.raises(KeyError, match=r"unknown property 'epoch': did you mean 'epochs'\?"):
        state.properties["epoch"]
    with pytest.raises(KeyError, match="unknown property 'epoch'"):
        del state.properties["epoch"]
    with pytest.raises(TypeError, match=r"property 'b' must be an int, a float or a str, but \[1\] was given"):
        state.properties.update(a=1, b=[1])
    assert dict(state.properties) == {"epochs": 1}


def test_wrong_files(artifacts: Artifacts, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"CheckpointState.load_checkpoint\(path\); it can't be made from 'x'"):
        CheckpointState("x")
    with pytest.raises(FileNotFoundError, match="no checkpoint"):
        CheckpointState.load_checkpoint(tmp_path / "nothing")
    path = tmp_path / "checkpoint"
    path.write_bytes(artifacts.checkpoint[:-9])
    with pytest.raises(CheckpointError, match="damaged"):
        CheckpointState.load_checkpoint(path)
    for data in (b"", artifacts.training, artifacts.checkpoint[:40]):
        with pytest.raises(CheckpointError, match="the checkpoint given as bytes is (damaged|not an)"):
            CheckpointState.load_checkpoint_from_buffer(data)
    with pytest.raises(TypeError, match="must be given as bytes, but 'x' was given"):
        CheckpointState.load_checkpoint_from_buffer("x")
    with pytest.raises(TypeError, match="state must be a CheckpointState"):
        CheckpointState.save_checkpoint("x", path)
    state = CheckpointState.load_checkpoint_from_buffer(artifacts.checkpoint)
    with pytest.raises(TypeError, match="must be given as a path, but 3 was given"):
        CheckpointState.save_checkpoint(state, 3)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        CheckpointState.save_checkpoint(state, tmp_path / "nothing" / "checkpoint")


def test_a_nominal_checkpoint_needs_values(artifacts: Artifacts) -> None:
    state = CheckpointState.load_checkpoint_from_buffer(artifacts.nominal)
    assert state.parameters["w"].shape == (3, 2)
    again = CheckpointState.save_checkpoint_to_buffer(state)
    assert len(again) < len(artifacts.checkpoint)
    assert CheckpointState.load_checkpoint_from_buffer(again).parameters.keys() == state.parameters.keys()
    module = Module(artifacts.training, state, artifacts.evaluation)
    ((x, target),) = batches(1)
    message = r"nominal checkpoint, and no parameter has values yet: .* copy_buffer_to_parameters"
    for call in (
        lambda: module(x, target),
        lambda: module.eval()(x, target),
        lambda: state.parameters["w"].data,
        module.get_contiguous_parameters,
    ):
        with pytest.raises(RuntimeError, match=message):
            call()
    complete, other, _ = load(artifacts)
    module.train().copy_buffer_to_parameters(other.get_contiguous_parameters(trainable_only=True))
    with pytest.raises(RuntimeError, match=r"the parameters \['mean'\] do not have values yet"):
        module(x, target)
    with pytest.raises(RuntimeError, match="'mean'"):
        CheckpointState.save_checkpoint_to_buffer(state)
    state.parameters["mean"] = PARAMETERS["mean"]
    assert np.array_equal(module(x, target)[0], other(x, target)[0])
    for name in PARAMETERS:
        assert np.array_equal(state.parameters[name].data, complete.parameters[name].data)
