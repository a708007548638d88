"""Each training operator of onnxruntime-training, written in ONNX's own, computes what PyTorch computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ort_trainer.engine.ort import InferenceSession
from ort_trainer.upstream.models import step_model, to_bytes
from ort_trainer.upstream.operators import OPERATORS, RENAMED

Tensors = list[torch.Tensor]
DOMAIN = "com.microsoft"
R = np.random.default_rng(0)


def x(*shape: int) -> torch.Tensor:
    return torch.tensor(R.standard_normal(shape), dtype=torch.float32)


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def sizes(value: torch.Tensor) -> torch.Tensor:
    return ints(*value.shape)


def gradients(function: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
    """Returns a random gradient of the output, and the inputs' gradients from it."""
    leaves = [value.clone().requires_grad_() for value in inputs]
    output = function(*leaves)
    given = x(*output.shape)
    return given, list(torch.autograd.grad(output, leaves, given))


def activation(function: Callable[[torch.Tensor], torch.Tensor], by_output: bool) -> tuple[Tensors, Tensors]:
    given = x(3, 4)
    dy, expected = gradients(function, given)
    return [dy, function(given) if by_output else given], expected


def biased(function: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Tensors, Tensors]:
    given, bias = x(3, 4), x(4)
    dy, expected = gradients(function, given + bias)
    return [dy, given, bias], expected


def quick_gelu(value: torch.Tensor) -> torch.Tensor:
    return value * torch.sigmoid(1.702 * value)


def fast_gelu(value: torch.Tensor) -> torch.Tensor:
    return F.gelu(value, approximate="tanh")


def norm(centred: bool, invertible: bool = False) -> tuple[Tensors, Tensors]:
    given, scale, bias = x(2, 3, 5), x(5), x(5)
    if centred:
        dy, expected = gradients(lambda a, b, c: F.layer_norm(a, (5,), b, c), given, scale, bias)
        mean = given.mean(-1, keepdim=True)
        inverse = (given.var(-1, unbiased=False, keepdim=True) + 1e-5).rsqrt()
        if invertible:
            return [dy, F.layer_norm(given, (5,), scale, bias), scale, bias, inverse], expected
        return [dy, given, scale, mean, inverse], expected
    dy, expected = gradients(lambda a, b: F.rms_norm(a, (5,), b, 1e-5), given, scale)
    return [dy, given, scale, (given.square().mean(-1, keepdim=True) + 1e-5).rsqrt()], expected


def batch_norm() -> tuple[Tensors, Tensors]:
    given, scale, bias = x(4, 3, 2, 2), x(3), x(3)
    dy, expected = gradients(lambda a, b, c: F.batch_norm(a, None, None, b, c, True), given, scale, bias)
    flat = given.transpose(0, 1).flatten(1)
    return [dy, given, scale, flat.mean(1), (flat.var(1, unbiased=False) + 1e-5).rsqrt()], expected


def batch_norm_forward() -> tuple[Tensors, Tensors]:
    given, scale, bias, mean, variance = x(4, 3, 2, 2), x(3), x(3), x(3), x(3).abs()
    flat = given.transpose(0, 1).flatten(1)
    own, spread = flat.mean(1), flat.var(1, unbiased=False)
    output = F.batch_norm(given, None, None, scale, bias, True)
    return [given, scale, bias, mean, variance], [output, mean * 0.9 + own * 0.1, variance * 0.9 + spread * 0.1, own]


