"""Joins the nodes that exporters write for attention and linear layers into one, which PyTorch computes faster.

Only the copy that becomes a module is changed: written files keep the original nodes.
"""

from __future__ import annotations

import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from .user_operators import registered

DOMAIN = "ort_trainer"
"""The domain of the operators of joined nodes."""
# Before this opset, Softmax normalizes over an axis and all after it together.
_SOFTMAX_OVER_AXIS = 13
_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def join_nodes(model: ir.Model) -> None:
    """Replaces nodes, in place::

        Add(MatMul(x, w), b), for a weight b       =>  Linear(x, w, b)
        MatMul(Softmax(MatMul(q, k)), v)           =>  ScaledDotProduct(q, k, v)
        p = Softmax(Add(MatMul(q, k), mask))
        MatMul(Where(IsNaN(p), 0, p), v)           =>  ScaledDotProduct(q, k, v, mask)

    The last form is that of PyTorch's attention: queries that see no key give zeros. Without the guard, ONNX gives
    NaN for such queries, but PyTorch's operator gives zeros. An unguarded mask is therefore joined only if it does not
    depend on the values of inputs, as a causal mask.
    Scores that are multiplied by a number are left alone: exporters scale q and k.
    """
    for node in list(model.graph):
        inputs = _linear(node)
        if inputs is not None:
            _replace(model, node, "Linear", inputs)
    if model.opset_imports.get("", model.opset_imports.get("ai.onnx", 0)) >= _SOFTMAX_OVER_AXIS:
        for node in list(model.graph):
            inputs = _attention(node)
            if inputs is not None:
                _replace(model, node, "ScaledDotProduct", inputs)
    if DOMAIN in model.opset_imports:
        common_passes.RemoveUnusedNodesPass()(model)


def _replace(model: ir.Model, node: ir.Node, op_type: str, inputs: list[ir.Value | None]) -> None:
    """Replaces the last node of a pattern by the joined node; the pattern's other nodes are then unused."""
    old = node.outputs[0]
    new = ir.Value(name=old.name, type=old.type, shape=old.shape)
    model.graph.insert_before(node, ir.Node(DOMAIN, op_type, inputs, name=node.name, outputs=[new]))
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    model.graph.remove(node, safe=True)
    model.opset_imports[DOMAIN] = 1


def _linear(node: ir.Node) -> list[ir.Value | None] | None:
    """Returns the x, w and b of a linear layer that ends in this node; None for other nodes."""
    if not _is(node, "Add"):
        return None
    for product, bias in (tuple(node.inputs), tuple(node.inputs[::-1])):
        maker = _maker(product)
        is_weight = bias is not None and bias.producer() is None and bias.shape is not None and len(bias.shape) == 1
        if is_weight and maker is not None and _is(maker, "MatMul"):
            return [*maker.inputs, bias]
    return None


def _attention(node: ir.Node) -> list[ir.Value | None] | None:
    """Returns q, the transposed k, v and the mask (or None) of attention that ends in this node; None for others."""
    if not _is(node, "MatMul"):
        return None
    last = _maker(node.inputs[0])
    softmax = _guarded(last)
    guarded = softmax is not None
    softmax = softmax or last
    if softmax is None or not _is(softmax, "Softmax") or softmax.attributes.get_int("axis", -1) != -1:
        return None
    scores, mask = _maker(softmax.inputs[0]), None
    if scores is not None and _is(scores, "Add"):
        product, mask = scores.inputs
        if mask is None or not (guarded or _depends_on_sizes_alone(mask)):
            return None
        scores = _maker(product)
    if scores is None or not _is(scores, "MatMul"):
        return None
    return [*scores.inputs, node.inputs[1], mask]


def _guarded(where: ir.Node | None) -> ir.Node | None:
    """Returns the Softmax whose NaN this Where replaces by zeros; None if it does something else."""
    if where is None or not _is(where, "Where"):
        return None
    is_nan, softmax, zero = _maker(where.inputs[0]), _maker(where.inputs[2], uses=2), where.inputs[1]
    constant = None if zero is None else ir.convenience.get_const_tensor(zero)
    if is_nan is None or softmax is None or constant is None:
        return None
    is_zero = constant.size == 1 and not constant.numpy().any()
    return softmax if is_zero and _is(is_nan, "IsNaN") and is_nan.inputs[0] is where.inputs[2] else None


def _depends_on_sizes_alone(value: ir.Value) -> bool:
    """Returns whether a value is computed from constants and from the sizes of inputs."""
    seen, pending = set[ir.Value](), [value]
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        node = current.producer()
        if node is None and (current.const_value is None or current.is_graph_input()):
            return False  # an input, or a weight
        if node is not None and node.op_type not in ("Shape", "Size"):
            draws = node.op_type.startswith("Random") or node.op_type in ("Bernoulli", "Multinomial")
            if draws or any(a.type in _GRAPHS for a in node.attributes.values() if not a.is_ref()):
                return False  # a graph may use any value around it
            pending += [operand for operand in node.inputs if operand is not None]
    return True


def _maker(value: ir.Value | None, uses: int = 1) -> ir.Node | None:
    """Returns the node that computes a value; None if the value is a graph output or has another number of uses.

    A node can be joined away only if nothing outside the pattern uses its result.
    """
    if value is None or value.is_graph_output() or len(value.uses()) != uses:
        return None
    return value.producer()


def _is(node: ir.Node, op_type: str) -> bool:
    """Returns whether a node is ONNX's operator of this type, which the user has not replaced by a registered one."""
    return node.op_type == op_type and node.domain in ("", "ai.onnx") and not registered("", op_type)
