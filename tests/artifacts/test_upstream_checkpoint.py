"""Checkpoints of onnxruntime-training's training API: read, written, converted, and never trusted."""

from __future__ import annotations

import copy
import dataclasses
import math
import signal
import warnings
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import pytest
import torch

from ort_trainer import CheckpointError, ORTTrainer, optim
from ort_trainer.artifacts import convert_checkpoint, trainer_state_dict
from ort_trainer.state.state import State
from ort_trainer.state.training_api import read_checkpoint, write_checkpoint
from ort_trainer.upstream import (
    OptimizerGroup,
    UpstreamCheckpoint,
    UpstreamParameter,
    read_upstream_checkpoint,
    upstream_checkpoint_bytes,
    write_upstream_checkpoint,
)

from ..helpers import assert_close, assert_same_state, mlp_batches
from .upstream_runs import Upstream, make_trainer, write

Array = np.ndarray[Any, Any]


def array(*shape: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


def sample() -> UpstreamCheckpoint:
    moments = {"w": {"momentum0": array(3, 2), "momentum1": array(3, 2) ** 2}}
    return UpstreamCheckpoint(
        {
            "w": UpstreamParameter(array(3, 2)),
            "scalar": UpstreamParameter(np.float32(2.5).reshape(()), requires_grad=False),
            "empty": UpstreamParameter(np.zeros((0, 4), np.float64), requires_grad=False),
            "count": UpstreamParameter(np.arange(3), requires_grad=False),
            "mask": UpstreamParameter(np.array([True, False]), requires_grad=False),
            "transposed": UpstreamParameter(array(3, 5).T, requires_grad=False),
        },
        {"epoch": -(1 << 40), "loss": 0.25, "näme": "größe", "none": ""},
        {"group0": OptimizerGroup(7, 0.125, moments)},
    )


def assert_equal(found: UpstreamCheckpoint, expected: UpstreamCheckpoint) -> None:
    assert_same_state(dataclasses.asdict(found), dataclasses.asdict(expected))
    assert list(map(type, found.properties.values())) == list(map(type, expected.properties.values()))


def assert_same_array(found: Array, expected: Array) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("limit", [1 << 30, 0], ids=["one file", "two files"])
def test_what_was_written_is_read(limit: int, tmp_path: Path) -> None:
    expected = sample()
    write_upstream_checkpoint(tmp_path / "checkpoint", expected, limit=limit)
    assert (tmp_path / "checkpoint.data").exists() == (limit == 0)
    found = read_upstream_checkpoint(str(tmp_path / "checkpoint"))
    assert_equal(found, expected)
    found.parameters["w"].data[0, 0] = 1.0  # its own memory
    if limit:
        assert_equal(read_upstream_checkpoint(upstream_checkpoint_bytes(expected)), expected)


@pytest.mark.needs_training_engine
@pytest.mark.parametrize("config", [optim.AdamWConfig(lr=0.01), optim.SGDConfig(lr=0.01)], ids=["adamw", "sgd"])
def test_both_read_what_the_other_writes(config: Any, tmp_path: Path) -> None:
    """Training continues from our file, in one part or two, exactly as from upstream's own."""
    batches = mlp_batches(8)
    write(make_trainer(config), tmp_path, batches[0])
    upstream = Upstream(tmp_path, lr=0.01)
    for batch in batches[:4]:
        upstream.train(batch)
    upstream.state.properties["epoch"], upstream.state.properties["loss"] = 3, 0.5
    upstream.state.properties["name"] = "größe"
    upstream.save(tmp_path / "theirs")
    found = read_upstream_checkpoint(tmp_path / "theirs")
    assert found.properties == {"epoch": 3, "loss": 0.5, "name": "größe"}
    assert found.groups["group0"].step == 4
    for name, value in upstream.parameters().items():
        assert_same_array(found.parameters[name].data, value)
    write_upstream_checkpoint(tmp_path / "ours", found)
    write_upstream_checkpoint(tmp_path / "large", found, limit=0)
    upstream.save(tmp_path / "forgotten", include_optimizer_state=False)
    losses = []
    for name in ("theirs", "ours", "large", "forgotten"):
        run = Upstream(tmp_path, name, lr=0.01)
        assert {key: run.state.properties[key] for key in ("epoch", "loss", "name")} == found.properties
        losses.append([float(run.train(batch)[0]) for batch in batches[4:]])
    assert losses[0] == losses[1] == losses[2]
    assert (losses[0] == losses[3]) == isinstance(config, optim.SGDConfig), "moments count"


@pytest.mark.needs_training_engine
def test_a_nominal_file_of_theirs(tmp_path: Path) -> None:
    from onnx import numpy_helper
    from onnxruntime.capi import _pybind_state

    tensors = [numpy_helper.from_array(array(2, 3), name).SerializeToString() for name in ("a", "b")]
    _pybind_state.save_checkpoint(tensors[:1], tensors[1:], str(tmp_path / "nominal"), True)
    found = read_upstream_checkpoint(tmp_path / "nominal")
    assert found.nominal
    assert [(name, p.requires_grad, p.data.size) for name, p in found.parameters.items()] == [
        ("a", True, 0),
        ("b", False, 0),
    ]
    write_upstream_checkpoint(tmp_path / "ours", found)
    assert_equal(read_upstream_checkpoint(tmp_path / "ours"), found)
    with pytest.raises(ValueError, match="a nominal checkpoint, which has no parameter values"):
        trainer_state_dict(tmp_path / "nominal")


def test_a_damaged_file_is_an_error_of_ours() -> None:
    """A file truncated anywhere, or with any byte changed, is either read or refused."""
    whole = upstream_checkpoint_bytes(sample())
    refused = 0
    for end in range(len(whole) - 3):  # only trailing zeros may be missing
        with pytest.raises(CheckpointError, match=r"is damaged|not a checkpoint of onnxruntime-training"):
            read_upstream_checkpoint(whole[:end])
    for position in range(len(whole)):
        for value in (0, 0x7F, 0xFF):
            changed = bytearray(whole)
            changed[position] = value
            try:
                read_upstream_checkpoint(bytes(changed))
            except CheckpointError:
                refused += 1
    assert refused > 500


def test_texts_that_share_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A builder may write a name only once, but a small file can't fill the memory with strings."""
    create = flatbuffers.Builder.CreateString
    shared: dict[str, int] = {}

    def create_once(builder: flatbuffers.Builder, text: str) -> int:
        if text not in shared:
            shared[text] = create(builder, text)
        return shared[text]

    monkeypatch.setattr(flatbuffers.Builder, "CreateString", create_once)
    assert_equal(read_upstream_checkpoint(upstream_checkpoint_bytes(sample())), sample())
    shared.clear()
    hostile = upstream_checkpoint_bytes(UpstreamCheckpoint(properties={f"p{i}": "x" * 10_000 for i in range(100)}))
    assert len(hostile) < 20_000
    with pytest.raises(CheckpointError, match="is damaged: its strings overlap"):
        read_upstream_checkpoint(hostile)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        read_upstream_checkpoint(tmp_path / "nothing")
    with pytest.raises(TypeError, match="source must be a path or bytes, but got int"):
        read_upstream_checkpoint(3)
    with pytest.raises(CheckpointError, match="the mark 'ODTC' is missing"):
        read_upstream_checkpoint(b"something else entirely")
    write_upstream_checkpoint(tmp_path / "large", sample(), limit=0)
    with pytest.raises(CheckpointError, match="so it can't be read from bytes"):
        read_upstream_checkpoint((tmp_path / "large").read_bytes())
    data = (tmp_path / "large.data").read_bytes()
    (tmp_path / "large.data").write_bytes(data[:-1])
    with pytest.raises(CheckpointError, match="is damaged: 'w' of shape|is damaged: 'transposed' of shape"):
        read_upstream_checkpoint(tmp_path / "large")
    (tmp_path / "large.data").unlink()
    with pytest.raises(CheckpointError, match=r"'.*large.data', which is missing: copy both files"):
        read_upstream_checkpoint(tmp_path / "large")


@pytest.mark.parametrize(
    ("properties", "error", "match"),
    [
        ({"a": True}, TypeError, "property 'a' must be an int, a float or a str, but True"),
        ({"a": 1 << 63}, ValueError, "property 'a' must be an int of 64 bits"),
        ({"a": -1e300}, ValueError, r"property 'a' is -1e\+300, .* floats of 32 bits, up to 3.403e\+38: make it a str"),
        ({3: 1}, TypeError, "names in a checkpoint must be str, but 3"),
    ],
)
def test_properties_that_can_not_be_written(properties: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        upstream_checkpoint_bytes(UpstreamCheckpoint(properties=properties))


def test_floats_that_are_none_are_properties_too() -> None:
    values = {"a": math.inf, "b": -math.inf, "c": float(np.finfo(np.float32).max)}
    assert (
        read_upstream_checkpoint(upstream_checkpoint_bytes(UpstreamCheckpoint(properties=values))).properties == values
    )


@pytest.mark.parametrize(
    ("wrong", "error", "match"),
    [
        (UpstreamCheckpoint({"a": UpstreamParameter(np.zeros(2, np.complex64))}), TypeError, "'a' has dtype complex64"),
        (
            UpstreamCheckpoint({"a": UpstreamParameter(np.zeros(2, np.float16))}),
            TypeError,
            "float16, which .* can't load",
        ),
        (UpstreamCheckpoint({"a": UpstreamParameter([1.0])}), TypeError, r"'a' must be a NumPy array, but \[1.0\]"),
        (UpstreamCheckpoint(groups={"group0": OptimizerGroup(-1)}), ValueError, "group 'group0' has step -1"),
        (UpstreamCheckpoint(groups={"group0": OptimizerGroup(1, math.nan)}), ValueError, "and initial_lr nan"),
        (State({}, []), TypeError, "must be an UpstreamCheckpoint, but a State"),
    ],
    ids=["complex", "half", "list", "step", "rate", "ours"],
)
def test_what_can_not_be_written(wrong: Any, error: type[Exception], match: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=match):
        write_upstream_checkpoint(tmp_path / "checkpoint", wrong)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", range(1, 5))
def test_an_interrupt_finds_both_files_old_or_both_new(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupts writing a checkpoint of two files at each point where a file or a folder is synced."""
    old, new = (UpstreamCheckpoint({"w": UpstreamParameter(array(3, 2) + i)}, {"epoch": i}) for i in range(2))
    path = tmp_path / "checkpoint"
    write_upstream_checkpoint(path, old, limit=0)
    calls = 0

    def sync(_: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            signal.raise_signal(signal.SIGINT)

    for name in ("sync", "sync_folder"):
        monkeypatch.setattr(f"ort_trainer.core.atomic.{name}", sync)
    with pytest.raises(KeyboardInterrupt):
        write_upstream_checkpoint(path, new, limit=0)
    found = read_upstream_checkpoint(path)
    assert_equal(found, new if found.properties["epoch"] else old)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["checkpoint", "checkpoint.data"]


def ours(**arguments: Any) -> State:
    """Returns the checkpoint of an export with Adam whose parameters share a count."""
    weights = {"b": array(2), "a": array(3, 2), "running": array(4)}
    optimizer = {f"{n}.{m}": abs(weights[n]) + i for n in ("b", "a") for i, m in enumerate(("Moment_1", "Moment_2"))}
    fields: dict[str, Any] = {
        "export": "some export",
        "parameters": weights,
        "trainable": ["b", "a"],
        "buffers": {"steps": np.array(4)},
        "learning_rates": [0.125],
        "optimizer": {**optimizer, "Update_Count": np.array([5], np.int64)},
        "optimization_step": 4,
        "properties": {"epoch": 2, "name": "x"},
    }
    return State(**{**fields, **arguments})


def assert_same_checkpoint(found: State, expected: State) -> None:
    assert_same_state(vars(found), vars(expected))
    assert list(found.parameters) == list(expected.parameters)


def test_there_and_back(tmp_path: Path) -> None:
    expected = ours()
    write_checkpoint(tmp_path / "ours", expected)
    convert_checkpoint(tmp_path / "ours", tmp_path / "theirs")
    theirs = read_upstream_checkpoint(tmp_path / "theirs")
    assert {name for name, parameter in theirs.parameters.items() if parameter.requires_grad} == {"a", "b"}
    assert (theirs.groups["group0"].step, theirs.groups["group0"].initial_lr) == (4, 0.125)
    convert_checkpoint(tmp_path / "theirs", tmp_path / "again", like=tmp_path / "ours")
    assert_same_checkpoint(read_checkpoint(tmp_path / "again"), expected)
    convert_checkpoint(tmp_path / "theirs", tmp_path / "free")
    free = read_checkpoint(tmp_path / "free")
    assert free.export == "" and set(free.trainable) == {"a", "b"} and free.optimizer is not None
    assert free.optimizer.keys() == (expected.optimizer or {}).keys()
    convert_checkpoint(tmp_path / "ours", tmp_path / "weights", include_optimizer_state=False)
    assert not read_upstream_checkpoint(tmp_path / "weights").groups
    convert_checkpoint(tmp_path / "theirs", tmp_path / "weights", include_optimizer_state=False)
    assert read_checkpoint(tmp_path / "weights").optimizer is None


def test_buffers_that_their_runtime_can_not_load_come_from_like(tmp_path: Path) -> None:
    expected = ours(parameters={**ours().parameters, "half": np.arange(3, dtype=np.float16)})
    write_checkpoint(tmp_path / "ours", expected)
    with pytest.warns(UserWarning, match="can't store 'half' of dtype float16"):
        convert_checkpoint(tmp_path / "ours", tmp_path / "theirs")
    assert "half" not in read_upstream_checkpoint(tmp_path / "theirs").parameters
    convert_checkpoint(tmp_path / "theirs", tmp_path / "again", like=tmp_path / "ours")
    assert_same_checkpoint(read_checkpoint(tmp_path / "again"), expected)
    assert (tmp_path / "again").read_bytes() == (tmp_path / "ours").read_bytes()


MOMENTS = {"momentum0": array(2), "momentum1": array(2)}


@pytest.mark.parametrize(
    ("groups", "match"),
    [
        ({"group0": OptimizerGroup(1), "group1": OptimizerGroup(2)}, r"the unknown optimizer groups \['group1'\]"),
        ({"group0": OptimizerGroup(1, moments={"a": {"velocity": array(2)}})}, r"the moments \[\('velocity',\)\]"),
        ({"group0": OptimizerGroup(1, moments={"a": MOMENTS, "b": {"momentum0": array(2)}})}, "convert it without opt"),
        ({"group0": OptimizerGroup(1, moments={"c": MOMENTS})}, "moments of 'c', but no parameter"),
        (
            {"group0": OptimizerGroup(1, moments={"m": MOMENTS})},
            "moments of 'm', but no parameter of that name and shape",
        ),
    ],
    ids=["groups", "names", "kinds", "parameter", "shape"],
)
def test_moments_that_are_of_no_optimizer(groups: Any, match: str, tmp_path: Path) -> None:
    parameters = {name: UpstreamParameter(array(*shape)) for name, shape in (("a", (2,)), ("b", (2,)), ("m", (3, 2)))}
    write_upstream_checkpoint(tmp_path / "theirs", UpstreamCheckpoint(parameters, groups=groups))
    with pytest.raises(CheckpointError, match=match):
        convert_checkpoint(tmp_path / "theirs", tmp_path / "new")
    with pytest.raises(CheckpointError, match=match):
        trainer_state_dict(tmp_path / "theirs")
    assert not (tmp_path / "new").exists()
    convert_checkpoint(tmp_path / "theirs", tmp_path / "new", include_optimizer_state=False)
    assert read_checkpoint(tmp_path / "new").parameters.keys() == parameters.keys()


def test_nominal_there_and_back(tmp_path: Path) -> None:
    expected = ours(
        nominal=True, optimizer=None, parameters={n: np.zeros_like(v) for n, v in ours().parameters.items()}
    )
    write_checkpoint(tmp_path / "ours", expected)
    convert_checkpoint(tmp_path / "ours", tmp_path / "theirs")
    assert read_upstream_checkpoint(tmp_path / "theirs").nominal
    convert_checkpoint(tmp_path / "theirs", tmp_path / "again", like=tmp_path / "ours")
    found = read_checkpoint(tmp_path / "again")
    assert found.nominal and found.trainable == expected.trainable
    assert {n: v.shape for n, v in found.parameters.items()} == {n: v.shape for n, v in expected.parameters.items()}


def test_what_has_no_place_there_is_said(tmp_path: Path) -> None:
    write_checkpoint(
        tmp_path / "ours",
        ours(
            schedule={"kind": "constant", "warmup_steps": 0, "total_steps": 5},
            gradients={"a": array(3, 2)},
            random=np.zeros(625, np.uint32),
            learning_rates=[0.5, 0.125],
        ),
    )
    match = (
        r"can't store learning rates of groups \[0.5\], the learning-rate schedule, gradients since .*, the state of"
    )
    with pytest.warns(UserWarning, match=match):
        convert_checkpoint(tmp_path / "ours", tmp_path / "theirs")
    with pytest.warns(UserWarning, match=r"gradients since the last reset in '.*ours' are ignored"):
        trainer_state_dict(tmp_path / "ours")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"optimizer": {"a.Momentum": array(3, 2)}}, "state has 'a.Momentum', but onnxruntime-training"),
        ({"optimizer": {"a.Moment_1": array(3, 2)}}, "state has 'a.Moment_1', but onnxruntime-training"),
        ({"optimizer": {**(ours().optimizer or {}), "Step": np.array([3])}}, "state has 'Step'"),
        ({"optimizer": {**(ours().optimizer or {}), "a.Update_Count": np.array([2])}}, r"\(\[2, 5\], plus 1\)"),
    ],
)
def test_optimizers_that_upstream_does_not_have(changes: Any, match: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "ours", ours(**changes))
    with pytest.raises(ValueError, match=match):
        convert_checkpoint(tmp_path / "ours", tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


def test_what_does_not_fit(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "ours", ours())
    convert_checkpoint(tmp_path / "ours", tmp_path / "theirs")
    other = copy.deepcopy(ours().parameters)
    write_checkpoint(tmp_path / "more", ours(parameters={**other, "c": array(2)}))
    write_checkpoint(tmp_path / "other", ours(parameters={**other, "a": array(2, 3)}))
    write_checkpoint(tmp_path / "sgd", ours(optimizer={}))
    for name, match in (
        ("more", r"among its parameters and buffers, \['c'\] are missing and \[\] are unknown"),
        ("other", r"'a' has shape \[3, 2\] and dtype float32 .* \[2, 3\] and float32"),
        ("sgd", r"among its optimizer state, \[\] are missing and \['a.Moment_1'"),
    ):
        with pytest.raises(ValueError, match=match):
            convert_checkpoint(tmp_path / "theirs", tmp_path / "new", like=tmp_path / name)
    with pytest.raises(ValueError, match="'like' is only for checkpoints of onnxruntime-training"):
        convert_checkpoint(tmp_path / "ours", tmp_path / "new", like=tmp_path / "ours")
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        convert_checkpoint(tmp_path / "nothing", tmp_path / "new")
    with pytest.raises(TypeError, match="source must be a path, but 3"):
        convert_checkpoint(3, tmp_path / "new")
    with pytest.raises(TypeError, match="target must be a path, but 3"):
        convert_checkpoint(tmp_path / "ours", 3)
    with pytest.raises(TypeError, match="path must be a str or a path, but 3"):
        write_upstream_checkpoint(3, sample())
    with pytest.raises(TypeError, match="include_optimizer_state must be a bool, but 'no'"):
        convert_checkpoint(tmp_path / "ours", tmp_path / "new", include_optimizer_state="no")
    assert not (tmp_path / "new").exists()


@pytest.mark.needs_training_engine
def test_a_trainer_goes_on_where_upstream_stopped(tmp_path: Path) -> None:
    """It restores weights, moments and counts: the trainer takes the steps that upstream's runtime would take."""
    batches = mlp_batches(12)
    write(make_trainer(optim.AdamWConfig(lr=0.01)), tmp_path, batches[0])
    upstream = Upstream(tmp_path, lr=0.01)
    for batch in batches[:6]:
        upstream.train(batch)
    upstream.save(tmp_path / "trained")
    trainer = make_trainer(optim.AdamWConfig(lr=0.01))
    with pytest.raises(CheckpointError, match=r"training API .*trainer_state_dict\(path\) to load_state_dict"):
        trainer.load_checkpoint(tmp_path / "trained")
    trainer.load_state_dict(trainer_state_dict(tmp_path / "trained"), strict=False)
    for number, batch in enumerate(batches[6:]):
        (loss, _), (other, _) = trainer.train_step(*batch), upstream.train(batch)
        assert_close(loss, torch.from_numpy(other), 1e-5, f"loss of step {number}")
    assert trainer.train_step_info.optimization_step == 12
    for name, value in trainer.state_dict(pytorch_format=True).items():
        assert_close(value, torch.from_numpy(upstream.parameters()[name]), 1e-5, name)


@pytest.mark.needs_training_engine
def test_a_window_of_micro_batches_begins_where_upstream_stopped(tmp_path: Path) -> None:
    """The file counts updates, not micro-batches, so the trainer always starts a new window."""

    def trainer() -> ORTTrainer:
        return make_trainer(optim.AdamWConfig(lr=0.01), batch={"gradient_accumulation_steps": 2})

    batches = mlp_batches(10)
    write(trainer(), tmp_path, batches[0])
    upstream = Upstream(tmp_path, lr=0.01)
    for number, batch in enumerate(batches[:6]):
        upstream.train(batch, update=number % 2 == 1)
    upstream.save(tmp_path / "trained")
    again = trainer()
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        again.load_state_dict(trainer_state_dict(tmp_path / "trained"), strict=False)
    assert [str(warning.message) for warning in given] == ["Missing key: random in state_dict"]
    assert (again.train_step_info.step, again.train_step_info.optimization_step) == (3, 3)
    for number, batch in enumerate(batches[6:]):
        (loss, _), (other, _) = again.train_step(*batch), upstream.train(batch, update=number % 2 == 1)
        assert_close(loss, torch.from_numpy(other), 1e-5, f"loss of step {number}")


def test_our_checkpoints_say_what_theirs_is(tmp_path: Path) -> None:
    write_upstream_checkpoint(tmp_path / "theirs", sample())
    with pytest.raises(CheckpointError, match=r"training API .*convert_checkpoint\(source, target, like=...\)"):
        read_checkpoint(tmp_path / "theirs")


def test_what_does_not_fit_into_a_flatbuffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moments can't go into a second file."""
    monkeypatch.setattr("ort_trainer.upstream.write_checkpoint._LARGEST", 40)
    with pytest.raises(ValueError, match="leave out the optimizer's state"):
        write_upstream_checkpoint(tmp_path / "checkpoint", sample(), limit=40)
    with pytest.raises(FileNotFoundError, match="the folder .* does not exist"):
        write_upstream_checkpoint(tmp_path / "none" / "checkpoint", UpstreamCheckpoint())
    assert not list(tmp_path.iterdir())


class Twice(dict[str, Any]):
    """Yields every entry twice."""

    def items(self) -> Any:
        return [*super().items()] * 2


def test_files_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = upstream_checkpoint_bytes(UpstreamCheckpoint(properties=Twice(epoch=1)))
    with pytest.raises(CheckpointError, match="is damaged: it has 'epoch' twice"):
        read_upstream_checkpoint(whole)
    writer = "ort_trainer.upstream.write_checkpoint"
    monkeypatch.setattr(f"{writer}._check", lambda _: None)
    whole = upstream_checkpoint_bytes(UpstreamCheckpoint(groups={"group0": OptimizerGroup(-1)}))
    with pytest.raises(CheckpointError, match=r"invalid step -1 or learning rate 0.001"):
        read_upstream_checkpoint(whole)
    half = np.arange(3, dtype=np.float16)
    whole = upstream_checkpoint_bytes(UpstreamCheckpoint({"a": UpstreamParameter(half)}))
    assert_same_array(read_upstream_checkpoint(whole).parameters["a"].data, half)
    monkeypatch.setattr(f"{writer}.DTYPES", {16: np.dtype(np.float32)})
    whole = upstream_checkpoint_bytes(UpstreamCheckpoint({"a": UpstreamParameter(array(2))}))
    with pytest.raises(CheckpointError, match="'a' has ONNX element type 16, which NumPy does not support"):
        read_upstream_checkpoint(whole)
    monkeypatch.setattr(f"{writer}.VERSION", 3)
    with pytest.raises(CheckpointError, match="in version 3 of the format; supported is version 2"):
        read_upstream_checkpoint(upstream_checkpoint_bytes(UpstreamCheckpoint()))