def convolution(transposed: bool = False, **settings: Any) -> tuple[Tensors, Tensors]:
    group = settings.get("groups", 1)
    given = x(2, 4, 9, 7)
    weight = x(4, 6 // group, 3, 2) if transposed else x(6, 4 // group, 3, 2)
    function: Any = F.conv_transpose2d if transposed else F.conv2d
    dy, expected = gradients(lambda a, b, c: function(a, b, c, **settings), given, weight, x(6))
    return [dy, given, weight], expected


def cross_entropy(reduction: str, weighted: bool = False, ignored: int | None = None) -> tuple[Tensors, Tensors]:
    scores, labels = x(5, 4, 2), torch.tensor(R.integers(0, 4, (5, 2)))
    weights = x(4).abs() if weighted else None
    if ignored is not None:
        labels[0, 0] = labels[3, 1] = ignored
    dy, expected = gradients(
        lambda a: F.cross_entropy(
            a, labels, weights, ignore_index=-7 if ignored is None else ignored, reduction=reduction
        ),
        scores,
    )
    return [dy, scores.log_softmax(1), labels, *([] if weights is None else [weights])], expected


def narrow_labels() -> tuple[Tensors, Tensors]:
    (dy, scores, labels), expected = cross_entropy("mean", False, -1)
    return [dy, scores, labels.int()], expected


def cross_entropy_forward() -> tuple[Tensors, Tensors]:
    scores, labels = x(5, 4), ints(1, 3, 0, 2, 2)
    return [scores, labels], [F.cross_entropy(scores, labels), scores.log_softmax(1)]


def max_pool() -> tuple[Tensors, Tensors]:
    given = x(2, 3, 6, 5)
    dy, expected = gradients(lambda a: F.max_pool2d(a, 3, 2, 1), given)
    return [given, dy], [F.max_pool2d(given, 3, 2, 1), *expected]


def average_pool(**settings: Any) -> tuple[Tensors, Tensors]:
    given = x(2, 3, 7, 5)
    dy, expected = gradients(lambda a: F.avg_pool2d(a, **settings), given)
    return [dy, given], expected


def gather(axis: int, *indices: Any) -> tuple[Tensors, Tensors]:
    given, rows = x(4, 5, 3), torch.tensor(indices if len(indices) > 1 else indices[0])
    shape = [*given.shape[:axis], *rows.shape, *given.shape[axis:][1:]]
    dy, expected = gradients(lambda a: a.index_select(axis, rows.flatten()).reshape(shape), given)
    return [sizes(given), rows, dy], expected


def gather_elements() -> tuple[Tensors, Tensors]:
    given, places = x(4, 5), ints([0, 0, 3], [1, 2, 2], [4, 0, 0], [1, 1, 1])
    dy, expected = gradients(lambda a: a.gather(1, places), given)
    return [dy, sizes(given), places], expected


def gather_nd(batch_dims: int) -> tuple[Tensors, Tensors]:
    given = x(2, 3, 4)
    places = ints([[0, 3], [2, 1], [0, 3]], [[1, 1], [2, 2], [1, 1]]) if batch_dims else ints([0, 2], [1, 1], [0, 2])
    if batch_dims:
        dy, expected = gradients(lambda a: torch.stack([a[b, places[b, :, 0], places[b, :, 1]] for b in (0, 1)]), given)
    else:
        dy, expected = gradients(lambda a: a[places[:, 0], places[:, 1]], given)
    return [sizes(given), places, dy], expected


def slices() -> tuple[Tensors, Tensors]:
    given = x(5, 6)
    dy, expected = gradients(lambda a: a[1:4].flip(1)[:, 0:5:2], given)
    return [dy, sizes(given), ints(1, -1), ints(4, -6), ints(0, 1), ints(1, -2)], expected


def division() -> tuple[Tensors, Tensors]:
    a, b = x(3, 4), x(1, 4).abs() + 1
    dy, expected = gradients(lambda c, d: c / d, a, b)
    return [dy, a, b], expected


def dropout(training: bool) -> tuple[Tensors, Tensors]:
    dy, mask = x(3, 4), torch.tensor(R.integers(0, 2, (3, 4)) > 0)
    expected = torch.where(mask, dy / 0.75, 0.0) if training else dy
    return [dy, mask, torch.tensor(0.25), torch.tensor(training)], [expected]


def product() -> tuple[Tensors, Tensors]:
    a, b = x(2, 3, 4, 5), x(2, 3, 6, 4)
    return [a, b], [0.5 * a.transpose(-1, -2) @ b.transpose(-1, -2)]


def batch_product() -> tuple[Tensors, Tensors]:
    a, b = x(4, 2, 3, 5), x(2, 3, 5, 6)
    return [a, b], [a.permute(1, 2, 0, 3) @ b]


def fake_quantized() -> tuple[Tensors, Tensors]:
    given, scale, zero = x(3, 4) * 4, torch.tensor(0.1), torch.tensor(20.0)
    expected = torch.fake_quantize_per_tensor_affine(given, 0.1, 20, 0, 31)
    levels = torch.round(given / 0.1) + 20
    return [given, scale, zero], [expected, (levels >= 0) & (levels <= 31)]


def elementwise(function: Callable[..., Any], count: int = 1) -> tuple[Tensors, Tensors]:
    inputs = [x(3, 4) for _ in range(count)]
    found = function(*inputs)
    return inputs, list(found) if isinstance(found, tuple) else [found]


CASES: dict[str, tuple[str, dict[str, Any], tuple[Tensors, Tensors]]] = {
    "relu": ("ReluGrad", {}, activation(torch.relu, True)),
    "leaky relu": ("LeakyReluGrad", {"alpha": 0.2}, activation(lambda a: F.leaky_relu(a, 0.2), True)),
    "sigmoid": ("SigmoidGrad", {}, activation(torch.sigmoid, True)),
    "tanh": ("TanhGrad", {}, activation(torch.tanh, True)),
    "gelu": ("Gelu", {}, elementwise(F.gelu)),
    "gelu and bias": ("BiasGelu", {}, elementwise(lambda a, b: F.gelu(a + b), 2)),
    "gradient of gelu": ("GeluGrad", {}, activation(F.gelu, False)),
    "gradient of gelu and bias": ("BiasGeluGrad_dX", {}, biased(F.gelu)),
    "fast gelu": ("FastGelu", {}, elementwise(fast_gelu)),
    "fast gelu and bias": ("FastGelu", {}, elementwise(lambda a, b: fast_gelu(a + b), 2)),
    "gradient of fast gelu": ("FastGeluGrad", {}, activation(fast_gelu, False)),
    "gradient of fast gelu and bias": ("BiasFastGeluGrad_dX", {}, biased(fast_gelu)),
    "quick gelu": ("QuickGelu", {}, elementwise(quick_gelu)),
    "gradient of quick gelu": ("QuickGeluGrad", {}, activation(quick_gelu, False)),
    "softmax": ("SoftmaxGrad_13", {"axis": 0}, activation(lambda a: a.softmax(0), True)),
    "log softmax": ("LogSoftmaxGrad_13", {}, activation(lambda a: a.log_softmax(-1), True)),
    "softmax before opset 13": (
        "SoftmaxGrad",
        {"axis": 0},
        activation(lambda a: a.flatten().softmax(0).view(3, 4), True),
    ),
    "log softmax before opset 13": ("LogSoftmaxGrad", {}, activation(lambda a: a.log_softmax(1), True)),
    "dropout": ("DropoutGrad", {}, dropout(True)),
    "dropout in evaluation": ("DropoutGrad", {}, dropout(False)),
    "scale": ("Scale", {"scale_down": 1}, ([a := x(3), torch.tensor(4.0)], [a / 4])),
    "scaled sum": ("ScaledSum", {"scale_0": 2.0, "scale_1": 3.0}, elementwise(lambda a, b: 2 * a + 3 * b, 2)),
    "batch scale": ("BatchScale", {"scale_0": 2.0, "scale_1": 3.0}, elementwise(lambda a: (2 * a, 3 * a))),
    "division": ("DivGrad", {}, division()),
    "axes of a broadcast": ("BroadcastGradientArgs", {}, ([ints(3, 1, 5), ints(2, 1, 4, 5)], [ints(0, 2), ints(1)])),
    "sum": ("ReduceSumTraining", {"keepdims": 0}, ([a := x(3, 4), ints(1)], [a.sum(1)])),
    "product": ("FusedMatMul", {"transA": 1, "transB": 1, "alpha": 0.5}, product()),
    "product of batches": ("FusedMatMul", {"transBatchA": 1}, batch_product()),
    "fake quantization": ("FakeQuant", {"quant_max": 31}, fake_quantized()),
    "gradient of fake quantization": (
        *("FakeQuantGrad", {}),
        ([a := x(3), torch.tensor([True, False, True])], [a * torch.tensor([1.0, 0, 1])]),
    ),
    "loss": ("SoftmaxCrossEntropyLossInternal", {}, cross_entropy_forward()),
    "cross entropy, mean": ("SoftmaxCrossEntropyLossGrad", {}, cross_entropy("mean")),
    "cross entropy, sum": ("SoftmaxCrossEntropyLossInternalGrad", {"reduction": "sum"}, cross_entropy("sum")),
    "cross entropy, each": ("SoftmaxCrossEntropyLossGrad", {"reduction": "none"}, cross_entropy("none")),
    "cross entropy, weights and ignored labels": (
        *("SoftmaxCrossEntropyLossGrad", {"ignore_index": -1}),
        cross_entropy("mean", True, -1),
    ),
    "cross entropy, labels of 32 bits": ("SoftmaxCrossEntropyLossGrad", {"ignore_index": -1}, narrow_labels()),
    "cross entropy, an ignored class": (
        "SoftmaxCrossEntropyLossGrad",
        {"ignore_index": 2},
        cross_entropy("mean", False, 2),
    ),
    "layer norm": ("LayerNormalizationGrad", {"axis": -1, "epsilon": 1e-5}, norm(True)),
    "invertible layer norm": ("InvertibleLayerNormalizationGrad", {"axis": 2}, norm(True, True)),
    "gradient of rms norm": ("SimplifiedLayerNormalizationGrad", {}, norm(False)),
    "rms norm": (
        *("SimplifiedLayerNormalization", {"epsilon": 1e-5}),
        ([a := x(2, 5), b := x(5)], [F.rms_norm(a, (5,), b, 1e-5)]),
    ),
    "gradient of batch norm": ("BatchNormalizationGrad", {"epsilon": 1e-5}, batch_norm()),
    "batch norm": ("BatchNormInternal", {}, batch_norm_forward()),
    "convolution": ("ConvGrad", {"pads": [1, 0, 1, 0], "strides": [2, 3]}, convolution(padding=(1, 0), stride=(2, 3))),
    "convolution, groups and dilation": (
        *("ConvGrad", {"dilations": [2, 1], "group": 2, "kernel_shape": [3, 2]}),
        convolution(dilation=(2, 1), groups=2),
    ),
    "transposed convolution": (
        *("ConvTransposeGrad", {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]}),
        convolution(True, stride=2, padding=1, output_padding=1),
    ),
    "transposed convolution, groups": ("ConvTransposeGrad", {"group": 2}, convolution(True, groups=2)),
    "average pool": ("AveragePoolGrad", {"kernel_shape": [2, 2], "strides": [2, 2]}, average_pool(kernel_size=2)),
    "average pool with padding": (
        *("AveragePoolGrad", {"kernel_shape": [3, 2], "pads": [1, 1, 1, 1], "strides": [2, 1]}),
        average_pool(kernel_size=(3, 2), stride=(2, 1), padding=1, count_include_pad=False),
    ),
    "average pool that counts its padding": (
        *("AveragePoolGrad", {"kernel_shape": [2, 2], "pads": [1, 1, 1, 1], "count_include_pad": 1, "strides": [2, 2]}),
        average_pool(kernel_size=2, padding=1),
    ),
    "gather": ("GatherGrad", {}, gather(0, [1, 1, 3], [0, 1, 2])),
    "gather, axis 1": ("GatherGrad", {"axis": 1}, gather(1, [1, 4, 1])),
    "gather, last axis": ("GatherGrad", {"axis": -1}, gather(2, [2, 0, 2])),
    "gather one": ("GatherGrad", {"axis": 1}, gather(1, 3)),
    "gather elements": ("GatherElementsGrad", {"axis": 1}, gather_elements()),
    "gather in several dimensions": ("GatherNDGrad", {}, gather_nd(0)),
    "gather in a batch": ("GatherNDGrad", {"batch_dims": 1}, gather_nd(1)),
    "slice": ("SliceGrad", {}, slices()),
    "concatenate": ("ConcatTraining", {"axis": 1}, ([a := x(2, 3), b := x(2, 4)], [torch.cat([a, b], 1), ints(3, 4)])),
    "split": ("SplitTraining", {"axis": 1}, ([a := x(2, 5), ints(2, 3)], list(a.split([2, 3], 1)))),
    "triangle": ("Trilu", {"upper": 0}, ([a := x(3, 4)], [a.tril()])),
}


def run(nodes: list[Any], inputs: dict[str, torch.Tensor], outputs: list[str]) -> list[np.ndarray[Any, Any]]:
    """Reads a model of some nodes as upstream's evaluation model, and runs it."""
    make, kind = onnx.helper.make_tensor_value_info, onnx.helper.np_dtype_to_tensor_dtype
    graph = onnx.helper.make_graph(
        nodes,
        "graph",
        [make(name, kind(value.numpy().dtype), list(value.shape)) for name, value in inputs.items()],
        [make(name, onnx.TensorProto.FLOAT, None) for name in outputs],
    )
    for value in graph.output:
        value.ClearField("type")
    imports = [onnx.helper.make_opsetid("", 18), onnx.helper.make_opsetid("com.microsoft", 1)]
    given = onnx.helper.make_model(graph, opset_imports=imports).SerializeToString()
    data = to_bytes(*step_model(given, "m", "evaluation", ()))
    assert not [node for node in onnx.ModelProto.FromString(data).graph.node if node.domain]
    return InferenceSession(data).run(outputs, {name: value.numpy() for name, value in inputs.items()})  # type: ignore[no-any-return]


def check(found: list[np.ndarray[Any, Any]], expected: Tensors) -> None:
    for value, wanted in zip(found, expected, strict=True):
        assert value.dtype == wanted.numpy().dtype
        np.testing.assert_allclose(value, wanted.numpy(), rtol=1e-4, atol=2e-6)


@pytest.mark.parametrize("name", CASES)
def test_an_operator(name: str) -> None:
    op_type, attributes, (values, expected) = CASES[name]
    inputs = {f"in_{number}": value for number, value in enumerate(values)}
    names = list(inputs)
    outputs = [f"out_{number}" for number in range(len(expected))]
    if op_type == "AveragePoolGrad":  # it has no input for the image, whose name is in that of its output
        names, outputs = names[:1], ["in_1_grad"]
    node = onnx.helper.make_node(op_type, names, outputs, domain="com.microsoft", **attributes)
    check(run([node], inputs, outputs), expected)


def test_the_gradient_of_a_max_pool() -> None:
    (given, dy), expected = max_pool()
    window = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}
    nodes = [
        onnx.helper.make_node("MaxPool", ["x"], ["y", "places"], **window),
        onnx.helper.make_node("MaxPoolGrad", ["dy", "places"], ["x_grad"], **window),
    ]
    check(run(nodes, {"x": given, "dy": dy}, ["y", "x_grad"]), expected)


def test_a_slice_with_steps_and_no_axes() -> None:
    given = x(5, 6)
    dy, expected = gradients(lambda a: a[0:5:2, 1:6], given)
    inputs = {"dy": dy, "shape": sizes(given), "starts": ints(0, 1), "ends": ints(5, 6), "steps": ints(2, 1)}
    node = onnx.helper.make_node("SliceGrad", ["dy", "shape", "starts", "ends", "", "steps"], ["dx"], domain=DOMAIN)
    check(run([node], inputs, ["dx"]), expected)


