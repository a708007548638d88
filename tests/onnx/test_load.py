"""Loading ONNX models: weights, buffers, settings and constants; external data; files that are not models."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest
import torch
from onnx.external_data_helper import convert_model_to_external_data

from ort_trainer import ExportError, ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.engine import ort as engine
from ort_trainer.onnx.load import load_onnx_model
from ort_trainer.step.onnx_file import WEIGHTS

W = np.arange(12, dtype=np.float32).reshape(3, 4)


def proto(body: str = "y = MatMul(x, w)", opset: int = 18, functions: str = "", **initializers: Any) -> onnx.ModelProto:
    found = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : {opset}, "own" : 1]> g (float[N,3] x) => (float[N,M] y) {{ {body} }} '
        + functions
    )
    for name, value in (initializers or {"w": W}).items():
        found.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    return found


def test_weights_become_inputs_behind_the_models_own() -> None:
    given = proto("a = MatMul(x, w) y = Add(a, b)", w=W, b=W[0], unused=W)
    before = given.SerializeToString()
    loaded = load_onnx_model(given)
    assert loaded.inputs == ("x",) and loaded.outputs == ("y",) and not loaded.buffers and not loaded.frozen
    assert list(loaded.parameters) == ["w", "b", "unused"]
    assert torch.equal(loaded.parameters["w"], torch.from_numpy(W))
    graph = loaded.model.graph
    assert [value.name for value in graph.inputs] == ["x", "w", "b", "unused"] and not graph.initializers
    assert graph.inputs[1].dtype == ir.DataType.FLOAT and graph.inputs[1].shape == [3, 4]
    loaded.parameters["w"].zero_()
    assert given.SerializeToString() == before


def test_an_initializer_that_is_an_input_too_is_a_weight() -> None:
    given = proto()
    given.ir_version = 3
    given.graph.input.append(onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [3, 4]))
    loaded = load_onnx_model(given)
    assert loaded.inputs == ("x",) and set(loaded.parameters) == {"w"}


def test_a_weight_with_several_uses_is_one() -> None:
    loaded = load_onnx_model(proto("a = MatMul(x, w) b = Exp(w) c = MatMul(x, b) y = Add(a, c)"))
    assert list(loaded.parameters) == ["w"]
    uses = [node.op_type for node in loaded.model.graph for value in node.inputs if value.name == "w"]
    assert uses == ["MatMul", "Exp"]


@pytest.mark.parametrize(
    ("body", "initializers", "weights"),
    [
        ("y = Clip(x, low)", {"low": np.float32([0])}, set()),
        ("a = Clip(x, v) y = Mul(a, v)", {"v": np.float32([0])}, {"v"}),  # a setting and an operand
        ("y = Pow(x, v)", {"v": np.float32([2])}, set()),
        ("y = Pow(v, x)", {"v": np.float32([2])}, {"v"}),
        ("y = Mul(x, v)", {"v": np.float32(2)}, set()),  # a number
        ("y = Gather(x, v)", {"v": np.int64([0])}, set()),
        ("y = own.f(x, v)", {"v": W}, {"v"}),  # uses inside functions count
        ("y = own.g(x, v)", {"v": np.float32([1])}, set()),
    ],
)
def test_settings_numbers_and_indices_are_no_weights(body: str, initializers: Any, weights: set[str]) -> None:
    functions = (
        '<domain: "own", opset_import: ["" : 18]> f (a, b) => (c) { c = MatMul(a, b) } '
        '<domain: "own", opset_import: ["" : 18]> g (a, b) => (c) { c = Clip(a, b) }'
    )
    loaded = load_onnx_model(proto(body, functions=functions, **initializers))
    assert set(loaded.parameters) == weights
    assert set(loaded.model.graph.initializers) == set(initializers) - weights
    assert not loaded.model.functions


def test_functions_of_another_operator_set_stay_functions() -> None:
    """An operator can mean different things in different opsets."""
    function = '<domain: "own", opset_import: ["" : 12]> f (a, b) => (c) { d = MatMul(a, b) c = Softmax(d) }'
    loaded = load_onnx_model(proto("y = own.f(x, w)", functions=function))
    assert len(loaded.model.functions) == 1 and set(loaded.parameters) == {"w"}


def test_running_statistics_are_buffers() -> None:
    names = ("scale", "bias", "mean", "var")
    loaded = load_onnx_model(
        proto(f"y = BatchNormalization(x, {', '.join(names)})", **dict.fromkeys(names, np.ones(3, np.float32)))
    )
    assert list(loaded.parameters) == ["scale", "bias"] and list(loaded.buffers) == ["mean", "var"]
    assert [value.name for value in loaded.model.graph.inputs] == ["x", *names]


def test_constants_that_torch_names_so(caplog: pytest.LogCaptureFixture) -> None:
    body = "a = MatMul(x, val_1) b = Add(a, val_2) c = Mul(b, val_3) y = Add(c, weight)"
    given = proto(body, val_1=W, val_2=W[0], val_3=W[0], weight=W[0])
    assert set(load_onnx_model(given).parameters) == {"val_1", "val_2", "val_3", "weight"}
    given.producer_name = "pytorch"
    with caplog.at_level(logging.WARNING):
        loaded = load_onnx_model(given)
    # An operand of a product is a transposed weight, and what is added to the product is its bias.
    assert set(loaded.parameters) == {"val_1", "val_2", "weight"}
    assert "held constant" in caplog.text and "['val_3']" in caplog.text


def test_a_file_of_ours_says_what_was_trained() -> None:
    given = proto("a = MatMul(x, w) b = Clip(a, v) y = Add(b, u)", w=W, v=W[0, :1], u=W[0])
    entry = given.metadata_props.add()
    entry.key, entry.value = WEIGHTS, json.dumps({"trained": ["v"], "frozen": ["w", "gone"]})
    loaded = load_onnx_model(given)
    assert set(loaded.parameters) == {"w", "v"} and loaded.frozen == {"w"}
    entry.value = "{}"
    with pytest.raises(ExportError, match=r"metadata 'ort_trainer.weights' are damaged: KeyError\('frozen'\)"):
        load_onnx_model(given)


@pytest.mark.parametrize("relative", [False, True])
def test_external_data(relative: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = proto("a = MatMul(x, w) b = Mul(a, n) y = Gather(b, i)", w=W, n=np.float32(3), i=np.int64([1]))
    convert_model_to_external_data(given, location="data.bin", size_threshold=0)
    onnx.save(given, tmp_path / "m.onnx")
    monkeypatch.chdir(tmp_path)
    loaded = load_onnx_model("m.onnx" if relative else tmp_path / "m.onnx")
    # The model no longer needs the file, which may be replaced during training.
    (tmp_path / "data.bin").unlink()
    assert torch.equal(loaded.parameters["w"], torch.from_numpy(W))
    assert not any(isinstance(v.const_value, ir.ExternalTensor) for v in loaded.model.graph.initializers.values())
    assert loaded.model.graph.initializers["n"].const_value.numpy() == 3
    with pytest.raises(ExportError, match="the external data of 'w' can't be read: .*data.bin"):
        load_onnx_model(tmp_path / "m.onnx")


def test_external_data_outside_of_the_folder_is_not_read(tmp_path: Path) -> None:
    """By any name: the file exists, and a reader that trusts the model would read it."""
    given = proto()
    convert_model_to_external_data(given, location="data.bin", size_threshold=0)
    onnx.save(given, tmp_path / "m.onnx")
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "data.bin").rename(tmp_path / "secret.bin")
    (inner / "link.bin").symlink_to("../secret.bin")
    (inner / "folder").symlink_to(tmp_path)
    (inner / "loop").symlink_to("loop")
    os.mkfifo(inner / "pipe")
    for location, reason in (
        ("../secret.bin", r"leaves the model's folder through '..'"),
        ("x/../../secret.bin", "through '..'"),
        ("..\\secret.bin", "through '..'"),
        (str(tmp_path / "secret.bin"), "is an absolute path"),
        ("C:\\secret.bin", "is an absolute path"),
        ("link.bin", "leaves the model's folder through a symbolic link"),
        ("folder/secret.bin", "leaves the model's folder through a symbolic link"),
        ("loop", "symbolic link|can't be resolved|not a regular file"),
        ("pipe", "is not a regular file"),
        (".", "is not a regular file"),
        ("", "is not a file name"),
        ("a\0b", "is not a file name"),
        ("a" * 5000, "can't be resolved"),
    ):
        entry = next(entry for entry in given.graph.initializer[0].external_data if entry.key == "location")
        entry.value = location
        (inner / "m.onnx").write_bytes(given.SerializeToString())
        with pytest.raises(ExportError, match=f"m.onnx' keeps the data of 'w' in .*(?:{reason})"):
            load_onnx_model(inner / "m.onnx")
    entry.value = "inside.bin"
    (inner / "m.onnx").write_bytes(given.SerializeToString())
    (inner / "inside.bin").symlink_to("data.bin")  # a link within the folder is allowed
    (tmp_path / "secret.bin").rename(inner / "data.bin")
    assert torch.equal(load_onnx_model(inner / "m.onnx").parameters["w"], torch.from_numpy(W))
    entry.key = "place"
    (inner / "m.onnx").write_bytes(given.SerializeToString())
    with pytest.raises(ExportError, match="the external data of 'w' has 0 locations"):
        load_onnx_model(inner / "m.onnx")


def test_external_data_of_constants_and_bodies(tmp_path: Path) -> None:
    body = "else_branch = e () => (float[N,M] b) { b = Sub(a, c) }, then_branch = t () => (float[N,M] b) { b = Neg(a) }"
    given = proto(f"a = MatMul(x, w) i = Constant <value = bool {{1}}> () y = If (i) <{body}>")
    branch = given.graph.node[2].attribute[0].g
    branch.initializer.append(onnx.numpy_helper.from_array(np.float32(3), "c"))
    convert_model_to_external_data(given, location="data.bin", size_threshold=0)
    (tensor,) = branch.initializer
    tensor.raw_data, tensor.data_location = b"", onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="more.bin")
    onnx.save(given, tmp_path / "m.onnx")
    (tmp_path / "more.bin").write_bytes(np.float32(3).tobytes())
    loaded = load_onnx_model(tmp_path / "m.onnx")
    (tmp_path / "more.bin").unlink()
    found = [v.const_value for g in loaded.model.graphs() for v in g.initializers.values()]
    assert [value.numpy().tolist() for value in found if value is not None] == [3]
    tensor.external_data[0].value = "/etc/hostname"
    (tmp_path / "m.onnx").write_bytes(given.SerializeToString())
    with pytest.raises(ExportError, match="keeps the data of 'c' in '/etc/hostname', which is an absolute path"):
        load_onnx_model(tmp_path / "m.onnx")
    given.graph.node[1].attribute[0].t.external_data.add(key="location", value="/etc/hostname")
    with pytest.raises(ExportError, match="a constant of a node, in an external file"):
        load_onnx_model(given)


def test_external_data_of_a_model_without_a_folder(tmp_path: Path) -> None:
    given = proto()
    convert_model_to_external_data(given, location="data.bin", size_threshold=0)
    onnx.save(given, tmp_path / "m.onnx")
    for source in (onnx.load(tmp_path / "m.onnx", load_external_data=False), (tmp_path / "m.onnx").read_bytes()):
        with pytest.raises(ExportError, match="'w' is in an external file, but only the model itself was given"):
            load_onnx_model(source)


def test_nodes_in_any_order_but_no_circle() -> None:
    model = proto("a = MatMul(x, w) y = Neg(a)")
    nodes = [*model.graph.node]
    del model.graph.node[:]
    model.graph.node.extend(reversed(nodes))
    assert [node.op_type for node in load_onnx_model(model).model.graph] == ["MatMul", "Neg"]
    model.graph.node[1].input[0] = "y"
    with pytest.raises(ExportError, match="is damaged: .*cycle"):
        load_onnx_model(model)


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.onnx")
    for path in (tmp_path / "m.onnx", tmp_path):
        with pytest.raises(FileNotFoundError, match="there is no ONNX model .*: that is a folder, a pipe or a device"):
            load_onnx_model(path)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"no model", "the model is not an ONNX model"),
        (b"", "the model is not an ONNX model: it has no nodes or no opset"),
        (onnx.ModelProto(), "the model is not an ONNX model: it has no nodes"),
    ],
)
def test_bad_models(source: Any, message: str) -> None:
    with pytest.raises(ExportError, match=message):
        load_onnx_model(source)


def test_bad_weights_and_files(tmp_path: Path) -> None:
    sparse = proto()
    sparse.graph.sparse_initializer.add().values.name = "s"
    with pytest.raises(ExportError, match=r"the model has sparse initializers \['s'\], .*: make them dense"):
        load_onnx_model(sparse)
    with pytest.raises(FileNotFoundError, match="missing.onnx"):
        load_onnx_model(tmp_path / "missing.onnx")
    (tmp_path / "cut.onnx").write_bytes(proto().SerializeToString()[:-10])
    with pytest.raises(ExportError, match="cut.onnx' is not an ONNX model"):
        load_onnx_model(tmp_path / "cut.onnx")


def test_a_first_batch_that_lacks_something_is_refused() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 18]>
        g (float[n, 2] x, float[n, 2] more) => (float[n, 2] y) <float[2] weight = {1, 2}>
        { scaled = Mul(x, weight) y = Add(scaled, more) }"""
    )
    x = torch.ones(3, 2)
    for loss_fn, batch, message in (
        (torch.nn.functional.mse_loss, {"x": x, "more": x}, "needs the label, beside the inputs"),
        (torch.nn.functional.mse_loss, {"x": x, "label": x}, r"lacks the inputs \['more'\] of the ONNX model"),
    ):
        trainer = ORTTrainer(model, "auto", optim.SGDConfig(), loss_fn=loss_fn)
        with pytest.raises(ValueError, match=message):
            trainer.train_step(**batch)
        trainer.train_step(x=x, more=x, label=x)


