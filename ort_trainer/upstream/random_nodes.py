"""Draws random tensors inside a graph, for a runtime whose steps have no random inputs."""

from __future__ import annotations

import ast
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from ..step import RandomInput, Step
from ..step.emitter import Emitter

_OPERATORS: Mapping[type[ast.operator], str] = {
    ast.Add: "Add",
    ast.Sub: "Sub",
    ast.Mult: "Mul",
    ast.FloorDiv: "Div",  # rounds like Python's, because sizes are not negative
    ast.Mod: "Mod",
}
_FUNCTIONS: Mapping[str, str] = {"max": "Max", "min": "Min"}


class RandomNodes:
    """Writes the nodes that draw the random tensors of a graph.

    Args:
        emitter: Receives the nodes.
        graph: The graph with the random tensors.
        inputs: The inputs of the model by name; their shapes determine the sizes.
    """

    def __init__(self, emitter: Emitter, graph: Step, inputs: Mapping[str, ir.Value]) -> None:
        self._emit, self._graph, self._inputs = emitter, graph, inputs
        self._sizes: dict[str, ir.Value] = {}

    def draw(self, spec: RandomInput) -> ir.Value:
        """Returns a random tensor.

        Raises:
            ValueError: If a graph can't draw it.
        """
        drawn = self._drawn(spec)
        dtype = self._inputs[spec.name].dtype
        return drawn if drawn.dtype == dtype else self._emit("Cast", drawn, to=dtype)

    def _drawn(self, spec: RandomInput) -> ir.Value:
        """Returns a random tensor, in the dtype of the operator that draws it."""
        emit, shape = self._emit, self._shape(spec)
        if spec.kind in ("mask", "bernoulli"):
            mask = emit("Less", self._uniform(shape), self._number(spec.parameters[0]))
            factor = spec.parameters[1] if spec.kind == "bernoulli" else 1.0
            if factor == 1.0:
                return mask
            return emit("Mul", emit("Cast", mask, to=ir.DataType.FLOAT), self._number(factor))
        if spec.kind == "uniform":
            return self._uniform(shape)
        if spec.kind == "normal":
            return emit("RandomNormalLike", self._zeros(shape))
        if spec.kind == "exponential":
            # -log(1 - u) / rate, with u in [0, 1): 1 - u is never 0.
            logarithm = emit("Log", emit("Sub", self._number(1.0), self._uniform(shape)))
            return emit("Div", emit("Neg", logarithm), self._number(spec.parameters[0]))
        if spec.kind == "integers":
            low, high = spec.parameters
            uniform = self._uniform(shape, np.float64)  # exact for integers up to 2^53
            spread = emit("Mul", uniform, self._number(high - low, np.float64))
            drawn = emit("Add", emit("Floor", spread), self._number(low, np.float64))
            return emit("Cast", drawn, to=ir.DataType.INT64)
        if spec.kind == "permutation":  # the order of random numbers
            _, order = emit.several("TopK", self._uniform(shape), shape, outputs=2, axis=0)
            return order
        raise ValueError(
            f"the model draws random numbers of kind {spec.kind!r}, which onnxruntime-training does not support: use "
            "the default flavor"
        )

    def _zeros(self, shape: ir.Value, dtype: type[np.floating] = np.float32) -> ir.Value:
        return self._emit("ConstantOfShape", shape, value=ir.tensor(np.zeros(1, dtype)))

    def _uniform(self, shape: ir.Value, dtype: type[np.floating] = np.float32) -> ir.Value:
        return self._emit("RandomUniformLike", self._zeros(shape, dtype), low=0.0, high=1.0)

    def _number(self, value: float, dtype: type[np.floating] = np.float32) -> ir.Value:
        return self._emit.constant(value, dtype)

    def _shape(self, spec: RandomInput) -> ir.Value:
        """Returns the sizes of a tensor, int64 [rank]."""
        if all(isinstance(size, int) for size in spec.shape):
            return self._emit.constant([int(size) for size in spec.shape])
        sizes = [self._size(size) for size in spec.shape]
        return self._emit("Concat", *sizes, axis=0)

    def _size(self, size: int | str) -> ir.Value:
        """Returns a size, int64 [1]."""
        if isinstance(size, int):
            return self._emit.constant([size])
        if size not in self._sizes:
            self._sizes[size] = self._value(ast.parse(size, mode="eval").body, size)
        return self._sizes[size]

    def _value(self, node: ast.expr, size: str) -> ir.Value:
        """Writes the nodes that compute a part of the expression of a size, int64 [1]."""
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return self._emit.constant([node.value])
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return self._emit(_OPERATORS[type(node.op)], self._value(node.left, size), self._value(node.right, size))
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func)
            if function == "dim" and isinstance(node.args[0], ast.Constant):
                return self._dimension(str(node.args[0].value), size)
            if function in _FUNCTIONS:
                return self._emit(_FUNCTIONS[function], *(self._value(part, size) for part in node.args))
        raise ValueError(
            f"the model draws random numbers of size {size!r}, which a graph for onnxruntime-training can't compute: "
            "use the default flavor"
        )

    def _dimension(self, symbol: str, size: str) -> ir.Value:
        """Returns the size of a symbolic dimension, int64 [1]."""
        for spec in self._graph.inputs:
            if symbol in (spec.shape or ()) and spec.name in self._inputs:
                axis = (spec.shape or ()).index(symbol)
                return self._emit("Shape", self._inputs[spec.name], start=axis, end=axis + 1)
        raise ValueError(f"no input of the model has the dimension {symbol!r} of {size!r}")
