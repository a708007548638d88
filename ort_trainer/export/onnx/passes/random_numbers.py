"""Makes the trainer draw the random numbers of a forward pass."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx_ir as ir

from ....step import RandomInput
from ....step.emitter import Emitter
from ..nodes import SizeNeededError, attributes_of, constant_of, dims, dtype_of, operand, refuse, shape_of
from ..rewrite import Rule, rewrite
from .evaluation import keep_all
from .found import Found

__all__ = ["RandomNumbersPass"]

_FLOAT = ir.DataType.FLOAT


class RandomNumbersPass(ir.passes.InPlacePass):
    """Makes random numbers inputs of the graph.

    The modes of the nodes stay: a dropout exported for inference stays in inference mode.

    Args:
        symbols: Dimensions whose size a batch determines.
        found: Receives the random inputs.
        check_shapes: Whether the engine checks in every step that the number of random numbers matches the number of
            elements. Shapes not inferred by ONNX's own rules could be wrong, and too few numbers would be broadcast.

    Raises:
        SizeNeededError: If the shape of random numbers depends on more than the symbols.
    """

    def __init__(self, symbols: Collection[str], found: Found, check_shapes: bool = False) -> None:
        self._symbols, self._found, self._check_shapes = symbols, found, check_shapes

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        generators = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
        rules: dict[str, Rule] = {
            **dict.fromkeys(generators, self._random),
            "Bernoulli": self._bernoulli,
            "Dropout": self._dropout,
            "Multinomial": _refused,
        }
        return ir.passes.PassResult(model, rewrite(model, rules))

    def _drawn(
        self,
        kind: str,
        node: ir.Node,
        e: Emitter,
        shape: Sequence[int | str | None] | None,
        dtype: ir.DataType = _FLOAT,
        parameters: tuple[float, ...] = (),
    ) -> ir.Value:
        sizes = dims(shape, self._symbols)
        if shape is None or sizes is None:
            raise SizeNeededError(f"the random numbers of node {node.name!r} have shape {shape}")
        assert node.graph is not None
        value = ir.val(e.name("random"), dtype, shape)
        node.graph.inputs.append(value)
        self._found.random.append(RandomInput(str(value.name), kind, dtype.numpy().name, sizes, parameters))
        return e("Reshape", value, e("Shape", operand(node))) if self._check_shapes and node.inputs else value

    def _dropout(self, node: ir.Node, e: Emitter) -> Sequence[ir.Value | None]:
        training = constant_of(node, 2, np.False_)
        ratio = float(constant_of(node, 1, 0.5))
        if not training or ratio == 0:
            return keep_all(node, e)
        if not 0 < ratio < 1:
            raise refuse(node, f"the ratio must be in [0, 1), but is {ratio}")
        x = operand(node)
        mask = self._drawn("bernoulli", node, e, shape_of(x), e.dtype, (1.0 - ratio, 1.0 / (1.0 - ratio)))
        return [e("Mul", x, mask), e("Cast", mask, to=ir.DataType.BOOL)]

    def _random(self, node: ir.Node, e: Emitter) -> ir.Value:
        attributes = attributes_of(node)
        if "seed" in attributes:
            raise refuse(node, "a random operator with its own seed would draw the same numbers in every step")
        like = node.op_type.endswith("Like")
        normal = node.op_type.startswith("RandomNormal")
        shape = shape_of(operand(node)) if like else attributes["shape"]
        dtype = attributes.get("dtype", dtype_of(operand(node)) if like else _FLOAT)
        value = self._drawn("normal" if normal else "uniform", node, e, shape)
        e.dtype = _FLOAT
        if normal:
            factor, offset = attributes.get("scale", 1.0), attributes.get("mean", 0.0)
        else:
            offset = attributes.get("low", 0.0)
            factor = attributes.get("high", 1.0) - offset
        return e("Cast", e("Add", e("Mul", value, e.scalar(factor)), e.scalar(offset)), to=dtype)

    def _bernoulli(self, node: ir.Node, e: Emitter) -> ir.Value:
        probability = operand(node)
        value = self._drawn("uniform", node, e, shape_of(probability))
        below = e("Less", value, e("Cast", probability, to=_FLOAT))
        return e("Cast", below, to=attributes_of(node).get("dtype", dtype_of(probability)))


def _refused(node: ir.Node, e: Emitter) -> None:
    raise refuse(node, "its random numbers can't be sampled by the trainer")
