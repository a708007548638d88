"""Prepares models of scikit-learn's exporter, which have coefficients in attributes and maps as outputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir

from ..core.errors import ExportError
from ..step.names import Names

DOMAIN = "ai.onnx.ml"
"""The domain of the operators of classical machine learning."""
_FUNCTIONS = {"SOFTMAX": "Softmax", "LOGISTIC": "Sigmoid"}


def without_maps(proto: onnx.ModelProto) -> tuple[onnx.ModelProto, dict[str, onnx.TypeProto]]:
    """Returns a model without the types of outputs that contain maps, and these types by name.

    onnx_ir can't read types of maps. The returned model is a copy if it had any.

    Raises:
        ExportError: If an input is a map.
    """
    graph = proto.graph
    inputs = [value.name for value in graph.input if _has_map(value.type)]
    if inputs:
        raise ExportError(
            f"the inputs {inputs} of the ONNX model are maps, but a batch has only tensors: export the model without "
            "the operator that takes them, such as DictVectorizer"
        )
    types = {value.name: value.type for value in graph.output if _has_map(value.type)}
    if not types and not any(_has_map(value.type) for value in graph.value_info):
        return proto, {}
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for value in [*copy.graph.output, *copy.graph.value_info]:
        if _has_map(value.type):
            value.ClearField("type")
    return copy, types


def _has_map(kind: onnx.TypeProto) -> bool:
    """Returns whether a type is a map, or a sequence or optional of maps."""
    return (
        kind.HasField("map_type")
        or (kind.HasField("sequence_type") and _has_map(kind.sequence_type.elem_type))
        or (kind.HasField("optional_type") and _has_map(kind.optional_type.elem_type))
    )


def outputs_before_maps(graph: ir.Graph) -> None:
    """Replaces outputs that are maps from classes to probabilities by the tensors of probabilities, in place."""
    outputs: list[ir.Value] = []
    maps = []
    for value in graph.outputs:
        node = value.producer()
        if node is not None and node.op_type == "ZipMap" and node.domain == DOMAIN and node.inputs[0] is not None:
            maps.append(node)
            value = node.inputs[0]
            labels = [len(attribute.value) for attribute in node.attributes.values()]
            if value.type is None:
                value.type = ir.TensorType(ir.DataType.FLOAT)
            if value.shape is None and labels:
                value.shape = ir.Shape([None, labels[0]])
        if value not in outputs:
            outputs.append(value)
    graph.outputs.clear()
    graph.outputs.extend(outputs)
    graph.remove([node for node in maps if not node.outputs[0].uses()], safe=True)


def name_coefficients(model: ir.Model) -> dict[str, tuple[int, str]]:
    """Makes the coefficients of linear models initializers, in place::

        y = LinearRegressor(x)           =>  y = Gemm(x, coefficients, intercepts)
        label, y = LinearClassifier(x)   =>  y = Softmax(Gemm(x, coefficients, intercepts)), or Sigmoid

    The initializers have the shapes of scikit-learn's ``coef_`` and ``intercept_``. A classifier node stays in the
    graph, as it computes the label.

    Returns:
        Name of each new initializer -> the position of its node among those that are no Constant, and the attribute.
    """
    graph = model.graph
    places: dict[str, tuple[int, str]] = {}
    names = Names(ir.convenience.create_value_mapping(graph))
    for index, node in enumerate([node for node in graph if node.op_type != "Constant"]):
        rows = _rows(node)
        if not rows:
            continue
        weights = []
        for attribute, shape in (("coefficients", (rows, -1)), ("intercepts", (rows,))):
            if attribute in node.attributes:
                name = names.unique(f"{node.name or node.op_type}.{attribute}")
                values = np.array(node.attributes[attribute].value, np.float32).reshape(shape)
                weights.append(
                    ir.Value(
                        name=name,
                        type=ir.TensorType(ir.DataType.FLOAT),
                        shape=ir.Shape(values.shape),
                        const_value=ir.tensor(values, name=name),
                    )
                )
                graph.register_initializer(weights[-1])
                places[name] = index, attribute
        # ONNX Runtime computes in fp32 whatever the type of the features.
        nodes = [ir.node("Cast", [node.inputs[0]], {"to": ir.DataType.FLOAT.value})]
        nodes.append(ir.node("Gemm", [nodes[0].outputs[0], *weights], {"transB": 1}, name=node.name))
        function = _FUNCTIONS.get(node.attributes.get_string("post_transform") or "")
        if function is not None:
            nodes.append(ir.node(function, [nodes[1].outputs[0]], {"axis": 1} if function == "Softmax" else {}))
        _replace(model, node, nodes)
    return places


def select_features(model: ir.Model) -> None:
    """Replaces nodes that select columns by the standard operator, in place::

        y = ArrayFeatureExtractor(x, indices)  =>  y = Gather(x, Reshape(indices, -1))

    One that looks up the label of a class in a table is left alone: it can't be trained.
    """
    for node in list(model.graph):
        x = node.inputs[0] if node.inputs else None
        producer = None if x is None else x.producer()
        is_table = x is None or x.is_initializer() or (producer is not None and producer.op_type == "Constant")
        if node.op_type != "ArrayFeatureExtractor" or node.domain != DOMAIN or is_table:
            continue
        everything = ir.node("Constant", [], {"value_ints": [-1]})
        indices = ir.node("Reshape", [node.inputs[1], everything.outputs[0]])
        columns = ir.node("Gather", [x, indices.outputs[0]], {"axis": -1}, name=node.name)
        _replace(model, node, [everything, indices, columns])


def _rows(node: ir.Node) -> int:
    """Returns how many scores a linear model computes; 0 if the node is no linear model or must stay unchanged.

    ONNX Runtime deviates from ONNX for a single score of two classes, and for a function of a single score.
    """
    if node.domain != DOMAIN or node.op_type not in ("LinearClassifier", "LinearRegressor"):
        return 0
    floats = {name: a.value for name, a in node.attributes.items() if a.type == ir.AttributeType.FLOATS}
    coefficients, intercepts = (len(floats.get(name, ())) for name in ("coefficients", "intercepts"))
    function = node.attributes.get_string("post_transform") or "NONE"
    if node.op_type == "LinearClassifier":
        rows, least = intercepts if len(node.outputs) == 2 else 0, 2
    else:
        rows, least = node.attributes.get_int("targets") or 1, 1 if function == "NONE" else 2
    fits = rows >= least and coefficients and coefficients % rows == 0 and intercepts in (0, rows)
    return int(rows) if fits and node.inputs and function in ("NONE", *_FUNCTIONS) else 0


def _replace(model: ir.Model, node: ir.Node, nodes: Sequence[ir.Node]) -> None:
    """Makes new nodes compute the last output of a node, which is removed if it has no other output."""
    model.graph.insert_before(node, nodes)
    old, new = node.outputs[-1], nodes[-1].outputs[0]
    new.name, new.type, new.shape = old.name, old.type, old.shape
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    old.name = Names(ir.convenience.create_value_mapping(model.graph)).unique(str(old.name))
    if len(node.outputs) == 1:
        model.graph.remove(node, safe=True)
    # A scikit-learn model may import ai.onnx.ml alone; the new nodes are ONNX's own.
    if not {"", "ai.onnx"} & set(model.opset_imports):
        model.opset_imports[""] = 13