HIDDEN = f"""
    c = Constant<value = float[4,4] {{{",".join(f"{i / 8 - 1}" for i in range(16))}}}>() t = Transpose<perm=[1,0]>(c)
    h = MatMul(a, t) b = Constant<value_floats=[0.5, 1.0, 2.0, 3.0]>() k = Add(h, b)
    m = Constant<value_floats=[1.0, 0.0, 2.0, 1.0]>() l = Mul(k, m) e = Constant<value_float=0.5>() y = Mul(l, e)"""


def test_floats_of_constant_nodes_that_layers_have_are_weights(caplog: pytest.LogCaptureFixture) -> None:
    given = proto("a = MatMul(x, w)" + HIDDEN)
    loaded = load_onnx_model(given)
    assert list(loaded.parameters) == ["w", "c", "b"]
    assert loaded.parameters["c"].shape == (4, 4) and loaded.parameters["b"].tolist() == [0.5, 1, 2, 3]
    assert (
        "held constant" in caplog.text and "LiftConstantsToInitializersPass" in caplog.text and "['m']" in caplog.text
    )
    # The tracing exporter of torch.onnx writes no parameter so; that of programs may, when it folds them.
    given.producer_name = "pytorch"
    caplog.clear()
    assert list(load_onnx_model(given).parameters) == ["w"] and "['b', 'c']" in caplog.text
    given.graph.value_info.append(onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [3, 4]))
    entry = given.graph.value_info[0].metadata_props.add()
    entry.key, entry.value = "pkg.torch.export.graph_signature.InputSpec.kind", "PARAMETER"
    assert list(load_onnx_model(given).parameters) == ["w", "c", "b"]