def test_an_ignored_label_as_a_constant() -> None:
    scores, labels = x(3, 4), ints(1, 3, 0)
    nodes = [
        onnx.helper.make_node("Constant", [], ["ignored"], value_int=3),
        onnx.helper.make_node(
            *("SoftmaxCrossEntropyLossInternal", ["scores", "labels", "", "ignored"], ["loss", "log"]),
            domain="com.microsoft",
        ),
    ]
    (loss,) = run(nodes, {"scores": scores, "labels": labels}, ["loss"])
    assert loss == pytest.approx(F.cross_entropy(scores, labels, ignore_index=3).item(), rel=1e-6)


STEPS, BATCH, INPUTS, HIDDEN = 4, 3, 5, 6


def recurrent(kind: str, order: tuple[int, ...], full: bool) -> tuple[dict[str, torch.Tensor], Tensors, dict[str, Any]]:
    """Returns the inputs of both operators, PyTorch's results, and the gradients of its results.

    Args:
        kind: LSTM or GRU.
        order: The places in PyTorch's weights of the gates in their order in ONNX.
        full: Whether there are biases, first states, and gradients of all results.
    """
    torch.manual_seed(4)
    layer: Any = getattr(nn, kind)(INPUTS, HIDDEN, bias=full)

    def turned(weight: torch.Tensor) -> torch.Tensor:
        return torch.cat([weight.chunk(len(order))[place] for place in order])

    inputs = {"X": x(STEPS, BATCH, INPUTS)}
    inputs |= {"W": turned(layer.weight_ih_l0)[None], "R": turned(layer.weight_hh_l0)[None]}
    first = {name: x(1, BATCH, HIDDEN) for name in (("H0", "C0") if kind == "LSTM" else ("H0",))} if full else {}
    if full:
        inputs["B"] = torch.cat([turned(layer.bias_ih_l0), turned(layer.bias_hh_l0)])[None]
    leaves = [value.detach().requires_grad_() for value in (inputs["X"], *first.values())]
    states = tuple(leaves[1:]) if kind == "LSTM" else (leaves[1] if full else None)
    every, last = layer(leaves[0], states if full else None)
    results = [every[:, None], *(last if kind == "LSTM" else [last])]
    given = [x(*value.shape) for value in results]
    total = sum((value * gradient).sum() for value, gradient in zip(results, given, strict=True))
    total.backward()
    weights = [turned(layer.weight_ih_l0.grad)[None], turned(layer.weight_hh_l0.grad)[None]]
    if full:
        weights.append(torch.cat([turned(layer.bias_ih_l0.grad), turned(layer.bias_hh_l0.grad)])[None])
    gradients = dict(zip(("dX", "dW", "dR", "dB"), [leaves[0].grad, *weights], strict=False))
    gradients |= {f"d{name}": leaf.grad for name, leaf in zip(first, leaves[1:], strict=True)}
    return {**inputs, **first}, [value.detach() for value in results], {"given": given, "expected": gradients}


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_layers(kind: str, full: bool) -> None:
    order = (0, 3, 1, 2) if kind == "LSTM" else (1, 0, 2)
    inputs, results, gradients = recurrent(kind, order, full)
    inputs = {name: value.detach() for name, value in inputs.items()}
    settings = {"hidden_size": HIDDEN, **({} if kind == "LSTM" else {"linear_before_reset": 1})}
    make = onnx.helper.make_node
    optional = [name if name in inputs else "" for name in ("B", "SL", "H0", *(["C0"] if kind == "LSTM" else []))]
    forward = ["all", "last", "cell", "cells", "gates"] if kind == "LSTM" else ["all", "last", "gates"]
    given = {f"d_{name}": value for name, value in zip(forward, gradients["given"], strict=False)}
    kept = ["all", "cells", "gates"] if kind == "LSTM" else ["all", "gates"]
    taken = ["X", "W", "R", *(optional[1:] if kind == "LSTM" else optional), *kept, *given]
    outputs = ["dX", "dW", "dR", "dB", "dH0", "dC0"][: 6 if kind == "LSTM" else 5]
    nodes = [
        make(f"{kind}Training", ["X", "W", "R", *optional], forward, domain=DOMAIN, **settings),
        make(f"{kind}Grad", taken, outputs, domain=DOMAIN, **settings),
    ]
    wanted = gradients["expected"]
    found = run(nodes, {**inputs, **given}, [*forward[: len(results)], *wanted])
    check(found, [*results, *wanted.values()])


def test_a_gru_that_resets_before_the_product() -> None:
    """ONNX's default, which PyTorch's layer does not have."""
    inputs = {"X": x(STEPS, BATCH, INPUTS), "W": x(1, 3 * HIDDEN, INPUTS), "R": x(1, 3 * HIDDEN, HIDDEN) / 3}
    inputs |= {"B": x(1, 6 * HIDDEN), "H0": x(1, BATCH, HIDDEN)}
    leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
    w, (of_inputs, of_states) = leaves["W"][0], leaves["B"][0].chunk(2)
    rz, rr, rn = leaves["R"][0].chunk(3)
    h, every = leaves["H0"][0], []
    for step in leaves["X"]:
        xz, xr, xn = (step @ w.T + of_inputs).chunk(3, 1)
        bz, br, bn = of_states.chunk(3)
        z, reset = torch.sigmoid(xz + h @ rz.T + bz), torch.sigmoid(xr + h @ rr.T + br)
        n = torch.tanh(xn + (reset * h) @ rn.T + bn)
        h = (1 - z) * n + z * h
        every.append(h)
    states = torch.stack(every)[:, None]
    given = x(*states.shape)
    states.backward(given)
    make = onnx.helper.make_node
    nodes = [
        make("GRUTraining", ["X", "W", "R", "B", "", "H0"], ["all", "last", "gates"], domain=DOMAIN),
        make("GRUGrad", ["X", "W", "R", "B", "", "H0", "all", "gates", "d_all"], ["dX", "dW", "dR", "dB", "dH0"],
             domain=DOMAIN),
    ]  # fmt: skip
    found = run(nodes, {**inputs, "d_all": given}, ["all", "dX", "dW", "dR", "dB", "dH0"])
    check(found, [states.detach(), *(leaf.grad for leaf in leaves.values())])


