"""Rewrites operators that the gradient builder can't take into ones that it can, on the way of the gradient only."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np
import onnx
import onnx.defs
import onnx.inliner
from onnx import helper

from ...errors import ExportError
from ...graph.names import Names
from .convolution import average_pool, conv_transpose, convolution, max_pool, pad, resize
from .gradient import differentiable, gradient_path, has_user_gradient
from .nodes import Emitter, Values, attributes_of, constant_of, names_in, refuse, replace_all
from .recurrent import gru, lstm, rnn

__all__ = ["lower", "rewrite"]

Rule = Callable[[onnx.NodeProto, Emitter, Values], bool | None]
# Function bodies are nested a few levels deep.
_MAXIMUM_PASSES = 16
# Outputs that may be left out, and that the gradient asks for.
_ALL_OUTPUTS = {"LayerNormalization": 3, "SimplifiedLayerNormalization": 2, "SoftmaxCrossEntropyLoss": 2}


def lower(model: onnx.ModelProto, trained: Collection[str], loss: str) -> tuple[onnx.ModelProto, dict[str, str]]:
    """Returns a model in which what lies between trained weights and the loss can be differentiated, where it can be.

    Operators that ONNX itself defines as functions of others are replaced by these.

    Args:
        model: A forward pass; it may be changed.
        trained: Inputs that want a gradient.
        loss: What is differentiated.

    Returns:
        The model; first output of a node -> why it has no rewrite.

    Raises:
        SizeNeededError: If a rewrite needs a size that the shapes leave open.
    """
    refused: dict[str, str] = {}
    for _ in range(_MAXIMUM_PASSES):
        values = Values(model)
        path = list(gradient_path(model.graph, values, trained, loss))
        along = {node.output[0] for node, _ in path}
        wanted = {node.input[index] for node, inputs in path for index in inputs} | {loss}
        values_on_path = {name for node, _ in path for name in node.output if name in wanted}
        _split_by_slices(model, values, along, values_on_path)
        if rewrite(model, _RULES, along - set(refused), refused):
            continue
        missing = {(node.domain, node.op_type) for node, _ in path if _has_body(node) and _asks_for_body(node, wanted)}
        if not missing:
            break
        _spell_defaults(model.graph, missing)
        model = onnx.inliner.inline_selected_functions(model, sorted(missing), inline_schema_functions=True)
    _complete(model.graph)
    return model, refused


def rewrite(
    model: onnx.ModelProto,
    rules: dict[str, Rule],
    only: Collection[str] | None = None,
    refused: dict[str, str] | None = None,
) -> bool:
    """Replaces nodes by what rules make of them, in place.

    Args:
        model: The model.
        rules: Operator -> rule, which emits nodes and assigns the node's outputs, or returns False to leave it.
        only: First outputs of the nodes to look at; None for all.
        refused: Gets first outputs of nodes for which a rule has an error instead; None to raise it.

    Returns:
        Whether any node was replaced.
    """
    if not any(node.op_type in rules for node in model.graph.node):
        return False
    values = Values(model)
    names = Names(names_in(model.graph))
    nodes: list[onnx.NodeProto] = []
    changed = False
    for node in model.graph.node:
        rule = rules.get(node.op_type) if node.domain in ("", "ai.onnx") else None
        emitter = Emitter(names, [], node.name or node.op_type, values.type(next(filter(None, node.input), "")))
        if rule is None or (only is not None and node.output[0] not in only) or has_user_gradient(node):
            nodes.append(node)
            continue
        try:
            kept = rule(node, emitter, values) is False
        except ExportError as error:
            if refused is None:
                raise
            refused[node.output[0]], kept = str(error), True
        if kept:
            nodes.append(node)
            continue
        nodes += emitter.nodes
        changed = True
    if changed:
        replace_all(model.graph.node, nodes)
    return changed


def _asks_for_body(node: onnx.NodeProto, wanted: Collection[str]) -> bool:
    """Returns whether a node is to be replaced by its definition: it, or one of its outputs, has no gradient."""
    if has_user_gradient(node):
        return False
    more = node.op_type in _ALL_OUTPUTS and any(name in wanted for name in node.output[1:])
    return more or (not differentiable(node) and node.op_type not in _RULES)


def _has_body(node: onnx.NodeProto) -> bool:
    try:
        schema = onnx.defs.get_schema(node.op_type, node.domain)
    except onnx.defs.SchemaError:
        return False
    return bool(schema.has_function or schema.has_context_dependent_function)  # type: ignore[attr-defined]


def _spell_defaults(graph: onnx.GraphProto, operators: Collection[tuple[str, str]]) -> None:
    """Writes down the attributes that nodes leave at their defaults: inlining would leave them out."""
    for node in graph.node:
        if (node.domain, node.op_type) in operators:
            given = {attribute.name for attribute in node.attribute}
            defaults = onnx.defs.get_schema(node.op_type, node.domain).attributes.values()
            node.attribute.extend(a.default_value for a in defaults if a.name not in given and a.default_value.name)


def _complete(graph: onnx.GraphProto) -> None:
    """Names outputs that were left out and that a gradient needs."""
    names = Names(names_in(graph))
    for node in graph.node:
        count = _ALL_OUTPUTS.get(node.op_type, 0)
        emitter = Emitter(names, [], node.name or node.op_type)
        for index in range(count):
            if index == len(node.output):
                node.output.append(emitter.name("unused"))
            elif not node.output[index]:
                node.output[index] = emitter.name("unused")


def _split_by_slices(model: onnx.ModelProto, values: Values, along: set[str], on_path: set[str]) -> None:
    """Replaces a Split without sizes, or with outputs that get no gradient: the gradient builder leaves those out."""

    def split(node: onnx.NodeProto, e: Emitter, values: Values) -> bool | None:
        if all(name in on_path for name in node.output) and len(node.input) > 1 and node.input[1]:
            return False
        axis = attributes_of(node).get("axis", 0)
        sizes = constant_of(node, 1, values)
        if sizes is None:
            total, count = values.size(node.input[0], axis), len(node.output)
            size = -(-total // count)
            sizes = [min(size, total - size * index) for index in range(count)]
        ends = np.cumsum(sizes)
        for name, start, end in zip(node.output, ends - np.asarray(sizes), ends, strict=True):
            e.assign(name, e.slice(node.input[0], int(start), int(end), axis))
        return None

    rewrite(model, {"Split": split}, {node.output[0] for node in model.graph.node if set(node.output) & along})


_DONE = "rewritten"


def _expanded(node: onnx.NodeProto, e: Emitter, values: Values, positions: tuple[int, ...]) -> bool | None:
    """Gives inputs the shape of the output before: the gradient builder forgets to sum over what is broadcast."""
    if node.doc_string == _DONE:
        return False
    shape = e("Shape", e(node.op_type, *node.input))  # a shape ends the gradient
    inputs = [e("Expand", name, shape) if index in positions else name for index, name in enumerate(node.input)]
    result = e(node.op_type, *inputs)
    e.nodes[-1].doc_string = _DONE
    e.assign(node.output[0], result)
    return None


def _where(node: onnx.NodeProto, e: Emitter, values: Values) -> bool | None:
    shapes = [values.shape(name) for name in (*node.input[1:], node.output[0])]
    if shapes[0] is not None and None not in shapes[0] and shapes.count(shapes[0]) == 3:
        return False
    return _expanded(node, e, values, (1, 2))


def _power(node: onnx.NodeProto, e: Emitter, values: Values) -> bool | None:
    base, exponent = node.input
    if not values.is_float(exponent):
        e.assign(node.output[0], e("Pow", base, e("Cast", exponent, to=values.type(base))))
        return None
    if values.shape(exponent) == () or (values.shape(exponent) == (1,) and values.shape(base)):
        return False
    return _expanded(node, e, values, (0,))


def _scatter(node: onnx.NodeProto, e: Emitter, values: Values) -> bool | None:
    """What is added goes onto zeros: the gradient builder takes all scattered elements for replaced ones."""
    attributes = attributes_of(node)
    if attributes.get("reduction", "none") != "add" or node.doc_string == _DONE:
        return False
    data, indices, updates = node.input
    zeros = e("Expand", e.scalar(0.0), e("Shape", data))
    added = e(node.op_type, zeros, indices, updates, **attributes)
    e.nodes[-1].doc_string = _DONE
    e.assign(node.output[0], e("Add", data, added))
    return None


def _gelu(node: onnx.NodeProto, e: Emitter, values: Values) -> bool | None:
    if attributes_of(node).get("approximate", "none") != "tanh":
        return False
    x = node.input[0]
    cube = e("Mul", e("Mul", e("Mul", x, x), x), e.scalar(0.044715))
    inner = e("Tanh", e("Mul", e("Add", x, cube), e.scalar(float(np.sqrt(2.0 / np.pi)))))
    e.assign(node.output[0], e("Mul", e("Mul", x, e.scalar(0.5)), e("Add", inner, e.scalar(1.0))))
    return None


def _slice(node: onnx.NodeProto, e: Emitter, values: Values) -> bool | None:
    """Backwards, as a choice of indices."""
    steps = constant_of(node, 4, values) if len(node.input) > 4 and node.input[4] in values.constants else None
    if steps is None or min(steps) > 0:
        return False
    x = node.input[0]
    starts, ends = (constant_of(node, index, values) for index in (1, 2))
    axes = constant_of(node, 3, values, range(len(starts)))
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        size = values.size(node.input[0], axis)
        stop = None if step < 0 and end < -size else int(end)
        chosen = np.arange(size)[slice(int(start), stop, int(step))]
        x = e("Gather", x, e.constant(chosen), axis=int(axis))
    e.assign(node.output[0], x)
    return None


def _matrix_product(node: onnx.NodeProto, e: Emitter, values: Values) -> bool | None:
    """Vectors become matrices."""
    a, b = node.input
    flat = [values.shape(name) is not None and values.rank(name) == 1 for name in (a, b)]
    if not any(flat):
        return False
    a = e("Unsqueeze", a, e.constant([0])) if flat[0] else a
    b = e("Unsqueeze", b, e.constant([1])) if flat[1] else b
    product = e("MatMul", a, b)
    axes = [axis for axis, one in zip((-2, -1), flat, strict=True) if one]
    e.assign(node.output[0], e("Squeeze", product, e.constant(axes)))
    return None


def _reduction(node: onnx.NodeProto, e: Emitter, values: Values) -> bool | None:
    if not attributes_of(node).get("noop_with_empty_axes") or (len(node.input) > 1 and node.input[1]):
        return False
    e.assign(node.output[0], node.input[0])
    return None


def _sum(node: onnx.NodeProto, e: Emitter, values: Values) -> None:
    e.assign(node.output[0], _added(node, e))


def _mean(node: onnx.NodeProto, e: Emitter, values: Values) -> None:
    e.assign(node.output[0], e("Div", _added(node, e), e.scalar(len(node.input))))


def _added(node: onnx.NodeProto, e: Emitter) -> str:
    total: str
    total, *rest = node.input
    for name in rest:
        total = e("Add", total, name)
    return total


def _extremum(node: onnx.NodeProto, e: Emitter, values: Values) -> bool | None:
    """The mean of the elements that are equal to the extremum: its gradient is spread over them, as in PyTorch."""
    attributes = attributes_of(node)
    axes = constant_of(node, 1, values)
    if axes is None or not len(axes):
        if attributes.get("noop_with_empty_axes"):
            e.assign(node.output[0], node.input[0])
            return None
        axes = range(values.rank(node.input[0]))
    extremum = e(node.op_type, node.input[0], e.constant(list(axes)), keepdims=1)
    _at_extremum(node, e, node.input[0], extremum, list(axes), bool(attributes.get("keepdims", 1)))
    # The first of these nodes stays as it is: only a comparison looks at it, which ends the gradient.
    return None


def _at_extremum(node: onnx.NodeProto, e: Emitter, value: str, extremum: str, axes: list[int], keep: bool) -> None:
    here = e("Equal", value, extremum)
    total = e.reduce_sum(e("Where", here, value, e.scalar(0.0)), axes, keep)
    count = e.reduce_sum(e("Cast", here, to=e.type), axes, keep)
    e.assign(node.output[0], e("Div", total, count))


def _global_max_pool(node: onnx.NodeProto, e: Emitter, values: Values) -> None:
    axes = list(range(2, values.rank(node.input[0])))
    extremum = e("ReduceMax", node.input[0], e.constant(axes), keepdims=1)
    _at_extremum(node, e, node.input[0], extremum, axes, True)


def _lp_normalization(node: onnx.NodeProto, e: Emitter, values: Values) -> None:
    attributes = attributes_of(node)
    axis, p = attributes.get("axis", -1), attributes.get("p", 2)
    value = node.input[0]
    norm = e.reduce_sum(e("Abs", value), [axis]) if p == 1 else e("Sqrt", e.reduce_sum(e("Mul", value, value), [axis]))
    e.assign(node.output[0], e("Div", value, norm))


def _along_channels(e: Emitter, vector: str, rank: int) -> str:
    """Shapes a vector over channels so that it broadcasts over (batch, channels, ...)."""
    return str(e("Unsqueeze", vector, e.constant(range(1, rank - 1)))) if rank > 2 else vector


def _scaled(node: onnx.NodeProto, e: Emitter, rank: int, centred: str, variance: str, epsilon: float) -> str:
    deviation = e("Sqrt", e("Add", variance, e.scalar(epsilon)))
    scale, bias = (_along_channels(e, node.input[index], rank) for index in (1, 2))
    return str(e("Add", e("Mul", e("Div", centred, deviation), scale), bias))


def _layer_normalization(node: onnx.NodeProto, e: Emitter, values: Values) -> bool | None:
    """With a bias, and one that is not the scale too: the gradient builder asks for both."""
    value, scale, *rest = node.input
    if rest and rest[0] and rest[0] != scale:
        return False
    if rest and rest[0]:
        bias = e("Identity", scale)
    else:
        count = [values.size(scale, axis) for axis in range(values.rank(scale))]
        bias = e.constant(np.zeros(count), helper.tensor_dtype_to_np_dtype(e.type))
    results = e(node.op_type, value, scale, bias, outputs=3, **attributes_of(node))
    for name, result in zip(node.output, results, strict=False):
        e.assign(name, result)
    return None


def _instance_normalization(node: onnx.NodeProto, e: Emitter, values: Values) -> None:
    rank = values.rank(node.input[0])
    axes = range(2, rank)
    centred = e("Sub", node.input[0], e.reduce_mean(node.input[0], axes))
    variance = e.reduce_mean(e("Mul", centred, centred), axes)
    epsilon = attributes_of(node).get("epsilon", 1e-5)
    e.assign(node.output[0], _scaled(node, e, rank, centred, variance, epsilon))


def _batch_normalization(node: onnx.NodeProto, e: Emitter, values: Values) -> None:
    """With the batch's statistics (``training_mode``) or the running ones."""
    attributes = attributes_of(node)
    rank = values.rank(node.input[0])
    axes = [0, *range(2, rank)]
    if attributes.get("training_mode", 0):
        mean = e.reduce_mean(node.input[0], axes)
        centred = e("Sub", node.input[0], mean)
        variance = e.reduce_mean(e("Mul", centred, centred), axes)
        momentum = attributes.get("momentum", 0.9)
        for output, running, current in zip(node.output[1:3], node.input[3:5], (mean, variance), strict=False):
            flat = e("Squeeze", current, e.constant(axes))
            kept = e("Mul", running, e.scalar(momentum))
            e.assign(output, e("Add", kept, e("Mul", flat, e.scalar(1.0 - momentum))))
    else:
        mean, variance = (_along_channels(e, node.input[index], rank) for index in (3, 4))
        centred = e("Sub", node.input[0], mean)
    e.assign(node.output[0], _scaled(node, e, rank, centred, variance, attributes.get("epsilon", 1e-5)))


def _elu(node: onnx.NodeProto, e: Emitter, values: Values) -> None:
    """Elu, Selu and Celu. The exponential is taken of negative numbers only: an infinite one has no gradient."""
    attributes = attributes_of(node)
    alpha = attributes.get("alpha", 1.6732632 if node.op_type == "Selu" else 1.0)
    value, zero = node.input[0], e.scalar(0.0)
    negative = e("Min", value, zero)
    if node.op_type == "Celu":
        negative = e("Div", negative, e.scalar(alpha))
    curve = e("Mul", e("Sub", e("Exp", negative), e.scalar(1.0)), e.scalar(alpha))
    result = e("Where", e("Less", value, zero), curve, value)
    if node.op_type == "Selu":
        result = e("Mul", result, e.scalar(attributes.get("gamma", 1.050701)))
    e.assign(node.output[0], result)


def _softplus(node: onnx.NodeProto, e: Emitter, values: Values) -> None:
    """log(1 + exp(x)) = -log(sigmoid(-x)) overflows; so: max(x, 0) - log(sigmoid(abs(x)))."""
    value, zero = node.input[0], e.scalar(0.0)
    positive = e("Where", e("Less", value, zero), zero, value)
    size = e("Where", e("Less", value, zero), e("Neg", value), value)
    e.assign(node.output[0], e("Sub", positive, e("Log", e("Sigmoid", size))))


