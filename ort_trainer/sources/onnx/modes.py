"""Puts a forward pass into training or evaluation mode, and into mixed precision."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper

from ...graph import RandomInput
from ...graph.names import Names
from .lower import Rule, rewrite
from .nodes import Emitter, SizeNeededError, Values, attributes_of, constant_of, dims, names_in, refuse, torch_type

__all__ = ["autocast", "to_evaluation", "to_training"]

# The operators that PyTorch's autocast runs in half precision, as far as ONNX has them.
_HALF = ("Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU", "RNN", "Einsum")


def to_evaluation(model: onnx.ModelProto) -> None:
    """Switches dropout off and batch norm to its running statistics, in place."""

    rewrite(model, {"Dropout": _keep_all})
    for node in model.graph.node:
        if node.op_type == "BatchNormalization":
            for attribute in node.attribute:
                if attribute.name == "training_mode":
                    attribute.i = 0
            del node.output[1:]


def _keep_all(node: onnx.NodeProto, e: Emitter, values: Values) -> None:
    """A dropout that drops nothing."""
    e.assign(node.output[0], node.input[0])
    if len(node.output) > 1 and node.output[1]:
        e.assign(node.output[1], e("Expand", e.constant(True, bool), e("Shape", node.input[0])))


def to_training(
    model: onnx.ModelProto, symbols: Collection[str], buffers: Collection[str], check_shapes: bool = False
) -> tuple[list[RandomInput], dict[str, str]]:
    """Makes random numbers inputs of the graph and new running statistics values of it, in place.

    The modes of the nodes stay as they are: a dropout or batch norm that was exported for inference stays in inference.

    Args:
        model: The forward pass.
        symbols: Dimensions whose size a batch tells.
        buffers: Names of the running statistics.
        check_shapes: Whether to have the engine check at every step that there are as many random numbers as elements
            that they belong to: where shapes were not inferred by ONNX's own rules, too few might be broadcast.

    Returns:
        The random numbers, and buffer -> value with its new content.

    Raises:
        SizeNeededError: If the shape of random numbers depends on more than the symbols.
    """
    random_inputs: list[RandomInput] = []

    def drawn(
        kind: str,
        node: onnx.NodeProto,
        e: Emitter,
        shape: Sequence[int | str | None] | None,
        elem_type: int = TensorProto.FLOAT,
        parameters: tuple[float, ...] = (),
    ) -> str:
        sizes = dims(shape, symbols)
        if sizes is None:
            raise SizeNeededError(f"the random numbers of node {node.name!r} have shape {shape}")
        name = e.name("random")
        random_inputs.append(RandomInput(name, kind, torch_type(elem_type), sizes, parameters))
        model.graph.input.append(helper.make_tensor_value_info(name, elem_type, shape))
        return str(e("Reshape", name, e("Shape", node.input[0]))) if check_shapes and node.input else name

    def dropout(node: onnx.NodeProto, e: Emitter, values: Values) -> None:
        training = constant_of(node, 2, values, np.False_)
        ratio = float(constant_of(node, 1, values, 0.5))
        if not training or ratio == 0:
            _keep_all(node, e, values)
            return
        if not 0 < ratio < 1:
            raise refuse(node, f"the ratio must be in [0, 1), but is {ratio}")
        parameters = (1.0 - ratio, 1.0 / (1.0 - ratio))
        mask = drawn("bernoulli", node, e, values.shape(node.input[0]), e.type, parameters)
        e.assign(node.output[0], e("Mul", node.input[0], mask))
        if len(node.output) > 1 and node.output[1]:
            e.assign(node.output[1], e("Cast", mask, to=TensorProto.BOOL))

    def random(node: onnx.NodeProto, e: Emitter, values: Values) -> None:
        attributes = attributes_of(node)
        if "seed" in attributes:
            raise refuse(node, "a random operator with a seed of its own gives the same numbers at every step")
        like = node.op_type.endswith("Like")
        normal = node.op_type.startswith("RandomNormal")
        shape = values.shape(node.input[0]) if like else attributes["shape"]
        default = values.type(node.input[0]) if like else TensorProto.FLOAT
        value = drawn("normal" if normal else "uniform", node, e, shape)
        e.type = TensorProto.FLOAT
        if normal:
            factor, offset = attributes.get("scale", 1.0), attributes.get("mean", 0.0)
        else:
            offset = attributes.get("low", 0.0)
            factor = attributes.get("high", 1.0) - offset
        value = e("Add", e("Mul", value, e.scalar(factor)), e.scalar(offset))
        e.assign(node.output[0], e("Cast", value, to=attributes.get("dtype", default)))

    def bernoulli(node: onnx.NodeProto, e: Emitter, values: Values) -> None:
        value = drawn("uniform", node, e, values.shape(node.input[0]))
        below = e("Less", value, e("Cast", node.input[0], to=TensorProto.FLOAT))
        kind = attributes_of(node).get("dtype", values.type(node.input[0]))
        e.assign(node.output[0], e("Cast", below, to=kind))

    def refused(node: onnx.NodeProto, e: Emitter, values: Values) -> None:
        raise refuse(node, "its random numbers can't be drawn by the trainer")

    generators = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
    rules: dict[str, Rule] = {**dict.fromkeys(generators, random), "Bernoulli": bernoulli, "Multinomial": refused}
    rewrite(model, {**rules, "Dropout": dropout})
    updates: dict[str, str] = {}
    names = Names(names_in(model.graph))
    for node in model.graph.node:
        if node.op_type == "BatchNormalization" and attributes_of(node).get("training_mode", 0):
            emitter = Emitter(names, [], node.name or node.op_type)
            node.output.extend([""] * (3 - len(node.output)))
            for index, buffer in ((1, node.input[3]), (2, node.input[4])):
                node.output[index] = node.output[index] or emitter.name("updated")
                if buffer in buffers:
                    updates[buffer] = node.output[index]
    return random_inputs, updates


def autocast(model: onnx.ModelProto, dtype: int) -> bool:
    """Runs matrix products and convolutions in half precision, in place; all else stays in fp32.

    Args:
        model: The forward pass.
        dtype: ONNX element type.

    Returns:
        Whether there was anything to run so.
    """

    def half(node: onnx.NodeProto, e: Emitter, values: Values) -> bool | None:
        if values.type(node.input[0]) != TensorProto.FLOAT:
            return False
        inputs = [
            e("Cast", name, to=dtype) if name and values.type(name) == TensorProto.FLOAT else name
            for name in node.input
        ]
        results = e(node.op_type, *inputs, outputs=len(node.output), **attributes_of(node))
        for name, result in zip(node.output, [results] if isinstance(results, str) else results, strict=True):
            if name:
                e.assign(name, e("Cast", result, to=TensorProto.FLOAT))
        return None

    rules: dict[str, Rule] = dict.fromkeys(_HALF, half)
    return rewrite(model, rules)
