"""ONNX graphs of a seed: operators that train, with subgraphs, Constant nodes, quantization and a symbolic batch.

Numbers are doubles, so that finite differences are exact enough; only quantization has float32. A shape is a tuple, in
which ``"n"`` is the batch dimension. A new operator is a row of a table, or a method with ``@_family``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto
from onnx import helper as H
from onnx import numpy_helper as N

__all__ = ["Case", "Quantized", "draw"]

Shape = tuple[Any, ...]
_FAMILIES: list[Callable[[_Builder], None]] = []
# Functions of one number, as chains of operators that are finite and smooth almost everywhere.
_PLAIN = (
    *("Relu", "Sigmoid", "Tanh", "Abs", "Neg", "Softplus", "Erf", "Sin", "Cos", "Softsign", "Elu", "LeakyRelu", "Selu"),
    *("HardSigmoid", "HardSwish", "Identity", "Gelu", "Atan", "Mish", "Floor", "Sign", "Round", "Asinh"),
)
_UNARY: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in _PLAIN},
    "ThresholdedRelu": ("ThresholdedRelu", {"alpha": 0.3}),
    "Gelu, tanh": ("Gelu", {"approximate": "tanh"}),
}
_POSITIVE = ("Sqrt", "Log", "Reciprocal")
_BINARY = ("Add", "Sub", "Mul", "Max", "Min", "Mean", "Sum")
_REDUCTIONS = ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceSumSquare", "ReduceLogSumExp")


@dataclass(frozen=True)
class Quantized:
    """Nodes that quantize: from a value to another, by a scale and a zero point, at these positions in the graph."""

    x: str
    y: str
    scale: str
    zero: str
    limits: tuple[int, int]
    nodes: tuple[int, ...]


@dataclass
class Case:
    """A drawn model.

    Attributes:
        model: The model. Its only input is ``x``; the first output is the loss.
        weights: What has to be trained.
        x: A batch.
        quantized: Where it quantizes.
    """

    model: onnx.ModelProto
    weights: dict[str, np.ndarray[Any, Any]]
    x: np.ndarray[Any, Any]
    quantized: list[Quantized]

    def moved(self, directions: dict[str, Any], step: float) -> dict[str, Any]:
        """Returns the weights, moved along a direction."""
        return {name: value + step * directions[name] for name, value in self.weights.items()}


def _family(function: Callable[[_Builder], None]) -> Callable[[_Builder], None]:
    _FAMILIES.append(function)
    return function


@dataclass
class _Builder:
    """Grows a graph.

    Attributes:
        rng: Draws decisions.
        values: Name -> shape of what nodes may take.
        nodes: The nodes.
        initializers: The initializers.
        weights: The weights, wherever they stand.
    """

    rng: random.Random
    values: dict[str, Shape]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    weights: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    quantized: list[Quantized] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def name(self, prefix: str = "v") -> str:
        self.names.append(prefix)
        return f"{prefix}{len(self.names)}"

    def pick(self, fits: Callable[[Shape], bool] = lambda shape: True) -> str:
        """Returns a value, most likely a late one."""
        names = [name for name, shape in self.values.items() if fits(shape)][-4:]
        return self.rng.choice(names) if names else self.op("Flatten", ["x"], ("n", int(np.prod(self.values["x"][1:]))))

    def op(self, kind: str, inputs: Sequence[str], shape: Shape, attributes: Any = None, keep: bool = True) -> str:
        """Adds a node, and returns its output."""
        output = self.name()
        self.nodes.append(H.make_node(kind, inputs, [output], **(attributes or {})))
        if keep:
            self.values[output] = shape
        return output

    def numbers(self, *shape: int) -> np.ndarray[Any, Any]:
        return np.random.default_rng(self.rng.randrange(2**32)).normal(size=shape)

    def constant(self, value: Any) -> str:
        """Returns a value that is not trained, in a Constant node or an initializer."""
        array = np.asarray(value)
        if self.rng.random() < 0.5 and (array.dtype == np.int64 or not array.ndim):
            self.initializers.append(N.from_array(array, self.name("k")))
            return self.initializers[-1].name
        return self.op("Constant", [], (), {"value": N.from_array(array)}, keep=False)

    def weight(self, *shape: int, layer: bool = False) -> str:
        """Returns a weight: an initializer, or, if a layer takes it, perhaps a Constant node."""
        array = self.numbers(*shape) * 0.5
        if layer and self.rng.random() < 0.3:
            name = self.op("Constant", [], (), {"value": N.from_array(array)}, keep=False)
        else:
            name = self.name("w")
            self.initializers.append(N.from_array(array, name))
        self.weights[name] = array
        return name

    def body(self, grow: Callable[[_Builder], tuple[list[str], list[str]]]) -> onnx.GraphProto:
        """Returns a body, whose weights are its own initializers."""
        inner = _Builder(self.rng, {}, weights=self.weights, names=self.names)
        inputs, outputs = grow(inner)
        kinds = {"i": TensorProto.INT64, "c": TensorProto.BOOL}

        def info(name: str) -> onnx.ValueInfoProto:
            shape = [] if name[0] in kinds else None
            return H.make_tensor_value_info(name, kinds.get(name[0], TensorProto.DOUBLE), shape)

        infos = [*map(info, inputs)], [*map(info, outputs)]
        return H.make_graph(inner.nodes, self.name("body"), *infos, inner.initializers)


def _sizes(shape: Shape) -> bool:
    return len(shape) > 1 and shape[0] == "n" and all(size != "n" for size in shape[1:])


@_family
def _unary(g: _Builder) -> None:
    x = g.pick()
    kind, attributes = _UNARY[g.rng.choice(list(_UNARY))]
    g.op(kind, [x], g.values[x], attributes)


@_family
def _positive(g: _Builder) -> None:
    x = g.pick()
    square = g.op("Mul", [x, x], (), keep=False)
    above = g.op("Add", [square, g.constant(np.float64(0.5))], (), keep=False)
    g.op(g.rng.choice(_POSITIVE), [above], g.values[x])


@_family
def _binary(g: _Builder) -> None:
    """With another value of the shape, a weight, an array or a number, broadcast."""
    x = g.pick()
    shape, kind = g.values[x], g.rng.choice(_BINARY)
    same = [name for name, other in g.values.items() if other == shape]
    sizes = [1 if size == "n" or g.rng.random() < 0.3 else size for size in shape][g.rng.randrange(len(shape) + 1) :]
    other = g.rng.choice(
        [lambda: g.rng.choice(same), lambda: g.weight(*sizes or [1]), lambda: g.constant(g.numbers(*sizes)), lambda: x]
    )()
    # ONNX's reference fails if the first operand of a sum has fewer elements.
    first = g.rng.random() < 0.5 or kind in ("Mean", "Sum")
    g.op(kind, [x, other] if first else [other, x], shape)


@_family
def _bounded(g: _Builder) -> None:
    x = g.pick(_sizes)
    shape = g.values[x]
    kind = g.rng.randrange(4)
    if kind == 0:
        g.op("PRelu", [x, g.weight(shape[-1])], shape)
    elif kind == 1:
        g.op("Pow", [x, g.constant(np.float64(g.rng.randint(1, 3)))], shape)
    elif kind == 2:
        g.op("Clip", [x, g.constant(np.float64(-0.5)), g.constant(np.float64(0.7))], shape)
    else:
        g.op("Tile", [x, g.constant(np.int64([1] * (len(shape) - 1) + [2]))], (*shape[:-1], 2 * shape[-1]))


@_family
def _divide_and_choose(g: _Builder) -> None:
    x = g.pick()
    shape = g.values[x]
    y = g.rng.choice([name for name, other in g.values.items() if other == shape])
    if g.rng.random() < 0.5:
        below = g.op("Add", [g.op("Abs", [y], (), keep=False), g.constant(np.float64(1))], (), keep=False)
        g.op("Div", [x, below], shape)
    else:
        condition = g.op("Greater", [x, g.constant(np.float64(0.1))], (), keep=False)
        g.op("Where", [condition, y, g.rng.choice([x, g.constant(np.float64(-1))])], shape)


@_family
def _layer(g: _Builder) -> None:
    x = g.pick(_sizes)
    shape, out = g.values[x], g.rng.randint(1, 5)
    if len(shape) == 2 and g.rng.random() < 0.5:
        turned = g.rng.randrange(2)
        w = g.weight(out, shape[-1], layer=True) if turned else g.weight(shape[-1], out, layer=True)
        bias = [g.weight(out, layer=True)] if g.rng.random() < 0.6 else []
        g.op("Gemm", [x, w, *bias], (*shape[:-1], out), {"transB": turned, "alpha": 0.5})
        return
    w = g.weight(shape[-1], out, layer=True)
    y = g.op("MatMul", [x, w], (*shape[:-1], out))
    if g.rng.random() < 0.5:
        del g.values[y]
        g.op("Add", [y, g.weight(out, layer=True)], (*shape[:-1], out))


@_family
def _norm(g: _Builder) -> None:
    x = g.pick(_sizes)
    shape = g.values[x]
    kind = g.rng.choice(("LayerNormalization", "Softmax", "LogSoftmax"))
    weights = [g.weight(shape[-1], layer=True) for _ in range(2)] if kind == "LayerNormalization" else []
    g.op(kind, [x, *weights], shape, {"axis": -1})


@_family
def _convolution(g: _Builder) -> None:
    x = g.pick(lambda shape: _sizes(shape) and len(shape) == 3 and shape[-1] > 1)
    shape = g.values[x]
    if len(shape) != 3:
        return
    kind = g.rng.choice(("Conv", "MaxPool", "AveragePool"))
    padded = g.rng.randrange(2) if kind == "Conv" else 0  # ONNX's reference fails in pools of padded sequences
    attributes = {"kernel_shape": [2], "pads": [padded, padded]}
    channels = shape[1] if kind != "Conv" else g.rng.randint(1, 3)
    inputs = [x] if kind != "Conv" else [x, g.weight(channels, shape[1], 2, layer=True), g.weight(channels, layer=True)]
    g.op(kind, inputs, ("n", channels, shape[-1] - 1 + 2 * padded), attributes)


@_family
def _reduce(g: _Builder) -> None:
    x = g.pick(_sizes)
    shape, kept = g.values[x], g.rng.randrange(2)
    axis = g.rng.randint(1, len(shape) - 1)
    smaller = [1 if i == axis else size for i, size in enumerate(shape) if i != axis or kept]
    axes = g.constant(np.int64([g.rng.choice([axis, axis - len(shape)])]))
    g.op(g.rng.choice(_REDUCTIONS), [x, axes], tuple(smaller), {"keepdims": kept})


@_family
def _rearrange(g: _Builder) -> None:
    x = g.pick(_sizes)
    shape = g.values[x]
    size, kind = shape[-1], g.rng.randrange(9)
    if kind == 0:
        order = [0, *g.rng.sample(range(1, len(shape)), len(shape) - 1)]
        g.op("Transpose", [x], tuple(shape[i] for i in order), {"perm": order})
    elif kind == 1:
        g.op("Reshape", [x, g.constant(np.int64([0, -1]))], ("n", int(np.prod(shape[1:]))))
    elif kind == 2:  # a shape that is computed
        batch = g.op("Gather", [g.op("Shape", [x], (), keep=False), g.constant(np.int64([0]))], (), keep=False)
        to = g.op("Concat", [batch, g.constant(np.int64([1, -1]))], (), {"axis": 0}, keep=False)
        g.op("Reshape", [x, to], ("n", 1, int(np.prod(shape[1:]))))
    elif kind == 3:
        y = g.rng.choice([name for name, other in g.values.items() if other == shape])
        g.op("Concat", [x, y], (*shape[:-1], 2 * size), {"axis": -1})
    elif kind == 4:
        limits = [[size, -size - 1, -1, -1], [0, size, -1, 2]][g.rng.randrange(2)]
        steps = [g.constant(np.int64([i])) for i in limits]
        g.op("Slice", [x, *steps], (*shape[:-1], size if limits[-1] < 0 else -(-size // 2)))
    elif kind == 5:
        picked = [g.rng.randrange(-size, size) for _ in range(3)]
        g.op("Gather", [x, g.constant(np.int64(picked))], (*shape[:-1], 3), {"axis": -1})
    elif kind == 6:
        pads = [0] * len(shape) * 2
        pads[len(shape) - 1], pads[-1] = 1, 1
        mode = g.rng.choice(["constant", "edge"])
        g.op("Pad", [x, g.constant(np.int64(pads))], (*shape[:-1], size + 2), {"mode": mode})
    elif kind == 7:
        g.op("CumSum", [x, g.constant(np.int64(len(shape) - 1))], shape, {"reverse": g.rng.randrange(2)})
    else:
        outputs = [g.name(), g.name()]
        g.nodes.append(H.make_node("TopK", [x, g.constant(np.int64([1]))], outputs, axis=-1))
        g.values[outputs[0]] = (*shape[:-1], 1)


@_family
def _quantize(g: _Builder) -> None:
    x = g.pick(_sizes)
    single = g.op("Cast", [x], (), {"to": TensorProto.FLOAT}, keep=False)
    first = len(g.nodes) - 1
    if g.rng.random() < 0.5:
        kind = g.rng.choice((np.int8, np.uint8))
        scale, zero = np.float32(g.rng.choice((0.01, 0.05))), kind(g.rng.randrange(100))
        names = [g.name("s"), g.name("z")]
        g.initializers += [N.from_array(np.asarray(scale), names[0]), N.from_array(np.asarray(zero), names[1])]
        integers = g.op("QuantizeLinear", [single, *names], (), keep=False)
        limits = np.iinfo(kind).min, np.iinfo(kind).max
    else:
        integers, *names = (g.name() for _ in range(3))
        g.nodes.append(H.make_node("DynamicQuantizeLinear", [single], [integers, *names]))
        limits = 0, 255
    back = g.op("DequantizeLinear", [integers, *names], (), keep=False)
    y = g.op("Cast", [back], g.values[x], {"to": TensorProto.DOUBLE})
    g.quantized.append(Quantized(x, y, names[0], names[1], limits, tuple(range(first, len(g.nodes)))))


@_family
def _branch(g: _Builder) -> None:
    """A condition on the model's numbers, on sizes or on the values of the batch."""
    x = g.pick(_sizes)
    shape = g.values[x]
    kind = g.rng.randrange(3)
    if kind == 0:
        condition = g.constant(np.bool_(g.rng.randrange(2)))
    elif kind == 1:
        condition = g.op("Greater", [g.op("Size", [x], (), keep=False), g.constant(np.int64(10))], (), keep=False)
    else:
        mean = g.op("ReduceMean", [x], (), {"keepdims": 0}, keep=False)
        condition = g.op("Greater", [mean, g.constant(np.float64(0))], (), keep=False)

    def branch(layer: bool) -> Callable[[_Builder], tuple[list[str], list[str]]]:
        def grow(inner: _Builder) -> tuple[list[str], list[str]]:
            w = inner.weight(shape[-1], shape[-1], layer=True) if layer else inner.weight(shape[-1])
            return [], [inner.op("Tanh", [inner.op("MatMul" if layer else "Mul", [x, w], ())], ())]

        return grow

    bodies = {name: g.body(branch(bool(g.rng.randrange(2)))) for name in ("then_branch", "else_branch")}
    g.op("If", [condition], shape, bodies)


