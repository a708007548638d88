"""The gradient graphs of a stock engine: gradients of any tensors equal PyTorch's, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer.compat.gradient_graph import GradientGraphBuilder, export_gradient_graph

pytestmark = pytest.mark.engine

MODEL = onnx.parser.parse_model(
    '<ir_version: 8, opset_import: ["" : 17]> '
    "g (float[N,2] x, float[2,3] w, int64[N] unused) => (float[N,3] y, float loss, float sum, int64[N] best) "
    "<float[3] b = {1.0, 2.0, 3.0}, float k = {0.5}, float[3] c = {1.0, 1.5, 2.0}> "
    "{ h = MatMul(x, w)\n scaled = Mul(h, c)\n y = Add(scaled, b)\n s = Mul(y, y)\n t = Mul(s, k)\n"
    " best = ArgMax<axis=1, keepdims=0>(y)\n sum = ReduceSum<keepdims=0>(y)\n loss = ReduceMean<keepdims=0>(t) }"
).SerializeToString()
SEED = np.random.default_rng(0)
TENSORS = {
    "x": SEED.normal(size=(5, 2)).astype(np.float32),
    "w": SEED.normal(size=(2, 3)).astype(np.float32),
    "b": np.array([1, 2, 3], np.float32),
    "k": np.array(0.5, np.float32),
    "c": np.array([1, 1.5, 2], np.float32),
}
FEED = {"x": TENSORS["x"], "w": TENSORS["w"], "unused": np.zeros(5, np.int64)}
OF_Y = SEED.normal(size=(5, 3)).astype(np.float32)


@pytest.mark.parametrize(
    ("outputs", "weights", "fed", "factors"),
    [
        ({"loss"}, {"x", "w"}, {}, {"loss": 1}),
        ({"loss"}, {"b", "k", "c"}, {}, {"loss": 1}),
        ({"loss", "y"}, {"x", "w", "b"}, {}, {"loss": 1}),
        ({"loss", "y"}, {"x", "w", "b"}, {"y_grad": OF_Y}, {"loss": 1, "y": OF_Y}),
        ({"loss", "sum"}, {"x", "c"}, {}, {"loss": 1, "sum": 1}),
        ({"loss", "sum"}, {"x", "c"}, {"sum_grad": np.array(3, np.float32)}, {"loss": 1, "sum": 3}),
        ({"y"}, {"x", "w"}, {"y_grad": OF_Y}, {"y": OF_Y}),
    ],
)
def test_gradients(
    outputs: set[str], weights: set[str], fed: Mapping[str, Any], factors: Mapping[str, Any], tmp_path: Path
) -> None:
    builder = GradientGraphBuilder(MODEL, outputs, weights, "loss" if "loss" in outputs else "")
    builder.build()
    onnx.checker.check_model(onnx.ModelProto.FromString(builder.get_model()), full_check=True)
    builder.save(str(tmp_path / "gradients.onnx"))
    assert (tmp_path / "gradients.onnx").read_bytes() == builder.get_model()
    session = onnxruntime.InferenceSession(builder.get_model(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    assert names == ["y", "loss", "sum", "best", *(f"{name}_grad" for name in sorted(weights))]
    assert [value.shape for value in session.get_inputs()][:3] == [["N", 2], [2, 3], ["N"]]
    found = dict(zip(names, session.run(None, {**FEED, **fed}), strict=True))

    t = {name: torch.tensor(value, requires_grad=True) for name, value in TENSORS.items()}
    y = t["x"] @ t["w"] * t["c"] + t["b"]
    wanted = {"y": y, "loss": (y * y * t["k"]).mean(), "sum": y.sum()}
    sum(((torch.tensor(by) * wanted[name]).sum() for name, by in factors.items()), torch.zeros(())).backward()
    wanted |= {f"{name}_grad": t[name].grad for name in weights}
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value.detach(), rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("outputs", "weights", "loss", "message"),
    [
        ({"loss"}, {"gone"}, "loss", r"the model has no weights \['gone'\]: choose from \['x', 'w', 'unused', 'b'"),
        ({"gone"}, {"x"}, "", r"the model has no outputs \['gone'\]: choose from \['y', 'loss', 'sum', 'best'\]"),
        ({"loss"}, {"unused", "x"}, "loss", r"\['unused'\] in weights are not floating-point"),
        ({"best"}, {"x"}, "best", r"\['best'\] in outputs are not floating-point"),
        ({"y"}, {"x"}, "loss", r"the loss 'loss' must be one of the outputs to differentiate, \['y'\]"),
        ({"sum"}, {"k", "x"}, "sum", r"the outputs \['sum'\] do not depend on the weights \['k'\]: leave these out"),
        ({"loss"}, set(), "loss", r"weights must be a set of one or more names, but set\(\) was given"),
        ("loss", {"x"}, "loss", "outputs must be a set of one or more names, but 'loss' was given"),
    ],
)
def test_what_is_refused(outputs: Any, weights: set[str], loss: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GradientGraphBuilder(MODEL, outputs, weights, loss).build()


def test_a_graph_before_it_is_built() -> None:
    with pytest.raises(RuntimeError, match=r"there are no gradients yet: call build\(\) first"):
        GradientGraphBuilder(MODEL, {"loss"}, {"x"}, "loss").get_model()


def test_random_numbers_are_refused() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18]> g (float[N,2] x) => (float loss) <float[2] w = {1.0, 2.0}, '
        "float half = {0.5}, bool yes = {1}> "
        "{ h = Mul(x, w)\n y = Dropout(h, half, yes)\n loss = ReduceMean<keepdims=0>(y) }"
    )
    builder = GradientGraphBuilder(model.SerializeToString(), {"loss"}, {"w"}, "loss")
    with pytest.raises(NotImplementedError, match="the model draws random numbers, .* set the ratio of Dropout to 0"):
        builder.build()


def test_the_gradient_graph_of_a_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    model[0].requires_grad_(False)
    path = tmp_path / "gradients.onnx"
    export_gradient_graph(model, nn.CrossEntropyLoss(), torch.randn(2, 4), torch.tensor([1, 0]), path)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    parameters = dict(model.named_parameters())
    assert [value.name for value in session.get_inputs()] == ["input", "labels", *parameters]
    names = [value.name for value in session.get_outputs()]
    assert names == ["output", "loss", *(f"{name}_grad" for name, value in parameters.items() if value.requires_grad)]
    x, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 1, 0])
    feed = {name: value.detach().numpy() for name, value in parameters.items()}
    found = session.run(names, {"input": x.numpy(), "labels": y.numpy(), **feed})
    output = model(x)
    loss = F.cross_entropy(output, y)
    loss.backward()
    gradients = [value.grad for value in parameters.values() if value.requires_grad]
    for name, ours, theirs in zip(names, found, [output, loss, *gradients], strict=True):
        np.testing.assert_allclose(ours, theirs.detach(), rtol=1e-4, atol=1e-6, err_msg=name)


def test_a_model_that_draws_random_numbers_keeps_its_mode(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5))
    with pytest.raises(NotImplementedError, match="the model draws random numbers"):
        export_gradient_graph(model, F.cross_entropy, torch.randn(2, 4), torch.tensor([1, 0]), tmp_path / "g.onnx")
    export_gradient_graph(model.eval(), F.cross_entropy, torch.randn(2, 4), torch.tensor([1, 0]), tmp_path / "g.onnx")
    assert not model.training and (tmp_path / "g.onnx").is_file()