def test_constant_nodes_in_functions_are_told(caplog: pytest.LogCaptureFixture) -> None:
    constant = "v = Constant<value = float[2,2] {1, 2, 3, 4}>() c = MatMul(a, v)"
    for opset in (18, 12):
        caplog.clear()
        functions = f'<domain: "own", opset_import: ["" : {opset}]> f (a) => (c) {{ {constant} }}'
        assert not load_onnx_model(proto("y = own.f(x)", functions=functions, n=np.int64([1]))).parameters
        assert "held constant" in caplog.text


BODIES = """
    i = Constant<value = int64 {0}>() s = Constant<value_ints=[1]>() j = Constant<value_ints=[0]>()
    top = Slice(a, j, s) sum = ReduceSum<keepdims=0>(top) zero = Constant<value_float=0.0>() p = Greater(sum, zero)
    f = If (p) <then_branch = one () => (float[N,4] r) { r = MatMul(a, v) },
                else_branch = two () => (float[N,4] r) { r = Mul(a, v) }>
    n = Constant<value = int64 {3}>() go = Constant<value = bool {1}>()
    y = Loop (n, go, f) <body = body (int64 k, bool on, float[N,4] q) => (bool off, float[N,4] z)
        { off = Identity(on) d = MatMul(q, u) z = Add(d, q) }>"""