@_family
def _loop(g: _Builder) -> None:
    x = g.pick(_sizes)
    shape = g.values[x]

    def grow(inner: _Builder) -> tuple[list[str], list[str]]:
        trip, go, state = inner.name("i"), inner.name("c"), inner.name()
        on = inner.name("c")
        inner.nodes.append(H.make_node("Identity", [go], [on]))
        y = inner.op("MatMul", [state, inner.weight(shape[-1], shape[-1], layer=True)], ())
        step = inner.op("Cast", [trip], (), {"to": TensorProto.DOUBLE})
        y = inner.op("Tanh", [inner.op("Add", [y, step], ())], ())
        return [trip, go, state], [on, inner.op("Mul", [y, inner.weight(shape[-1])], ())]

    # ONNX's reference joins scanned outputs instead of stacking them, and does not run without a condition.
    limits = [g.constant(np.int64(g.rng.randint(1, 3))), g.constant(np.bool_(True))]
    g.op("Loop", [*limits, x], shape, {"body": g.body(grow)})


def draw(seed: int) -> Case:
    """Returns the case of a seed."""
    rng = random.Random(seed)
    shape: Shape = ("n", *rng.choice([(3,), (6,), (2, 3), (3, 4)]))
    g = _Builder(rng, {"x": shape})
    g.op("Mul", ["x", g.weight(shape[-1])], shape)
    while len(g.nodes) < rng.randint(4, 25):
        rng.choice(_FAMILIES)(g)
    used = {name for node in g.nodes for name in node.input}
    leaves = [name for name in g.values if name not in used and name != "x"] or list(g.values)[-1:]
    losses = []
    for leaf in leaves:
        # Squashed and weighted, so that no leaf hides another.
        weighted = g.op("Mul", [g.op("Tanh", [leaf], ()), g.constant(np.float64(rng.uniform(0.5, 2)))], ())
        losses.append(g.op("ReduceMean", [weighted], (), {"keepdims": 0}))
    g.nodes.append(H.make_node("Sum", losses, ["loss"]))
    infos = [H.make_tensor_value_info("loss", TensorProto.DOUBLE, [])]
    infos += [H.make_tensor_value_info(leaf, TensorProto.DOUBLE, list(g.values[leaf])) for leaf in leaves]
    inputs = [H.make_tensor_value_info("x", TensorProto.DOUBLE, list(shape))]
    graph = H.make_graph(g.nodes, "g", inputs, infos, g.initializers)
    model = H.make_model(graph, opset_imports=[H.make_opsetid("", 22)], ir_version=10)
    onnx.checker.check_model(model)
    return Case(model, g.weights, g.numbers(rng.randint(1, 4), *shape[1:]), g.quantized)
