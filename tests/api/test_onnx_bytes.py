"""Inference models made without ``onnx``, checked by ``onnx`` and ONNX Runtime."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from ort_trainer.api import CheckpointState, Module, TrainingSession, onnx_bytes
from ort_trainer.api.onnx_bytes import inference_model
from ort_trainer.state.training_api import read_checkpoint
from ort_trainer.step.contract import METADATA, Step, from_metadata

from ..portable.onnx_encodings import Encoder
from .exported import Exported, export

FLOAT = TensorProto.FLOAT


def info(name: str, shape: Sequence[int | str] = ("n", 2), dtype: int = FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def model_of(nodes: list[onnx.NodeProto], inputs: Any, outputs: Any, **others: Any) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "evaluation", inputs, outputs, **others)
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])


def compute(model: bytes, inputs: dict[str, Any]) -> list[np.ndarray[Any, Any]]:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return session.run(None, {i.name: inputs[i.name] for i in session.get_inputs()})


def used(graph: onnx.GraphProto) -> set[str]:
    """Returns all names that a graph and its bodies read, using only onnx."""
    names = {o.name for o in graph.output}
    for node in graph.node:
        names |= set(node.input)
        for attribute in node.attribute:
            for body in [attribute.g, *attribute.graphs]:
                names |= used(body)
    return names


def affine(with_metadata: bool = True) -> onnx.ModelProto:
    """Computes logits = x @ weight + bias and the mean distance to the label, which alone needs one node and input."""
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["product"]),
        helper.make_node("Add", ["product", "bias"], ["logits"]),
        helper.make_node("Sub", ["logits", "label"], ["difference"]),
        helper.make_node("Mul", ["difference", "half"], ["scaled"]),
        helper.make_node("ReduceMean", ["scaled"], ["loss"], keepdims=0),
    ]
    inputs = [info("x", ["n", 3]), info("label"), info("weight", [3, 2]), info("bias", [2])]
    model = model_of(
        nodes,
        inputs,
        [info("loss", []), info("logits")],
        initializer=[numpy_helper.from_array(np.float32(0.5), "half")],
        value_info=[info("product"), info("difference")],
    )
    if with_metadata:
        helper.set_model_props(model, {METADATA: "{}", "mine": "kept"})
    return model


STATE = {
    "weight": np.arange(6, dtype=np.float32).reshape(3, 2),
    "bias": np.array([1, -1], np.float32),
}
INPUTS = {"x": np.ones((4, 3), np.float32), "label": np.zeros((4, 2), np.float32)}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return export(tmp_path_factory.mktemp("artifacts"))


@pytest.mark.engine
def test_what_an_output_does_not_need_is_gone() -> None:
    made = onnx.load_from_string(inference_model(affine().SerializeToString(), STATE, ["logits"]))
    onnx.checker.check_model(made, full_check=True)
    assert [node.op_type for node in made.graph.node] == ["MatMul", "Add"]
    assert [i.name for i in made.graph.input] == ["x"] and [o.name for o in made.graph.output] == ["logits"]
    assert {i.name: numpy_helper.to_array(i).tolist() for i in made.graph.initializer} == {
        name: value.tolist() for name, value in STATE.items()
    }
    assert [value.name for value in made.graph.value_info] == ["product"]
    assert {p.key: p.value for p in made.metadata_props} == {"mine": "kept"}
    assert (made.ir_version, made.opset_import[0].version, made.graph.name) == (10, 21, "evaluation")
    (logits,) = compute(made.SerializeToString(), INPUTS)
    np.testing.assert_allclose(logits, INPUTS["x"] @ STATE["weight"] + STATE["bias"])


@pytest.mark.engine
@pytest.mark.parametrize("seed", range(5))
def test_other_encodings_of_the_same_model(seed: int) -> None:
    data = Encoder(random.Random(seed)).message(affine())
    made = inference_model(data, STATE, ["logits"])
    assert METADATA not in {p.key for p in onnx.load_from_string(made).metadata_props}
    (logits,) = compute(made, INPUTS)
    np.testing.assert_allclose(logits, INPUTS["x"] @ STATE["weight"] + STATE["bias"])


@pytest.mark.engine
def test_any_value_of_the_graph_can_be_an_output() -> None:
    names = ["scaled", "product", "loss", "half", "bias", "x"]  # scaled has no type in the graph
    made = inference_model(affine().SerializeToString(), STATE, names)
    found = dict(zip(names, compute(made, INPUTS), strict=True))
    product = INPUTS["x"] @ STATE["weight"]
    np.testing.assert_allclose(found["product"], product)
    np.testing.assert_allclose(found["scaled"], (product + STATE["bias"]) / 2)
    np.testing.assert_allclose(found["loss"], ((product + STATE["bias"]) / 2).mean(), rtol=1e-6)
    assert found["half"] == 0.5 and found["bias"].tolist() == [1, -1] and found["x"].shape == (4, 3)


@pytest.mark.engine
def test_bodies_keep_the_values_around_them() -> None:
    """A body reads values of the graph and the body around it, and has names of its own."""
    inner = helper.make_graph(
        [helper.make_node("Mul", ["own", "scale"], ["inner_out"])], "inner", [], [info("inner_out")]
    )
    other = helper.make_graph([helper.make_node("Neg", ["own"], ["other_out"])], "other", [], [info("other_out")])
    then = helper.make_graph(
        [
            helper.make_node("Add", ["doubled", "shift"], ["own"]),
            helper.make_node("If", ["flag"], ["then_out"], then_branch=inner, else_branch=other),
        ],
        "then",
        [],
        [info("then_out")],
        initializer=[numpy_helper.from_array(np.float32(3), "shift")],
    )
    passed = helper.make_graph([helper.make_node("Identity", ["x"], ["else_out"])], "else", [], [info("else_out")])
    nodes = [
        helper.make_node("Add", ["x", "x"], ["doubled"]),
        helper.make_node("Neg", ["unrelated"], ["own_not"]),
        helper.make_node("If", ["flag"], ["y"], then_branch=then, else_branch=passed),
    ]
    flag = info("flag", [], TensorProto.BOOL)
    inputs = [info("x"), flag, info("scale", []), info("unrelated"), info("shift_not", [])]
    model = model_of(nodes, inputs, [info("y"), info("own_not")])
    made = inference_model(model.SerializeToString(), {"scale": np.array(5, np.float32)}, ["y"])
    read = onnx.load_from_string(made)
    assert [i.name for i in read.graph.input] == ["x", "flag"] and [n.op_type for n in read.graph.node] == ["Add", "If"]
    x = np.ones((1, 2), np.float32)
    assert compute(made, {"x": x, "flag": np.array(True)})[0].tolist() == [[25, 25]]
    assert compute(made, {"x": x, "flag": np.array(False)})[0].tolist() == [[1, 1]]


@pytest.mark.engine
def test_the_evaluation_model_of_an_export(exported: Exported, tmp_path: Path) -> None:
    data = exported.file("eval_model.onnx").read_bytes()
    properties = {entry.key: entry.value for entry in onnx.load_from_string(data).metadata_props}
    description = from_metadata(Step, properties[METADATA], "the model")
    parameters = read_checkpoint(exported.file("checkpoint")).parameters
    state = {graph: parameters[name] for name, graph in description.state.items()}
    made = inference_model(data, state, ["logits"])
    exported.trainer.export_for_inference(tmp_path / "theirs.onnx")
    theirs = (tmp_path / "theirs.onnx").read_bytes()
    for model in (made, theirs):
        read = onnx.load_from_string(model)
        onnx.checker.check_model(read, full_check=True)
        assert [i.name for i in read.graph.input] == ["x"] and [o.name for o in read.graph.output] == ["logits"]
        assert METADATA not in {entry.key for entry in read.metadata_props}
    inputs = {"x": exported.batches[0][0]}
    np.testing.assert_allclose(compute(made, inputs)[0], compute(theirs, inputs)[0], rtol=1e-6, atol=1e-7)


@pytest.mark.engine
def test_models_for_inference(exported: Exported, tmp_path: Path) -> None:
    folder, data = exported.folder, exported.batches
    state = CheckpointState.load_checkpoint(folder / "checkpoint")
    module = Module(folder / "training_model.onnx", state, (folder / "eval_model.onnx").read_bytes())
    x, label = data[0]
    module(x, label)
    path = tmp_path / "inference.onnx"
    module.export_model_for_inferencing(path, ["logits"])
    run = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [entry.name for entry in run.get_inputs()] == ["x"]
    np.testing.assert_allclose(run.run(None, {"x": x})[0], module.eval()(x, label)[1], rtol=1e-5, atol=1e-6)
    before = path.read_bytes()
    session = TrainingSession(state, folder / "training_model.onnx", folder / "eval_model.onnx")
    session.export_model_for_inferencing(tmp_path / "of_a_session.onnx", ["logits"])
    assert (tmp_path / "of_a_session.onnx").read_bytes() == before
    for names, error in ((["nothing"], ValueError), ("logits", TypeError), ([3], TypeError), ([], ValueError)):
        with pytest.raises(error):
            module.export_model_for_inferencing(path, names)
    assert path.read_bytes() == before
    with pytest.raises(FileNotFoundError, match="does not exist"):
        module.export_model_for_inferencing(tmp_path / "nothing" / "model.onnx", ["logits"])
    with pytest.raises(RuntimeError, match="needs the evaluation model"):
        Module(folder / "training_model.onnx", state).export_model_for_inferencing(path, ["logits"])


@pytest.mark.parametrize("dtype", ["float64", "float16", "int64", "int32", "uint8", "bool", ">f4"])
def test_values_of_other_dtypes(dtype: str) -> None:
    value = np.array([[0, 1, 2], [3, 4, 5]]).astype(dtype).T  # not contiguous
    model = model_of([helper.make_node("Identity", ["w"], ["y"])], [info("w", [3, 2])], [info("y", [3, 2])])
    made = onnx.load_from_string(inference_model(model.SerializeToString(), {"w": value}, ["y"]))
    found = numpy_helper.to_array(made.graph.initializer[0])
    assert found.dtype == value.dtype.newbyteorder("=") and found.tolist() == value.tolist()


@pytest.mark.parametrize(
    ("state", "names", "error", "message"),
    [
        (
            STATE,
            ["logit"],
            ValueError,
            r"no value 'logit' \(did you mean 'logits'\?\); its outputs are \['loss', 'logits'\]",
        ),
        (
            STATE,
            ["zzz"],
            ValueError,
            r"no value 'zzz'; .* any of the 10 values .* is allowed: \['x', 'label', 'weight'",
        ),
        (STATE, [3], ValueError, "no value 3"),
        (STATE, [], ValueError, r"needs outputs, each once, but \[\] was given"),
        (STATE, ["loss", "loss"], ValueError, r"each once, but \['loss', 'loss'\] was given"),
        (STATE, "loss", TypeError, "must be a list of names, but 'loss' was given"),
        ({"w": STATE["weight"]}, ["loss"], ValueError, r"no inputs \['w'\]; it has \['x', 'label', 'weight', 'bias'\]"),
        ({"bias": np.zeros(2, ml_dtypes.bfloat16)}, ["loss"], ValueError, "bias has dtype bfloat16, .* float32"),
    ],
)
def test_wrong_names_and_values(state: Any, names: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        inference_model(affine().SerializeToString(), state, names)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"\xff" * 30, b"onnx", b"\x3a\x02\x0a\x7f", b"\x3a\x05\x62\x03\x0a\x01\xff"]
)
def test_damaged_bytes(data: bytes) -> None:
    with pytest.raises(ValueError, match="the evaluation model is damaged or not an ONNX model: "):
        inference_model(data, {}, ["y"])


def test_a_truncated_model_is_refused_or_lacks_the_name() -> None:
    data = affine().SerializeToString()
    for size in range(len(data)):
        with pytest.raises(ValueError, match="damaged|no value"):
            inference_model(data[:size], {}, ["loss", "x", "missing"])


def test_a_model_that_protobuf_can_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_bytes, "_LARGEST", 100)
    with pytest.raises(
        ValueError, match="would have [0-9]+ bytes, but an ONNX file can have at most 100: choose outputs that need"
    ):
        inference_model(affine().SerializeToString(), STATE, ["loss"])


@st.composite
def graphs(draw: st.DrawFn) -> tuple[onnx.ModelProto, list[str]]:
    """Returns a graph of sums, negations and conditions over earlier values, and some of its values."""
    inputs, constants = ["x0", "x1", "w0", "w1", "w2"], ["c0", "c1"]
    values = [*inputs, *constants]
    nodes = []
    pick = st.deferred(lambda: st.sampled_from(values))
    for number in range(draw(st.integers(1, 7))):
        kind, made = draw(st.sampled_from(["Add", "Neg", "Split", "If"])), f"v{number}"
        if kind == "If":
            bodies = [
                helper.make_graph(
                    [helper.make_node("Sub", [draw(pick), draw(pick)], [f"{made}_{branch}"])],
                    branch,
                    [],
                    [info(f"{made}_{branch}", [2])],
                )
                for branch in ("then_branch", "else_branch")
            ]
            nodes.append(helper.make_node("If", ["flag"], [made], then_branch=bodies[0], else_branch=bodies[1]))
        elif kind == "Split":  # an output that may be unused
            halves = [f"{made}_left", f"{made}_right"]
            nodes.append(helper.make_node("Split", [draw(pick)], halves, axis=0, num_outputs=2))
            nodes.append(helper.make_node("Concat", halves[::-1], [made], axis=0))
        else:
            nodes.append(helper.make_node(kind, [draw(pick) for _ in range(2 if kind == "Add" else 1)], [made]))
        values.append(made)
    model = model_of(
        nodes,
        [*(info(name, [2]) for name in inputs), info("flag", [], TensorProto.BOOL)],
        [info(values[-1], [2])],
        initializer=[numpy_helper.from_array(np.float32([i, i]), name) for i, name in enumerate(constants)],
        value_info=[info(name, [2]) for name in values if name.startswith("v") and name != values[-1]],
    )
    made_values = [name for name in values if name.startswith("v")]
    return model, draw(st.lists(st.sampled_from(made_values), min_size=1, max_size=3, unique=True))


@settings(max_examples=60, deadline=None)
@given(graphs(), st.booleans())
def test_any_graph_computes_the_same_of_less(drawn: tuple[onnx.ModelProto, list[str]], flag: bool) -> None:
    model, names = drawn
    inputs = {f"{kind}{i}": np.float32([i + 1, 10 * i - 3]) for kind in "xw" for i in range(3)} | {
        "flag": np.array(flag)
    }
    state = {name: value for name, value in inputs.items() if name.startswith("w")}
    made = inference_model(model.SerializeToString(), state, names)
    read = onnx.load_from_string(made)
    onnx.checker.check_model(read, full_check=True)
    # Everything left is needed: each node has an output that is read, and everything else is read.
    reads = used(read.graph)
    assert all(reads.intersection(node.output) for node in read.graph.node)
    assert {i.name for i in [*read.graph.input, *read.graph.initializer]} <= reads
    assert not {i.name for i in read.graph.input} & set(state)
    everything = onnx.ModelProto.FromString(model.SerializeToString())
    del everything.graph.output[:]
    everything.graph.output.extend(info(name, [2]) for name in names)
    expected = compute(everything.SerializeToString(), inputs)
    for found, wanted in zip(compute(made, inputs), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.engine
def test_sparse_initializers() -> None:
    nodes = [helper.make_node("MatMul", ["x", "kept"], ["y"]), helper.make_node("MatMul", ["x", "gone"], ["z"])]
    model = model_of(nodes, [info("x")], [info("y"), info("z")])
    for name in ("gone", "kept"):
        values = helper.make_tensor(name, FLOAT, [1], [3.0])
        indices = helper.make_tensor("", TensorProto.INT64, [1], [1])
        model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [2, 2]))
    made = inference_model(model.SerializeToString(), {}, ["y"])
    assert [s.values.name for s in onnx.load_from_string(made).graph.sparse_initializer] == ["kept"]
    assert compute(made, {"x": np.float32([[1, 1]])})[0].tolist() == [[0, 3]]