def with_bodies() -> onnx.ModelProto:
    given = proto("a = MatMul(x, w)" + BODIES)
    generator = np.random.default_rng(0)
    for node in given.graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                name = "u" if attribute.name == "body" else "v"
                shape = (4,) if attribute.name == "else_branch" else (4, 4)
                value = generator.normal(size=shape).astype(np.float32)
                attribute.g.initializer.append(onnx.numpy_helper.from_array(value, name))
    return given


def test_floats_of_bodies_and_constant_nodes_are_trained_and_written(tmp_path: Path) -> None:
    given = with_bodies()
    given.graph.node[-1].output[0] = "a2"
    more = onnx.parser.parse_graph("g (float[N,4] a) => (float[N,4] y) {" + HIDDEN.replace("a,", "a2,") + "}")
    names = {"h": "h2", "i": "i2", "b": "b2", "k": "k2", "l": "l2", "e": "e2", "m": "m2"}
    for node in more.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    given.graph.node.extend(more.node)
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    options = ORTTrainerOptions({"utils": {"grad_norm_clip": False}, "device": {"id": "cpu"}})
    trainer = ORTTrainer(given, "auto", optim.SGDConfig(lr=1e-3), loss_fn="mse", options=options)
    start = {name: value.clone() for name, value in trainer.state_dict(pytorch_format=True).items()}
    assert set(start) == {"w", "v_1", "v_2", "u", "c", "b2"}

    def function(p: dict[str, torch.Tensor]) -> torch.Tensor:
        a = x @ p["w"]
        y = a @ p["v_1"] if a[:1].sum() > 0 else a * p["v_2"]
        for _ in range(3):
            y = y @ p["u"] + y
        return (y @ p["c"].T + p["b2"]) * torch.tensor([1.0, 0, 2, 1]) * 0.5

    expected = {name: value.clone().requires_grad_() for name, value in start.items()}
    label = torch.zeros(5, 4)
    loss = torch.nn.functional.mse_loss(function(expected), label)
    loss.backward()
    torch.testing.assert_close(trainer.train_step(x=x, label=label)[0], loss.detach(), rtol=1e-4, atol=1e-5)
    state = trainer.state_dict(pytorch_format=True)
    for name, value in expected.items():
        new = value.detach() - 1e-3 * (0 if value.grad is None else value.grad)
        torch.testing.assert_close(state[name], new, rtol=1e-4, atol=1e-5)
    trainer.save_as_onnx(tmp_path / "m.onnx")
    onnx.checker.check_model(onnx.load(tmp_path / "m.onnx"))
    again = load_onnx_model(tmp_path / "m.onnx")
    assert set(again.parameters) == set(state)
    assert all(torch.equal(again.parameters[name], value) for name, value in state.items())
    (y,) = engine.InferenceSession(tmp_path / "m.onnx").run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), function(dict(state)), rtol=1e-4, atol=1e-4)