def test_a_recurrent_layer_in_both_directions_is_refused() -> None:
    node = onnx.helper.make_node("GRUTraining", ["X", "W", "R"], ["y"], domain=DOMAIN, direction="bidirectional")
    with pytest.raises(ValueError, match="another direction than forward"):
        run([node], {"X": x(4, 3, 5), "W": x(2, 18, 5), "R": x(2, 18, 6)}, ["y"])


def test_every_operator_has_a_case() -> None:
    covered = {op_type for op_type, *_ in CASES.values()} | {"MaxPoolGrad"}
    covered |= {f"{kind}{part}" for kind in ("LSTM", "GRU") for part in ("Training", "Grad")}
    assert covered == OPERATORS.keys() | RENAMED.keys()


@pytest.mark.parametrize(
    "attributes, said",
    [({"auto_pad": "SAME_UPPER"}, "auto_pad is 'SAME_UPPER'"), ({"spread": 2}, "unexpected keyword argument 'spread'")],
)
def test_an_unknown_attribute_is_named(attributes: dict[str, Any], said: str) -> None:
    node = onnx.helper.make_node("ConvGrad", ["dy", "x", "w"], ["dx"], domain="com.microsoft", **attributes)
    with pytest.raises(ValueError, match=rf"ConvGrad \(.*{said}"):
        run([node], {"dy": x(1, 1, 2, 2), "x": x(1, 1, 3, 3), "w": x(1, 1, 2, 2)}, ["dx"])
