from __future__ import annotations

import dataclasses
import functools
import io
import json
from typing import Any

import numpy as np
import pytest

from ort_trainer.api.artifact_checks import check_described
from ort_trainer.core.errors import CheckpointError
from ort_trainer.core.indices import IndexRange
from ort_trainer.core.sealed import write
from ort_trainer.state.state import State
from ort_trainer.state.training_api import from_bytes, to_bytes
from ort_trainer.step.contract import (
    OptimizerModel,
    RandomInput,
    Slot,
    Step,
    TensorSpec,
    from_metadata,
    to_metadata,
)
from ort_trainer.step.program_graph import Constant, ProgramCall, ProgramGraph

from ..helpers import assert_same_state
from .artifacts import as_version_2

STEP = Step(
    kind="training",
    export="id",
    inputs=(TensorSpec("x", "float32", ("batch", 4)), TensorSpec("label", "int64", ("batch", 3))),
    outputs=(TensorSpec("loss", "float32", ()), TensorSpec("found", "int64", None)),
    loss="loss",
    state={"w": "w"},
    gradients={"w": "w_grad.accumulation.out"},
    sums={"w": "w_grad.accumulation.buffer"},
    buffer_updates={"mean": "mean.updated"},
    random=(RandomInput("mask", "mask", "uint8", ("dim('batch') * 4",), (0.5, 0)),),
    guards=("dim('batch') > 1",),
    fixed={"length": 3},
    index_ranges=(
        IndexRange("label", "dim('batch') + 1", True, -1, "index", steps=(("slice", (1, None, "dim('batch')", 1)),)),
    ),
)
FORMAT_2 = """{"format": 2, "kind": "training", "export": "id",
"inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 4]},
{"name": "label", "dtype": "int64", "shape": ["batch", 3]}],
"outputs": [{"name": "loss", "dtype": "float32", "shape": []}, {"name": "found", "dtype": "int64", "shape": null}],
"loss": "loss", "state": {"w": "w"}, "gradients": {"w": ["w_grad.accumulation.buffer", "w_grad.accumulation.out"]},
"buffer_updates": {"mean": "mean.updated"}, "reset": "lazy_reset_grad",
"random": [{"name": "mask", "kind": "mask", "dtype": "uint8", "shape": ["dim('batch') * 4"], "parameters": [0.5, 0]}],
"guards": ["dim('batch') > 1"], "fixed": {"length": 3},
"index_ranges": [{"input": "label", "size": "dim('batch') + 1", "from_end": true, "ignored": -1, "operator": "index",
"source": "", "outputs": [], "steps": [["slice", [1, null, "dim('batch')", 1]]]}]}""".replace("\n", " ")
OPTIMIZER = OptimizerModel(
    "id",
    "AdamOptimizer",
    {"w": ("w", "w.updated")},
    {"w": "w_grad"},
    {"w.Moment_1": Slot("w.Moment_1", "w.Moment_1.updated", "float32", (4,), 0.0)},
)


@pytest.mark.parametrize("model", [STEP, OPTIMIZER], ids=["training", "optimizer"])
def test_models_come_back_from_metadata(model: Any) -> None:
    assert from_metadata(type(model), to_metadata(model), "model") == model


def test_the_metadata_of_format_2_stay_as_they_are() -> None:
    assert to_metadata(STEP) == FORMAT_2
    assert from_metadata(Step, FORMAT_2, "model") == STEP


@pytest.mark.parametrize("programs", [False, True])
def test_a_step_as_bytes(programs: bool) -> None:
    """A step of an exporter, with what artifacts never have."""
    constants = {"c": Constant("bool", (3,), b"\1\0\1"), "d": Constant("int64", (0, 2), b"")}
    graph = ProgramGraph({"0": "text"}, (ProgramCall("node", "0", ("x", "c"), ("y",)),), constants)
    step = dataclasses.replace(
        STEP,
        sums={},
        random=(RandomInput("noise", "normal", "bfloat16", (2, 3), order=(1, 0)),),
        loss_scale=TensorSpec("scale", "float32", ()),
        programs=graph if programs else None,
        origins="{}",
        stored=b"" if programs else b"model",
    )
    assert Step.from_bytes(step.to_bytes()) == step


def test_metadata_of_something_else() -> None:
    with pytest.raises(ValueError, match=r"'a.onnx' is not an ort_trainer artifact"):
        from_metadata(Step, None, "'a.onnx'")
    with pytest.raises(ValueError, match=r"expected the training or evaluation model .* 'a.onnx' is the optimizer"):
        from_metadata(Step, to_metadata(OPTIMIZER), "'a.onnx'")
    with pytest.raises(ValueError, match=r"damaged"):
        from_metadata(Step, to_metadata(STEP).replace('"outputs"', '"outs"'), "'a.onnx'")
    with pytest.raises(ValueError, match=r"format 7"):
        from_metadata(Step, to_metadata(STEP).replace('"format": 2', '"format": 7'), "'a.onnx'")


