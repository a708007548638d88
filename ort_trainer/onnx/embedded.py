"""Finds the floats that a file keeps elsewhere than in the initializers of its graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import onnx_ir as ir

from ..step.names import Names

WEIGHT_TYPES = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
"""The types of weights."""


def constant_floats(nodes: Iterable[ir.Node]) -> dict[ir.Value, ir.TensorProtocol]:
    """Returns the results of Constant nodes that are floats of at least one dimension, with their tensors."""
    tensors = {}
    for node in nodes:
        attribute = next(iter(node.attributes.values()), None)
        if node.op_type != "Constant" or node.domain not in ("", "ai.onnx") or attribute is None or attribute.is_ref():
            continue
        tensor = None
        if attribute.name == "value":
            tensor = attribute.as_tensor()
        elif attribute.name == "value_floats":
            tensor = ir.tensor(np.array(attribute.value, np.float32))
        if tensor is not None and tensor.dtype in WEIGHT_TYPES and len(tensor.shape) and tensor.size:
            tensors[node.outputs[0]] = tensor
    return tensors


def embedded_floats(model: ir.Model) -> dict[str, ir.Value]:
    """Returns the floats of at least one dimension in Constant nodes and in initializers of bodies, by name.

    Different bodies may use the same name, so a number is appended to a name that occurs more than once. Copies of a
    model give the same names.
    """
    values: list[ir.Value] = []
    floats: list[ir.Value] = []
    for graph in model.graphs():
        values += [*graph.inputs, *graph.initializers.values(), *(value for node in graph for value in node.outputs)]
        if graph is not model.graph:
            floats += [v for v in graph.initializers.values() if v.dtype in WEIGHT_TYPES and v.shape]
        floats += constant_floats(graph)
    occurrences = Counter(str(value.name) for value in {id(value): value for value in values}.values())
    names = Names(occurrences)
    embedded = {}
    for value in floats:
        name = str(value.name)
        if not value.is_graph_output() and not value.is_graph_input():
            embedded[name if occurrences[name] == 1 else names.unique(name)] = value
    return embedded


def lift(model: ir.Model, floats: dict[str, ir.Value]) -> None:
    """Makes values that :func:`embedded_floats` has returned initializers of the model's graph, in place::

        w = Constant(); y = MatMul(x, w)           =>  y = MatMul(x, w), with the initializer w
        If(c) { initializer w; y = MatMul(x, w) }  =>  If(c) { y = MatMul(x, w) }, with the initializer w outside

    They get the names by which they were returned.
    """
    for name, value in floats.items():
        node = value.producer()
        if node is None:
            assert value.graph is not None
            value = value.graph.initializers.pop(str(value.name))
            value.name = name
        else:
            (tensor,) = constant_floats([node]).values()
            kind, shape = ir.TensorType(tensor.dtype), ir.Shape(tensor.shape.numpy())
            lifted = ir.Value(name=name, type=kind, shape=shape, const_value=tensor)
            value.replace_all_uses_with(lifted)
            assert node.graph is not None
            node.graph.remove(node, safe=True)
            value = lifted
        model.graph.register_initializer(value)