def _mish(node: onnx.NodeProto, e: Emitter, values: Values) -> None:
    e.assign(node.output[0], e("Mul", node.input[0], e("Tanh", e("Softplus", node.input[0]))))


def _cumulative_sum(node: onnx.NodeProto, e: Emitter, values: Values) -> bool | None:
    """Without attributes, as the registered gradient has it."""
    attributes = attributes_of(node)
    value, axis = node.input
    if not attributes.get("exclusive") and not attributes.get("reverse"):
        return False
    total = e("CumSum", value, axis)
    if attributes.get("reverse"):
        where = np.atleast_1d(constant_of(node, 1, values)).tolist()
        total = e("Add", e("Sub", e.reduce_sum(value, where), total), value)
    e.assign(node.output[0], e("Sub", total, value) if attributes.get("exclusive") else total)
    return None


def _depth_to_space(node: onnx.NodeProto, e: Emitter, values: Values) -> None:
    attributes = attributes_of(node)
    block = attributes["blocksize"]
    channels, height, width = (values.size(node.input[0], axis) for axis in (1, 2, 3))
    depth = channels // block**2
    if node.op_type == "SpaceToDepth":
        shape, order = [0, channels, height // block, block, width // block, block], [0, 3, 5, 1, 2, 4]
        final = [0, channels * block**2, height // block, width // block]
    elif attributes.get("mode", "DCR") == "DCR":
        shape, order = [0, block, block, depth, height, width], [0, 3, 4, 1, 5, 2]
        final = [0, depth, height * block, width * block]
    else:
        shape, order = [0, depth, block, block, height, width], [0, 1, 4, 2, 5, 3]
        final = [0, depth, height * block, width * block]
    apart = e("Transpose", e("Reshape", node.input[0], e.constant(shape)), perm=order)
    e.assign(node.output[0], e("Reshape", apart, e.constant(final)))


def _local_response(node: onnx.NodeProto, e: Emitter, values: Values) -> None:
    attributes = attributes_of(node)
    value, size = node.input[0], attributes["size"]
    rank, channels = values.rank(value), values.size(value, 1)
    before, after = (size - 1) // 2, size - 1 - (size - 1) // 2
    pads = [0, before, *[0] * (rank - 2), 0, after, *[0] * (rank - 2)]
    squares = e("Pad", e("Mul", value, value), e.constant(pads))
    total = e.slice(squares, 0, channels, 1)
    for start in range(1, size):
        total = e("Add", total, e.slice(squares, start, start + channels, 1))
    scaled = e("Mul", total, e.scalar(attributes.get("alpha", 1e-4) / size))
    power = e("Pow", e("Add", scaled, e.scalar(attributes.get("bias", 1.0))), e.scalar(attributes.get("beta", 0.75)))
    e.assign(node.output[0], e("Div", value, power))


def _einsum(node: onnx.NodeProto, e: Emitter, values: Values) -> None:
    """One operand: a transposed sum. Two: a batched matrix product, or a sum of products where it is none."""
    equation = attributes_of(node)["equation"].replace(" ", "")
    left, arrow, out = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        letters = left.replace(",", "")
        out = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    if "." in equation or len(terms) > 2 or any(len(set(term)) < len(term) for term in (*terms, out)):
        raise refuse(node, f"{equation!r} has an ellipsis, a repeated index or more than two operands: write it apart")
    operands = []
    for index, (name, term) in enumerate(zip(node.input, terms, strict=True)):
        kept = {*out, *"".join(terms[:index] + terms[index + 1 :])}
        lone = [axis for axis, letter in enumerate(term) if letter not in kept]
        operands.append((e.reduce_sum(name, lone, False) if lone else name, "".join(c for c in term if c in kept)))
    if len(operands) == 1:
        value, term = operands[0]
        e.assign(node.output[0], _transposed(e, value, term, out))
        return
    (a, term_a), (b, term_b) = operands
    batch = [c for c in out if c in term_a and c in term_b]
    summed = [c for c in term_a if c in term_b and c not in out]
    only_a, only_b = ([c for c in term if c not in other] for term, other in ((term_a, term_b), (term_b, term_a)))
    if len(summed) == 1 and len(only_a) <= 1 and len(only_b) <= 1:
        rows, columns = (only_a or ["<"]), (only_b or [">"])
        product = e(
            "MatMul",
            _aligned(e, a, term_a, [*batch, *rows, *summed]),
            _aligned(e, b, term_b, [*batch, *summed, *columns]),
        )
        found = [*batch, *rows, *columns]
        absent = [axis for axis, c in enumerate(found) if c in "<>"]
        if absent:
            product = e("Squeeze", product, e.constant(absent))
        e.assign(node.output[0], _transposed(e, product, "".join(c for c in found if c not in "<>"), out))
        return
    order = [*batch, *only_a, *only_b, *summed]
    product = e("Mul", _aligned(e, a, term_a, order), _aligned(e, b, term_b, order))
    if summed:
        product = e.reduce_sum(product, range(len(order) - len(summed), len(order)), False)
    e.assign(node.output[0], _transposed(e, product, "".join(order[: len(order) - len(summed)]), out))


def _transposed(e: Emitter, value: str, term: str, order: str) -> str:
    return value if term == order else str(e("Transpose", value, perm=[term.index(c) for c in order]))


def _aligned(e: Emitter, value: str, term: str, order: list[str]) -> str:
    """Brings dimensions into an order, with a size of 1 for those that are not there."""
    value = _transposed(e, value, term, "".join(c for c in order if c in term))
    absent = [axis for axis, c in enumerate(order) if c not in term]
    return str(e("Unsqueeze", value, e.constant(absent))) if absent else value


_RULES: dict[str, Rule] = {
    "AveragePool": average_pool,
    "BatchNormalization": _batch_normalization,
    "Celu": _elu,
    "ConvTranspose": conv_transpose,
    "Conv": convolution,
    "CumSum": _cumulative_sum,
    "DepthToSpace": _depth_to_space,
    "Einsum": _einsum,
    "Elu": _elu,
    "GRU": gru,
    "Gelu": _gelu,
    "GlobalMaxPool": _global_max_pool,
    "InstanceNormalization": _instance_normalization,
    "LRN": _local_response,
    "LSTM": lstm,
    "LayerNormalization": _layer_normalization,
    "LpNormalization": _lp_normalization,
    "MatMul": _matrix_product,
    "MaxPool": max_pool,
    "Mean": _mean,
    "Mish": _mish,
    "Pad": pad,
    "Pow": _power,
    "RNN": rnn,
    "ReduceLogSumExp": _reduction,
    "ReduceMax": _extremum,
    "ReduceMean": _reduction,
    "ReduceMin": _extremum,
    "ReduceSum": _reduction,
    "Resize": resize,
    "ScatterElements": _scatter,
    "ScatterND": _scatter,
    "Selu": _elu,
    "Slice": _slice,
    "Softplus": _softplus,
    "SpaceToDepth": _depth_to_space,
    "Sum": _sum,
    "Where": _where,
}
