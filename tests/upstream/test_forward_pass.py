"""The forward pass of onnxruntime-training's models, in ONNX's own operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch.nn import functional as F

from ort_trainer.engine.ort import InferenceSession
from ort_trainer.upstream.models import forward_pass

Array = np.ndarray[Any, Any]
R = np.random.default_rng(0)


def x(*shape: int) -> Array:
    return R.standard_normal(shape).astype(np.float32)


def model(nodes: list[Any], inputs: dict[str, Array], outputs: list[str], opset: int = 18) -> bytes:
    make, kind = onnx.helper.make_tensor_value_info, onnx.helper.np_dtype_to_tensor_dtype
    given = [make(name, kind(value.dtype), list(value.shape)) for name, value in inputs.items()]
    graph = onnx.helper.make_graph(nodes, "g", given, [make(name, onnx.TensorProto.FLOAT, None) for name in outputs])
    for value in graph.output:
        value.ClearField("type")
    imports = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph, opset_imports=imports, ir_version=10).SerializeToString()


def run(nodes: list[Any], inputs: dict[str, Array], outputs: list[str], opset: int = 18) -> list[Array]:
    forward = forward_pass(model(nodes, inputs, outputs, opset), "m", "evaluation", ())
    assert {node.domain for node in forward.model.graph} == {""} == {*forward.model.opset_imports}
    session = InferenceSession(ir.to_proto(forward.model).SerializeToString())
    return session.run(outputs, inputs)  # type: ignore[no-any-return]


LAYER = [x(4, 3, 5), x(1, 24, 5), x(1, 24, 6), x(1, 48), None, x(1, 3, 6), x(1, 3, 6)]
GRU = [LAYER[0], *(value[:, : 18 * (1 + (value.ndim == 2))] for value in LAYER[1:4]), None, LAYER[5]]
# Upstream's operator: ONNX's, inputs, attributes, outputs, and how many of these only upstream's has.
COPIES: dict[str, tuple[str, list[Any], dict[str, Any], int, int]] = {
    "BatchNormInternal": ("BatchNormalization", [x(4, 3, 2), x(3), x(3), x(3), x(3) ** 2], {"training_mode": 1}, 3, 2),
    "ConcatTraining": ("Concat", [x(2, 3), x(2, 4)], {"axis": 1}, 1, 1),
    "GRUTraining": ("GRU", GRU, {"hidden_size": 6, "linear_before_reset": 1}, 2, 1),
    "LSTMTraining": ("LSTM", LAYER, {"hidden_size": 6, "input_forget": 0}, 3, 2),
    "ReduceSumTraining": ("ReduceSum", [x(2, 3), np.array([1])], {"keepdims": 0}, 1, 0),
    "SplitTraining": ("Split", [x(2, 5), np.array([2, 3])], {"axis": 1}, 2, 0),
    "Trilu": ("Trilu", [x(3, 4)], {"upper": 0}, 1, 0),
}


@pytest.mark.parametrize("name", COPIES)
def test_an_operator_for_training_is_onnxs(name: str) -> None:
    plain, values, attributes, count, more = COPIES[name]
    inputs = {f"in_{number}": value for number, value in enumerate(values) if value is not None}
    names = ["" if value is None else f"in_{number}" for number, value in enumerate(values)]
    outputs = [f"out_{number}" for number in range(count + more)]
    make = onnx.helper.make_node
    node = make(name, names, outputs, domain="com.microsoft", **attributes)
    session = InferenceSession(model([make(plain, names, outputs[:count], **attributes)], inputs, outputs[:count]))
    for found, expected in zip(run([node], inputs, outputs[:count]), session.run(None, inputs), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("opset", [12, 13, 18])
def test_older_opsets_and_misplaced_operators(opset: int) -> None:
    """Upstream writes its own LayerNormalization into ONNX's domain, which has one from opset 17."""
    inputs = {"x": x(2, 3), "scale": x(3), "bias": x(3)}
    nodes = [
        onnx.helper.make_node("LayerNormalization", list(inputs), ["y"], axis=-1),
        onnx.helper.make_node("ConcatTraining", ["y", "x"], ["z", "lengths"], domain="com.microsoft", axis=0),
    ]
    (found,) = run(nodes, inputs, ["z"], opset)
    given, scale, bias = map(torch.tensor, inputs.values())
    expected = torch.cat([F.layer_norm(given, (3,), scale, bias), given])
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-6)


def test_the_ignored_label_is_a_constant() -> None:
    scores, labels = x(3, 4), np.array([1, 3, 0])
    constant = onnx.helper.make_node("Constant", [], ["ignored"], value_int=3)
    loss = onnx.helper.make_node(
        *("SoftmaxCrossEntropyLossInternal", ["scores", "labels", "", "ignored"], ["loss", "log"]),
        domain="com.microsoft",
    )
    (found,) = run([constant, loss], {"scores": scores, "labels": labels}, ["loss"])
    expected = F.cross_entropy(torch.tensor(scores), torch.tensor(labels), ignore_index=3)
    assert found == pytest.approx(expected.item(), rel=1e-6)
    inputs = {"scores": scores, "labels": labels, "ignored": np.array(3)}
    with pytest.raises(ValueError, match="computes the label that its loss ignores"):
        run([loss], inputs, ["loss"])