def test_metadata_of_before_there_were_index_ranges() -> None:
    found = json.loads(to_metadata(STEP))
    assert found.pop("index_ranges") and found.pop("format") == 2
    assert from_metadata(Step, json.dumps({"format": 1, **found}), "model") == dataclasses.replace(
        STEP, index_ranges=()
    )


NESTED: list[Any] = []


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"input": "x"}, "input"),  # has a float dtype
        ({"input": "y"}, "input"),
        ({"input": ["label"]}, "invalid value"),
        ({"size": 1.5}, "size"),
        ({"size": "dim('length')"}, "size"),
        ({"size": "dim("}, "not arithmetic"),
        ({"from_end": 1}, "from_end"),
        ({"ignored": "-1"}, "ignored"),
        ({"operator": None}, "invalid value"),
        ({"steps": [["system", []]]}, "steps"),
        ({"steps": [["slice"]]}, "steps"),
        ({"steps": [["transpose", []]]}, "step 'transpose': missing"),
        ({"steps": [["t", [1]]]}, "too many positional"),
        ({"steps": [["slice", [1.5]]]}, "steps"),
        ({"steps": [["slice", ["dim('length')"]]]}, "steps"),
        ({"steps": [["slice", functools.reduce(lambda inner, _: [inner], range(700), NESTED)]]}, "recursion"),
        ({"steps": 3}, "invalid value"),
        ({"place": 3}, "unexpected keyword"),
    ],
)
def test_index_ranges_that_are_none(changes: dict, what: str) -> None:
    found = json.loads(to_metadata(STEP))
    found["index_ranges"][0].update(changes)
    with pytest.raises(
        ValueError, match=f"'a.onnx' is damaged: its metadata don't describe the training model .*{what}"
    ):
        check_described(from_metadata(Step, json.dumps(found), "'a.onnx'"), "'a.onnx'")
    check_described(STEP, "'a.onnx'")


def checkpoint() -> State:
    return State(
        parameters={"z": np.ones((2, 3), np.float32), "a": np.zeros(4, np.float64)},
        trainable=["z"],
        buffers={"count": np.array(3)},
        optimizer={"z.Moment_1": np.full((2, 3), 2, np.float32)},
        optimization_step=7,
        learning_rates=[0.1, 0.2],
        schedule={"kind": "linear", "total_steps": 5, "warmup_steps": 1.5},
        gradients={"z": np.full((2, 3), 3, np.float32)},
        random=np.arange(625, dtype=np.uint32),
        properties={"epoch": 3, "best": 0.5, "name": "x"},
        export="id",
    )


def same(a: State, b: State) -> None:
    assert_same_state(vars(a), vars(b))
    assert list(a.parameters) == list(b.parameters)


def test_checkpoint_round_trip() -> None:
    same(checkpoint(), from_bytes(to_bytes(checkpoint())))


def test_checkpoint_of_before_there_was_a_count_of_steps() -> None:
    """Old versions are readable; for a newer version, the error says to update instead of reporting damage."""
    same(checkpoint(), from_bytes(as_version_2(to_bytes(checkpoint()))))


def test_without_optimizer_all_that_is_under_way_goes() -> None:
    found = dataclasses.replace(checkpoint(), micro_batches=2).without_optimizer()
    same(found, dataclasses.replace(checkpoint(), optimizer=None, optimization_step=0, gradients={}, micro_batches=0))


def test_no_optimizer_is_not_an_empty_one() -> None:
    without = dataclasses.replace(checkpoint(), optimizer=None)
    assert from_bytes(to_bytes(without)).optimizer is None
    assert from_bytes(to_bytes(dataclasses.replace(without, optimizer={}))).optimizer == {}


def test_nominal_checkpoint_has_shapes_only() -> None:
    nominal = dataclasses.replace(checkpoint(), nominal=True)
    found = from_bytes(to_bytes(nominal))
    assert len(to_bytes(nominal)) < len(to_bytes(checkpoint()))
    assert found.nominal
    assert {name: (value.shape, value.dtype) for name, value in found.parameters.items()} == {
        "z": ((2, 3), np.dtype(np.float32)),
        "a": ((4,), np.dtype(np.float64)),
    }


@pytest.mark.parametrize("cut", [0, 4, 8, 100, -1])
def test_damaged_checkpoint(cut: int) -> None:
    with pytest.raises(CheckpointError, match=r"the given bytes is damaged or not a checkpoint: it has \d+ bytes"):
        from_bytes(to_bytes(checkpoint())[:cut])


def test_the_checkpoint_of_a_trainer_is_told_from_a_damaged_one() -> None:
    file = io.BytesIO()
    write(file, {}, {"manifest": "{}"})
    with pytest.raises(CheckpointError, match="is not an ort_trainer.api checkpoint. .* --to api --like CHECKPOINT'"):
        from_bytes(file.getvalue())
