"""Converts a model to a newer or an older ONNX operator set."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import onnx
import onnx_ir as ir

# Versions with the same inputs, outputs and attributes that do not mean the same: one scale of a tensor or several, and
# other places of the pixels.
_CHANGED = frozenset({"DequantizeLinear", "QuantizeLinear", "Resize"})
_RENAMED = frozenset({"BatchNormalization"})  # only the names of its inputs and outputs
# Before this version they flatten the axes from theirs on. ONNX's converter leaves the axis, with other results.
_FLATTENS_BEFORE = 13
_FLATTENING = frozenset({"LogSoftmax", "Softmax"})
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
    if opset < _FLATTENS_BEFORE <= present:
        _check_axes(model, opset)
    import onnx.version_converter  # slow imports, which few users need
    from onnx.inliner import inline_selected_functions

    proto = ir.to_proto(model)
    try:
        absent = sorted(
            {node.op_type for node in all_nodes(proto.graph.node) if not node.domain and _schema(node, opset) is None}
        )
        if absent:
            absent_ids = [("", name) for name in absent]
            proto = inline_selected_functions(proto, absent_ids, inline_schema_functions=True)
        for node in all_nodes(proto.graph.node):
            _adapt(node, present, opset)
        proto.opset_import.add(domain=_HIDDEN, version=1)
        proto = onnx.version_converter.convert_version(proto, opset)
        for node in all_nodes(proto.graph.node):
            node.domain = node.domain if node.domain != _HIDDEN else ""
        proto.opset_import.remove(next(entry for entry in proto.opset_import if entry.domain == _HIDDEN))
        proto.ir_version = onnx.helper.find_min_ir_version_for(list(proto.opset_import), ignore_unknown=True)
        if not any(entry.domain for entry in proto.opset_import):  # the checker knows ONNX's own operators alone
            onnx.checker.check_model(proto, full_check=True)
    except Exception as error:  # the converter and the checker are C++, whose errors have no common class
        since = {
            node.op_type: schema.since_version
            for node in all_nodes(proto.graph.node)
            if (schema := _schema(node, present))
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


def _check_axes(model: ir.Model, opset: int) -> None:
    """Checks that operators that flatten in an opset have no axes to flatten."""
    for node in model.graph.all_nodes():
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else -1
        shape = node.inputs[0].shape if node.inputs and node.inputs[0] is not None else None
        last = -1 if shape is None else shape.rank() - 1
        if node.op_type in _FLATTENING and not node.domain and axis not in (-1, last):
            raise ValueError(
                f"the model can't be in operator set {opset}, where {node.op_type} takes the axes from {axis} on as "
                f"one: use {_FLATTENS_BEFORE} or more"
            )


def _adapt(node: onnx.NodeProto, present: int, opset: int) -> None:
    """Removes attributes that say what an older operator does anyway, and hides an operator that is the same there."""
    now, then = _schema(node, present), _schema(node, opset)
    if now is None or then is None or now.since_version == then.since_version:
        return
    for attribute in list(node.attribute):
        if attribute.name not in then.attributes and attribute == now.attributes[attribute.name].default_value:
            node.attribute.remove(attribute)
    has_graph = any(bodies(node))  # whose operators must be converted
    if not has_graph and _is_extended(then, now) and _takes(then, node):
        node.domain = _HIDDEN


def _is_extended(then: onnx.defs.OpSchema, now: onnx.defs.OpSchema) -> bool:
    """Returns whether an operator has since got types, attributes and inputs alone, so that it computes the same.

    ONNX's converter, which has no way back for many of these, need not see them.
    """
    if now.name in _CHANGED and now.doc != then.doc:
        return False
    before, after = ([[v.name for v in each] for each in (schema.inputs, schema.outputs)] for schema in (then, now))
    return (now.name in _RENAMED or all(a[: len(b)] == b for a, b in zip(after, before, strict=True))) and all(
        name in now.attributes
        and (now.attributes[name].type, now.attributes[name].default_value) == (old.type, old.default_value)
        for name, old in then.attributes.items()
    )


def _takes(schema: onnx.defs.OpSchema, node: onnx.NodeProto) -> bool:
    """Returns whether an operator has a node's inputs and attributes, and needs no others."""
    optional = onnx.defs.OpSchema.FormalParameterOption.Optional
    return (
        schema.min_input <= len(node.input) <= schema.max_input
        and all(name or value.option == optional for name, value in zip(node.input, schema.inputs, strict=False))
        and {attribute.name for attribute in node.attribute} <= schema.attributes.keys()
    )


def _schema(node: onnx.NodeProto, opset: int) -> onnx.defs.OpSchema | None:
    """Returns the operator of a node in an opset of ONNX; None if there is none."""
    try:
        return onnx.defs.get_schema(node.op_type, opset, node.domain)
    except onnx.defs.SchemaError:
        return None


def all_nodes(nodes: Iterable[onnx.NodeProto]) -> Iterator[onnx.NodeProto]:
    """Yields nodes, including those of graphs in their attributes."""
    for node in nodes:
        yield node
        for graph in bodies(node):
            yield from all_nodes(graph.node)


def bodies(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yields the graphs in attributes of a node."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs
