"""Models as scikit-learn's exporter writes them: linear models, scalers, and maps of probabilities."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper

from ort_trainer import ExportError, ORTTrainer, ORTTrainerOptions, optim
from ort_trainer.onnx.module import OnnxModule

OPTIONS: dict[str, Any] = {"utils": {"grad_norm_clip": False}}
X = torch.rand(6, 3, generator=torch.Generator().manual_seed(0)) - 0.4
LABEL = torch.tensor([0, 1, 1, 0, 1, 0])
COEFFICIENTS, INTERCEPTS = torch.tensor([[0.3, -0.2, 0.5], [0.1, 0.4, -0.3]]), torch.tensor([0.1, -0.2])
MAP = helper.make_sequence_type_proto(
    helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
)


def ml(op_type: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op_type, inputs, outputs, name=op_type, domain="ai.onnx.ml", **attributes)


def model_of(
    nodes: list[onnx.NodeProto], outputs: list[onnx.ValueInfoProto], initializers: list[onnx.TensorProto] | None = None
) -> onnx.ModelProto:
    inputs = [helper.make_tensor_value_info("X", TensorProto.FLOAT, ["n", 3])]
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializers)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def linear(op_type: str, outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    numbers = {"coefficients": COEFFICIENTS.flatten().tolist(), "intercepts": INTERCEPTS.tolist()}
    return ml(op_type, ["scaled"], outputs, **numbers, **attributes)


SCALER = ml("Scaler", ["X"], ["scaled"], offset=[0.1, 0.2, 0.3], scale=[2.0, 1.0, 0.5])
LABELS = helper.make_tensor_value_info("label", TensorProto.INT64, ["n"])
# LogisticRegression behind StandardScaler, with the exporter's default of a map.
CLASSIFIER = model_of(
    [
        SCALER,
        linear("LinearClassifier", ["label", "raw"], classlabels_ints=[3, 7], post_transform="LOGISTIC"),
        ml("Normalizer", ["raw"], ["probabilities"], norm="L1"),
        ml("ZipMap", ["probabilities"], ["map"], classlabels_int64s=[3, 7]),
    ],
    [LABELS, helper.make_value_info("map", MAP)],
)


def likelihood(probabilities: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return F.nll_loss(probabilities.log(), label)


def probabilities_of(weights: list[torch.Tensor]) -> torch.Tensor:
    scaled = (X - torch.tensor([0.1, 0.2, 0.3])) * torch.tensor([2.0, 1.0, 0.5])
    return F.normalize(torch.sigmoid(F.linear(scaled, *weights)), 1)


def run(model: onnx.ModelProto | Path, inputs: dict[str, Any] | None = None) -> list[Any]:
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else model
    session = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"])
    return list(session.run(None, inputs or {"X": X.numpy()}))


@pytest.mark.engine
def test_a_linear_classifier_trains_like_pytorch_and_is_written_as_it_came(tmp_path: Path) -> None:
    trainer = ORTTrainer(CLASSIFIER, "auto", optim.SGDConfig(lr=0.5), likelihood, ORTTrainerOptions(OPTIONS))
    weights = [COEFFICIENTS.clone().requires_grad_(), INTERCEPTS.clone().requires_grad_()]
    for _ in range(3):
        expected = likelihood(probabilities_of(weights), LABEL)
        torch.testing.assert_close(trainer.train_step(X=X, label=LABEL)[0], expected.detach())
        gradients = torch.autograd.grad(expected, weights)
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.data -= 0.5 * gradient
    assert [output.name for output in trainer.model_desc.outputs] == ["loss", "probabilities"]
    torch.testing.assert_close(trainer.get_parameter("LinearClassifier.coefficients"), weights[0].detach())
    torch.testing.assert_close(trainer.get_parameter("LinearClassifier.intercepts"), weights[1].detach())

    trainer.save_as_onnx(tmp_path / "trained.onnx")
    written = onnx.load(tmp_path / "trained.onnx")
    onnx.checker.check_model(written)
    assert written.graph.output == CLASSIFIER.graph.output
    assert [node.op_type for node in written.graph.node] == [node.op_type for node in CLASSIFIER.graph.node]
    expected = probabilities_of(weights).detach()
    labels, maps = run(tmp_path / "trained.onnx")
    torch.testing.assert_close(torch.tensor([[entry[3], entry[7]] for entry in maps]), expected)
    assert labels.tolist() == [[3, 7][place] for place in expected.argmax(1)]
    trainer.export_for_inference(tmp_path / "inference.onnx")
    torch.testing.assert_close(torch.from_numpy(*run(tmp_path / "inference.onnx")), expected)
    again = ORTTrainer(tmp_path / "trained.onnx", "auto", optim.SGDConfig(lr=0.5), likelihood)
    torch.testing.assert_close(again.state_dict()["model"], trainer.state_dict()["model"])


def test_frozen_coefficients_stay_frozen_in_the_file(tmp_path: Path) -> None:
    frozen = "LinearClassifier.coefficients"
    options = ORTTrainerOptions({"utils": {"frozen_weights": [frozen]}})
    trainer = ORTTrainer(CLASSIFIER, "auto", optim.SGDConfig(lr=0.5), likelihood, options)
    trainer.train_step(X=X, label=LABEL)
    torch.testing.assert_close(trainer.get_parameter(frozen), COEFFICIENTS)
    trainer.save_as_onnx(tmp_path / "trained.onnx")
    assert not OnnxModule(tmp_path / "trained.onnx").get_parameter(frozen).requires_grad


@pytest.mark.parametrize("function", ["NONE", "SOFTMAX", "LOGISTIC"])
@pytest.mark.parametrize("op_type", ["LinearRegressor", "LinearClassifier"])
def test_linear_models_compute_what_onnx_runtime_computes(op_type: str, function: str) -> None:
    more: dict[str, Any] = {"targets": 2} if op_type == "LinearRegressor" else {"classlabels_ints": [0, 1]}
    names = ["y"] if op_type == "LinearRegressor" else ["label", "y"]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
    model = model_of([SCALER, linear(op_type, names, post_transform=function, **more)], outputs)
    torch.testing.assert_close(OnnxModule(model)(X)["y"].detach(), torch.from_numpy(*run(model)))


@pytest.mark.parametrize(
    "node",
    [
        ml("LinearRegressor", ["X"], ["y"], coefficients=[1.0, 2.0, 3.0]),
        ml("Normalizer", ["X"], ["y"], norm="MAX"),
        ml("Normalizer", ["X"], ["y"], norm="L1"),
        ml("Normalizer", ["X"], ["y"], norm="L2"),
        ml("Scaler", ["X"], ["y"], offset=[0.5], scale=[2.0]),
        ml("Binarizer", ["X"], ["y"], threshold=0.1),
        ml("Imputer", ["X"], ["y"], imputed_value_floats=[1.0, 2.0, 3.0], replaced_value_float=float("nan")),
        ml("Imputer", ["X"], ["y"], imputed_value_floats=[4.0], replaced_value_float=0.0),
        ml("FeatureVectorizer", ["X", "X"], ["y"], inputdimensions=[3, 3]),
        ml("ArrayFeatureExtractor", ["X", "columns"], ["y"]),
    ],
    ids=lambda node: node.op_type,
)
def test_what_pipelines_have_before_a_model(node: onnx.NodeProto) -> None:
    x = X.clone()
    x[0], x[1, 1] = 0, float("nan") if node.op_type == "Imputer" else 0.0
    columns = numpy_helper.from_array(np.array([[2, 0]]), "columns")
    model = model_of([node], [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], [columns])
    expected = torch.from_numpy(*run(model, {"X": x.numpy()}))
    torch.testing.assert_close(OnnxModule(model)(x)["y"].detach(), expected, equal_nan=True)


@pytest.mark.parametrize(
    "node",
    [
        # ONNX Runtime gives 1 - y and y, ONNX's reference -y and y.
        ml("LinearClassifier", ["X"], ["l", "y"], coefficients=[1.0] * 3, intercepts=[0.0], classlabels_ints=[0, 1]),
        # ONNX Runtime leaves out the function.
        ml("LinearRegressor", ["X"], ["y"], coefficients=[1.0] * 3, post_transform="LOGISTIC"),
        ml("LinearRegressor", ["X"], ["y"], coefficients=[1.0] * 6, targets=2, post_transform="PROBIT"),
        ml("Normalizer", ["X"], ["y"], norm="L3"),
    ],
)
def test_what_can_not_be_trained_is_named(node: onnx.NodeProto) -> None:
    model = model_of([node], [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])])
    with pytest.raises(ExportError, match=f"node '{node.op_type}', operator {node.op_type} of ai.onnx.ml"):
        OnnxModule(model)(X)


def test_an_output_that_is_there_as_tensor_and_map_is_there_once() -> None:
    probabilities = helper.make_tensor_value_info("probabilities", TensorProto.FLOAT, ["n", 2])
    model = model_of([*CLASSIFIER.graph.node], [probabilities, helper.make_value_info("map", MAP)])
    before = model.SerializeToString()
    assert OnnxModule(model).outputs == ("probabilities",)
    assert model.SerializeToString() == before


def test_a_map_as_input_is_an_error() -> None:
    words = helper.make_map_type_proto(TensorProto.STRING, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    graph = helper.make_graph(
        [ml("DictVectorizer", ["words"], ["y"], string_vocabulary=["a", "b"])],
        "g",
        [helper.make_value_info("words", words)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("ai.onnx.ml", 1)], ir_version=8)
    with pytest.raises(ExportError, match=r"the inputs \['words'\] of the ONNX model are maps"):
        OnnxModule(model)


def test_an_onnx_model_whose_only_input_is_the_label() -> None:
    nodes = [helper.make_node("Relu", ["W"], ["scores"])]
    outputs = [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [6, 2])]
    graph = helper.make_graph(nodes, "g", [], outputs, [numpy_helper.from_array(X[:, :2].numpy(), "W")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    trainer = ORTTrainer(model, "auto", optim.SGDConfig(lr=0.5), "cross_entropy", ORTTrainerOptions(OPTIONS))
    weight = X[:, :2].clone().requires_grad_()
    for _ in range(2):
        expected = F.cross_entropy(weight.relu(), LABEL)
        torch.testing.assert_close(trainer.train_step(label=LABEL)[0], expected.detach())
        weight.data -= 0.5 * torch.autograd.grad(expected, weight)[0]
