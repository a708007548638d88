"""The importer's operators where the node tests of the onnx package say little, compared with ONNX Runtime."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from ort_trainer.core.errors import ExportError
from ort_trainer.engine.ort import InferenceSession
from ort_trainer.onnx.module import OnnxModule

_random = np.random.default_rng(0)


def _f(*shape: int) -> Any:
    return _random.normal(size=shape).astype(np.float32)


def _model(
    op_type: str, inputs: list[Any], outputs: int, opset: int, weights: dict[int, Any], **attributes: Any
) -> Any:
    names = ["" if value is None else f"in{i}" for i, value in enumerate(inputs)]
    results = [f"out{i}" for i in range(outputs)]
    infos = [
        helper.make_tensor_value_info(names[i], helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
        for i, value in enumerate(inputs)
        if value is not None and i not in weights
    ]
    graph = helper.make_graph(
        [helper.make_node(op_type, names, results, **attributes)],
        "graph",
        infos,
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in results],
        [numpy_helper.from_array(value, names[i]) for i, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def _check(op_type: str, inputs: list[Any], outputs: int = 1, opset: int = 18, **attributes: Any) -> None:
    model = _model(op_type, inputs, outputs, opset, {}, **attributes)
    feeds = {f"in{i}": value for i, value in enumerate(inputs) if value is not None}
    expected = InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
    found = OnnxModule(model)(**{name: torch.from_numpy(value) for name, value in feeds.items()})
    for result, reference in zip(found.values(), expected, strict=True):
        np.testing.assert_allclose(result.numpy(), reference, rtol=1e-4, atol=1e-5)


_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "RNN": ("RNN", {}),
    "RNN, relu": ("RNN", {"activations": ["Relu"]}),
    "RNN, parameters": (
        "RNN",
        {"activations": ["ScaledTanh"], "activation_alpha": [0.7], "activation_beta": [1.3], "clip": 0.8},
    ),
    "GRU": ("GRU", {}),
    "GRU, linear": ("GRU", {"linear_before_reset": 1}),
    "GRU, functions": (
        "GRU",
        {"activations": ["HardSigmoid", "LeakyRelu"], "activation_alpha": [0.3, 0.05], "activation_beta": [0.4]},
    ),
    "LSTM": ("LSTM", {}),
    # With clip, ONNX Runtime differs from ONNX: it does not clip what goes into the last activation, the cell.
    "LSTM, coupled gates": ("LSTM", {"input_forget": 1}),
    "LSTM, peepholes": ("LSTM", {"peepholes": True}),
}


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("layer", _LAYERS)
def test_recurrent_layers(layer: str, direction: str) -> None:
    op_type, settings = _LAYERS[layer]
    count, gates, size = 2 if direction == "bidirectional" else 1, _GATES[op_type], 3
    attributes = {k: v * count if isinstance(v, list) else v for k, v in settings.items() if k != "peepholes"}
    lengths = np.array([5, 2, 4], np.int32)
    for with_lengths, with_state in itertools.product((False, True), repeat=2):
        inputs = [_f(5, 3, 2), _f(count, gates * size, 2), _f(count, gates * size, size), _f(count, 2 * gates * size)]
        inputs += [lengths if with_lengths else None, _f(count, 3, size) if with_state else None]
        if op_type == "LSTM":
            inputs += [_f(count, 3, size) if with_state else None]
            inputs += [_f(count, 3 * size)] if "peepholes" in settings else []
        outputs = 3 if op_type == "LSTM" else 2
        _check(op_type, inputs, outputs, 14, hidden_size=size, direction=direction, **attributes)


@pytest.mark.parametrize(
    "attributes",
    [
        {"output_shape": [9, 10], "strides": [2, 2]},
        {"output_shape": [8, 8], "strides": [2, 2], "auto_pad": "SAME_UPPER"},
        {"auto_pad": "SAME_LOWER", "strides": [3, 2]},
        {"pads": [1, 0, 0, 2], "strides": [2, 2], "output_padding": [1, 1]},
        {"dilations": [2, 1], "pads": [1, 1, 1, 1]},
    ],
)
def test_transposed_convolution(attributes: dict[str, Any]) -> None:
    _check("ConvTranspose", [_f(2, 4, 4, 4), _f(4, 2, 3, 3), _f(4)], group=2, **attributes)


def test_greatest_of_regions() -> None:
    regions = np.array([[0, 1, 1, 6, 5], [1, 0, 2, 3, 7], [1, 5, 5, 5, 5]], np.float32)
    _check("MaxRoiPool", [_f(2, 3, 8, 8), regions], pooled_shape=[2, 3], spatial_scale=1.0)


@pytest.mark.parametrize("opset", [9, 15])
def test_running_statistics_are_updated_in_training_mode(opset: int) -> None:
    x, mean, variance = _f(4, 3, 5), _f(3), _f(3) ** 2
    mode = {"training_mode": 1} if opset > 9 else {}
    weights = {1: _f(3), 2: _f(3), 3: mean, 4: variance}
    inputs = [x, *weights.values()]
    module = OnnxModule(_model("BatchNormalization", inputs, 3 if mode else 5, opset, weights, momentum=0.8, **mode))
    module.train()
    module(torch.from_numpy(x))
    # ONNX's variance is that of the population.
    expected = 0.8 * mean + 0.2 * x.mean((0, 2)), 0.8 * variance + 0.2 * x.var((0, 2))
    for name, value in zip(("in3", "in4"), expected, strict=True):
        np.testing.assert_allclose(module.get_buffer(name).numpy(), value, rtol=1e-5)
    module.eval()
    y = module(torch.from_numpy(x))["out0"].detach().numpy()
    shape = (3, 1)
    scale = weights[1] / np.sqrt(expected[1] + 1e-5)
    normalized = (x - expected[0].reshape(shape)) * scale.reshape(shape) + weights[2].reshape(shape)
    np.testing.assert_allclose(y, normalized, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(module.get_buffer("in3").numpy(), expected[0], rtol=1e-5)


def test_dropout_in_training_and_evaluation_mode() -> None:
    weights = {1: np.array(0.25, np.float32), 2: np.array(True)}
    module = OnnxModule(_model("Dropout", [np.ones(4000, np.float32), *weights.values()], 1, 13, weights))
    x = torch.ones(4000)
    torch.manual_seed(0)
    y = module(x)["out0"]
    assert set(y.unique().tolist()) == {0.0, float(torch.tensor(1 / 0.75))}
    assert 0.2 < (y == 0).float().mean() < 0.3
    torch.manual_seed(0)
    assert torch.equal(y, torch.nn.functional.dropout(x, 0.25))
    assert torch.equal(module.eval()(x)["out0"], x)


@pytest.mark.parametrize(
    ("op_type", "inputs", "attributes", "message"),
    [
        ("RandomNormalLike", [_f(3)], {"seed": 1.0}, "RandomNormalLike of ai.onnx 18: with a seed it would draw"),
        ("Conv", [_f(1, 2, 3, 3, 3, 3), _f(2, 2, 1, 1, 1, 1)], {}, "has 4 spatial dimensions"),
        ("Conv", [_f(1, 2, 3), _f(2, 2, 2)], {"auto_pad": "SAME"}, "auto_pad is 'SAME', but must be"),
        ("Resize", [_f(1, 2, 3), None, np.ones(3, np.float32) * 2], {"nearest_mode": "up"}, "nearest_mode is 'up'"),
        ("LSTM", [_f(2, 1, 2), _f(1, 12, 2), _f(1, 12, 3)], {"hidden_size": 4}, "hidden_size is 4, but the weights"),
        ("RNN", [_f(2, 1, 2), _f(1, 3, 2), _f(1, 3, 3)], {"activations": ["Sin"]}, "activation function 'sin'"),
    ],
)
def test_refused(op_type: str, inputs: list[Any], attributes: dict[str, Any], message: str) -> None:
    module = OnnxModule(_model(op_type, inputs, 1, 18, {}, **attributes))
    with pytest.raises(ExportError, match=message):
        module(**{f"in{i}": torch.from_numpy(v) for i, v in enumerate(inputs) if v is not None})
