"""Knows which operators ONNX Runtime's gradient builder can differentiate, registers others, and traces gradients."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from ...core.errors import shown
from ...engine.ort import training_bindings

__all__ = [
    "GradientNode",
    "constant_like",
    "differentiable",
    "gradient_path",
    "has_gradient",
    "has_user_gradient",
    "register_gradient",
]

# The operators for which the gradient builder of onnxruntime-training 1.19.2 has a gradient and its CPU provider has
# kernels; tests/export/onnx/test_operators.py tests each.
_DIFFERENTIABLE = {
    "": """Abs Add Cast Clip Concat Conv Cos Div Erf Exp Expand Flatten Gather GatherElements GatherND Gelu
        Gemm GlobalAveragePool Identity LayerNormalization LeakyRelu Log LogSoftmax MatMul Max Min Mul Neg Pad
        Pow Reciprocal ReduceL2 ReduceLogSumExp ReduceMean ReduceSum Relu Reshape ScatterElements ScatterND Sigmoid
        SimplifiedLayerNormalization Sin Slice Softmax SoftmaxCrossEntropyLoss Split Sqrt Squeeze Sub Tanh Tile TopK
        Transpose Trilu Unsqueeze Where""",
    "com.microsoft": "BiasGelu FastGelu Gelu QuickGelu",
}
# Operator -> positions of inputs through which no gradient flows; None for all inputs.
_STOPS: dict[str, set[int] | None] = {
    **dict.fromkeys(("And", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "Or", "Xor")),
    **dict.fromkeys(("ArgMax", "ArgMin", "Ceil", "EyeLike", "Floor", "Hardmax", "IsInf", "IsNaN", "Round", "Sign")),
    **dict.fromkeys(("Bernoulli", "RandomNormalLike", "RandomUniformLike")),
    **dict.fromkeys(("ConstantOfShape", "NonZero", "Range", "Shape", "Size")),
    "OneHot": {0, 1},
    "Where": {0},
}
# For these, the gradient builder has only the gradient of the first input.
_ONLY_FIRST = ("Clip", "Pad", "Pow", "SoftmaxCrossEntropyLoss")
# The gradient of these is zero, but the gradient builder requires one.
_ZERO = ("ArgMax", "ArgMin", "Ceil", "EyeLike", "Floor", "Hardmax", "Round", "Sign")
_SQUARE = "square = Mul(I(0), I(0)); "
_OWN = {
    **dict.fromkeys(_ZERO, "shape = Shape(I(0)); GI(0) = Expand(zero, shape)"),
    "Acos": _SQUARE + "a = Sub(one, square); root = Sqrt(a); b = Div(GO(0), root); GI(0) = Neg(b)",
    "Acosh": _SQUARE + "a = Sub(square, one); root = Sqrt(a); GI(0) = Div(GO(0), root)",
    "Asin": _SQUARE + "a = Sub(one, square); root = Sqrt(a); GI(0) = Div(GO(0), root)",
    "Asinh": _SQUARE + "a = Add(one, square); root = Sqrt(a); GI(0) = Div(GO(0), root)",
    "Atan": _SQUARE + "a = Add(one, square); GI(0) = Div(GO(0), a)",
    "Atanh": _SQUARE + "a = Sub(one, square); GI(0) = Div(GO(0), a)",
    "Cosh": "a = Sinh(I(0)); GI(0) = Mul(GO(0), a)",
    "Sinh": "a = Cosh(I(0)); GI(0) = Mul(GO(0), a)",
    "Tan": "square = Mul(O(0), O(0)); a = Add(square, one); GI(0) = Mul(GO(0), a)",
}
"""Gradients of operators that the gradient builder lacks, in the notation of :class:`GradientNode`."""


@dataclass(frozen=True)
class GradientNode:
    """A node in the gradient of an operator.

    The names of values are ``GO(i)`` (gradient of output i), ``I(i)`` (input i), ``O(i)`` (output i), ``GI(i)``
    (gradient of input i, the result), or any other name for intermediate values.

    Attributes:
        op_type: Operator.
        inputs: Names of the inputs.
        outputs: Names of the outputs.
        attributes: Numbers, strings or lists of them; for a tensor, an array or :func:`constant_like`.
        domain: Domain of the operator.
    """

    op_type: str
    inputs: Sequence[str]
    outputs: Sequence[str]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    domain: str = ""


@dataclass(frozen=True)
class _ConstantLike:
    value: float
    like: str


def constant_like(value: float, like: str) -> Any:
    """Returns a scalar for the ``value`` of a ``Constant`` node, with the element type of ``I(i)`` or ``O(i)``."""
    if like[:1] not in ("I", "O") or like[1:2] != "(":
        raise ValueError(
            f"like must be 'I(0)', 'O(0)', ... (an input or output of the operator), but {like!r} was given"
        )
    return _ConstantLike(value, f"{like[0]}ElemType{like[1:]}")


_registered: set[tuple[str, str]] = set()
_by_user: set[tuple[str, str]] = set()


def register_gradient(op_type: str, nodes: Sequence[GradientNode], domain: str = "") -> None:
    """Registers the gradient of an operator, for all models that this process builds from now on.

    It takes precedence over the gradients and rewrites of this package and of ONNX Runtime.

    Args:
        op_type: The operator, one of ONNX's or your own.
        nodes: The nodes that compute ``GI(i)`` for every input that has a gradient.
        domain: The operator's domain.

    Raises:
        RuntimeError: If the installed ONNX Runtime can't differentiate (only onnxruntime-training can).
        ValueError: If no node computes a ``GI(i)``.

    Example:
        >>> register_gradient("Atan", [
        ...     GradientNode("Mul", ["I(0)", "I(0)"], ["square"]),
        ...     GradientNode("Constant", [], ["one"], {"value": constant_like(1.0, "I(0)")}),
        ...     GradientNode("Add", ["square", "one"], ["sum"]),
        ...     GradientNode("Div", ["GO(0)", "sum"], ["GI(0)"]),
        ... ])
    """
    if not any(name.startswith("GI(") for node in nodes for name in node.outputs):
        raise ValueError(f"the gradient of {op_type!r} computes no GI(i): at least one node must have such an output")
    _register_own()
    _register(op_type, nodes, domain)
    _by_user.add((domain, op_type))


def has_user_gradient(node: ir.Node) -> bool:
    """Returns whether a gradient was registered for the operator of a node."""
    return (node.domain, node.op_type) in _by_user


def _register(op_type: str, nodes: Sequence[GradientNode], domain: str = "") -> None:
    bindings = training_bindings()
    definitions = []
    for node in nodes:
        definition = bindings.GradientNodeDefinition()
        definition.op_type, definition.domain = node.op_type, node.domain
        definition.inputs, definition.outputs = list(node.inputs), list(node.outputs)
        definition.attributes = [_attribute(bindings, name, value) for name, value in node.attributes.items()]
        definitions.append(definition)
    bindings.register_gradient_definition(f"{domain}::{op_type}", definitions)
    _registered.add((domain, op_type))


def _attribute(bindings: Any, name: str, value: Any) -> Any:
    definition = bindings.GradientNodeAttributeDefinition()
    definition.name = name
    if isinstance(value, _ConstantLike):
        definition.dtype, definition.is_tensor, plain = value.like, True, value.value
    elif isinstance(value, np.ndarray):
        definition.dtype, definition.is_tensor, plain = value.dtype.name.removesuffix("64"), True, value.tolist()
    else:
        first = value[0] if isinstance(value, (list, tuple)) and value else value
        kinds = {bool: "bool", int: "int", float: "float", str: "string"}
        if type(first) not in kinds:
            raise TypeError(f"attribute {name!r} must be a number, str, list of them or array, but is {shown(value)}")
        definition.dtype, definition.is_tensor, plain = kinds[type(first)], False, value
    definition.value_json = json.dumps(plain)
    return definition


def differentiable(node: ir.Node) -> bool:
    """Returns whether the operator of a node has a gradient."""
    _register_own()
    known = _DIFFERENTIABLE.get(node.domain, "").split()
    return (node.domain, node.op_type) in _registered or node.op_type in known


def gradient_path(graph: ir.Graph, trained: Collection[str], loss: ir.Value) -> Iterator[tuple[ir.Node, list[int]]]:
    """Yields every node through which gradient flows, from the loss backwards, with the inputs that need gradients."""
    reached = {value for value in graph.inputs if value.name in trained}
    active: list[list[int]] = []
    for node in graph:
        standard = not node.domain and not has_user_gradient(node)
        stops = _STOPS.get(node.op_type, set()) if standard else set()
        inputs = [] if stops is None else [i for i, v in enumerate(node.inputs) if v in reached and i not in stops]
        active.append(inputs or ([-1] if not reached.isdisjoint(_captured(node)) else []))
        if active[-1]:
            reached.update(value for value in node.outputs if value.name and _may_be_float(value))
    wanted = {loss}
    for node, inputs in zip(reversed(graph), reversed(active), strict=True):
        if inputs and any(value in wanted and value in reached for value in node.outputs):
            wanted.update(value for i in inputs if i >= 0 and (value := node.inputs[i]) is not None)
            yield node, inputs


def _may_be_float(value: ir.Value) -> bool:
    return value.dtype in (None, ir.DataType.UNDEFINED) or value.dtype.is_floating_point()


def _captured(node: ir.Node) -> Iterator[ir.Value]:
    """Yields all values that the subgraphs of a node read, including their own."""
    for attribute in node.attributes.values():
        if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
            graphs = [attribute.as_graph()] if attribute.type == ir.AttributeType.GRAPH else attribute.as_graphs()
            for graph in graphs:
                yield from graph.outputs
                yield from (value for inner in graph.all_nodes() for value in inner.inputs if value is not None)


def has_gradient(node: ir.Node, inputs: Sequence[int]) -> bool:
    """Returns whether a node has gradients for the given inputs."""
    if has_user_gradient(node):
        return True
    if node.op_type.startswith("Scatter") and node.attributes.get_string("reduction", "none") not in ("none", "add"):
        return False
    if not node.domain and node.op_type in _ONLY_FIRST and set(inputs) != {0}:
        return False
    return differentiable(node)


@functools.cache
def _register_own() -> None:
    """Registers the gradients of elementary functions that the gradient builder lacks."""
    for op_type, formula in _OWN.items():
        numbers = {name: number for name, number in (("zero", 0.0), ("one", 1.0)) if name in formula}
        nodes = [GradientNode("Constant", [], [n], {"value": constant_like(v, "I(0)")}) for n, v in numbers.items()]
        for result, operator, inputs in re.findall(r"(\S+) = (\w+)\((.*?)\)(?:; |$)", formula):
            nodes.append(GradientNode(operator, inputs.split(", "), [result]))
        _register(op_type, nodes)
    # The rewrite has already removed its attributes exclusive and reverse.
    _register("CumSum", [GradientNode("CumSum", ["GO(0)", "I(1)"], ["GI(0)"], {"reverse": 1})])