def test_sizes_of_minus_one_are_unknown() -> None:
    given = proto()
    given.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1
    given.graph.output[0].type.tensor_type.shape.dim[0].dim_value = -1
    trainer = ORTTrainer(given, "auto", optim.SGDConfig(), loss_fn="mse")
    for size in (2, 5):
        trainer.train_step(x=torch.ones(size, 3), label=torch.zeros(size, 4))


def test_inputs_for_which_the_file_has_a_value() -> None:
    given = proto("a = MatMul(x, w) y = Mul(a, by)", w=W, by=np.float32(2))
    for name, shape in (("by", []), ("w", [3, 4])):
        given.graph.input.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
    x, label = torch.randn(5, 3), torch.zeros(5, 4)
    for batch, factor in (({}, 2.0), ({"by": torch.tensor(3.0)}, 3.0)):
        trainer = ORTTrainer(given, "auto", optim.SGDConfig(), loss_fn="mse")
        (loss, *_) = trainer.train_step(x=x, label=label, **batch)
        expected = torch.nn.functional.mse_loss(x @ torch.from_numpy(W) * factor, label)
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    trainer = ORTTrainer(given, "auto", optim.SGDConfig(), loss_fn="mse")
    with pytest.raises(ValueError, match=r"values for its inputs \['w'\], which are weights .* leave them out"):
        trainer.train_step(x=x, w=torch.ones(3, 4), label=label)
