"""Converts a model to a newer or an older ONNX operator set."""

from __future__ import annotations

import re
from collections.abc import Iterator

import onnx
import onnx_ir as ir

# Their versions differ by types that they take and by attributes, never in what they compute, so ONNX's converter,
# which has no way back for them, need not see them. It is the same with operators whose description has not changed.
_EXTENDED = frozenset(
    {
        *("Add", "BatchNormalization", "Cast", "Div", "Gather", "GatherElements", "Gemm", "Mul", "Pad", "PRelu"),
        *("Reshape", "ScatterElements", "ScatterND", "Shape", "Sub"),
    }
)
_PLACE = re.compile(r"^\S+:\d+: \w+: Assertion .* failed: ")  # in the converter's source
_HIDDEN = "ort_trainer.hidden"  # a domain that the converter does not know, so it leaves its operators as they are


def newer(model: ir.Model, opset: int) -> None:
    """Converts a model to a higher opset in place."""
    if model.opset_imports.setdefault("", opset) < opset:  # a graph may have no operator
        import onnxscript.version_converter

        onnxscript.version_converter.convert_version(model, opset, fallback=True)


def older(model: ir.Model, opset: int) -> ir.Model:
    """Returns a model in a lower opset; the model itself where it is in none that is higher.

    Operators that are newer are replaced by those that define them; ONNX's converter rewrites the others.

    Raises:
        ValueError: If the converter can't; the message names the operators that are newer.
    """
    present = model.opset_imports.get("", opset)
    if present <= opset:
        return model
    import onnx.version_converter  # slow imports, which few users need
    from onnx.inliner import inline_selected_functions

    proto = ir.to_proto(model)
    try:
        absent = sorted(
            {node.op_type for node in _nodes(proto.graph) if not node.domain and _schema(node, opset) is None}
        )
        if absent:
            absent_ids = [("", name) for name in absent]
            proto = inline_selected_functions(proto, absent_ids, inline_schema_functions=True)
        for node in _nodes(proto.graph):
            _adapt(node, present, opset)
        proto.opset_import.add(domain=_HIDDEN, version=1)
        proto = onnx.version_converter.convert_version(proto, opset)
        for node in _nodes(proto.graph):
            node.domain = node.domain if node.domain != _HIDDEN else ""
        proto.opset_import.remove(next(entry for entry in proto.opset_import if entry.domain == _HIDDEN))
        proto.ir_version = onnx.helper.find_min_ir_version_for(list(proto.opset_import), ignore_unknown=True)
        if not any(entry.domain for entry in proto.opset_import):  # the checker knows ONNX's own operators alone
            onnx.checker.check_model(proto, full_check=True)
    except Exception as error:  # the converter and the checker are C++, whose errors have no common class
        since = {
            node.op_type: schema.since_version for node in _nodes(proto.graph) if (schema := _schema(node, present))
        }
        names = ", ".join(f"{name} ({version})" for name, version in sorted(since.items()) if version > opset)
        raise ValueError(
            f"the model can't be in operator set {opset}: newer are {names}; ONNX's converter says: "
            f"{_PLACE.sub('', str(error).strip().splitlines()[0])}"
        ) from error
    converted: ir.Model = ir.from_proto(proto)
    for value, old in zip(converted.graph.outputs, model.graph.outputs, strict=True):
        value.meta.update(old.meta)
    return converted


def _adapt(node: onnx.NodeProto, present: int, opset: int) -> None:
    """Removes attributes that say what an older operator does anyway, and hides an operator that is the same there."""
    now, then = _schema(node, present), _schema(node, opset)
    if now is None or then is None or now.since_version == then.since_version:
        return
    for attribute in list(node.attribute):
        if attribute.name not in then.attributes and attribute == now.attributes[attribute.name].default_value:
            node.attribute.remove(attribute)
    is_same = node.op_type in _EXTENDED or _described(now) == _described(then)
    has_graph = any(attribute.HasField("g") for attribute in node.attribute)  # whose operators must be converted
    fits = len(node.input) <= len(then.inputs)
    if (
        is_same
        and fits
        and not has_graph
        and {attribute.name for attribute in node.attribute} <= then.attributes.keys()
    ):
        node.domain = _HIDDEN


def _described(schema: onnx.defs.OpSchema) -> tuple[object, ...]:
    return schema.doc, [value.name for value in schema.inputs], [value.name for value in schema.outputs]


def _schema(node: onnx.NodeProto, opset: int) -> onnx.defs.OpSchema | None:
    """Returns the operator of a node in an opset of ONNX; None if there is none."""
    try:
        return onnx.defs.get_schema(node.op_type, opset, node.domain)
    except onnx.defs.SchemaError:
        return None


def _nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yields the nodes of a graph and of the graphs within."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in [attribute.g] if attribute.HasField("g") else attribute.graphs:
                yield from _nodes(inner)
