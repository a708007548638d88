"""The operator ``after``, which :mod:`~...graph.recompute` inserts, in ONNX.

ONNX has no such operator. It becomes a Reshape to the tensor's own shape, where the shape includes empty slices of the
other tensors. Nothing is copied. Optimizers that know shapes would remove such a Reshape, so the operator first belongs
to a domain of our own and is lowered after the graph is simplified. ONNX Runtime's optimizers leave the Reshape alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import onnx
import onnx_ir as ir

from ...fx.operator_table import Value, translation
from ...graph.recompute import AFTER

_DOMAIN = "ort_trainer"
_ANY = [f"tensor({kind})" for kind in ("float", "double", "float16", "bfloat16", "int64", "int32", "bool")]
_Formal = onnx.defs.OpSchema.FormalParameter
_SCHEMA = onnx.defs.OpSchema(
    "After",
    _DOMAIN,
    1,
    inputs=[
        _Formal("value", "T"),
        _Formal("others", "U", param_option=onnx.defs.OpSchema.FormalParameterOption.Variadic, is_homogeneous=False),
    ],
    outputs=[_Formal("result", "T")],
    type_constraints=[("T", _ANY, ""), ("U", _ANY, "")],
    attributes=[onnx.defs.OpSchema.Attribute("rank", onnx.defs.OpSchema.AttrType.INT, required=True)],
)


@functools.cache
def _after() -> Any:
    from onnxscript.values import Op, Opset

    return Op(Opset(_DOMAIN, 1), "After", _SCHEMA)


@translation(AFTER)
def _translate_after(value: Value, others: Sequence[Value]) -> Value:
    """Writes the operator as it is, with the rank of the value."""
    return _after()(value, *others, rank=len(value.shape))


def lower_after(model: ir.Model) -> None:
    """Replaces the operator with ONNX operators, in place."""
    graph = model.graph
    lowering = _Lowering(graph)
    for node in [node for node in graph if node.domain == _DOMAIN]:
        lowering.replace(node)
    model.opset_imports.pop(_DOMAIN, None)


class _Lowering:
    """Writes operators of a graph as Reshapes, which share constants and empty slices."""

    def __init__(self, graph: ir.Graph) -> None:
        self._graph = graph
        self._constants: dict[tuple[int, ...], ir.Value] = {}
        self._empty: dict[ir.Value, ir.Value] = {}
        self._shapes: dict[tuple[Any, ...], ir.Value] = {}

    def replace(self, node: ir.Node) -> None:
        value, *others = node.inputs
        rank = node.attributes["rank"].as_int()
        key = (rank, *others)
        if key not in self._shapes:
            empty = [self._empty_slice(other, node) for other in others if other is not None]
            # A 0 keeps the value's size.
            kept = [self._constant(*[0] * rank)] if rank else []
            self._shapes[key] = self._insert(node, "Concat", [*kept, *empty], {"axis": 0})
        reshaped = self._insert(node, "Reshape", [value, self._shapes[key]])
        (old,) = node.outputs
        reshaped.name, reshaped.type, reshaped.shape = old.name, old.type, old.shape
        old.replace_all_uses_with(reshaped)
        self._graph.remove(node, safe=True)

    def _empty_slice(self, value: ir.Value, before: ir.Node) -> ir.Value:
        """Returns an empty int64 slice of a tensor: a shape that contains it can't be computed before the tensor."""
        if value not in self._empty:
            flat = self._insert(before, "Reshape", [value, self._constant(-1)])
            nothing = self._insert(before, "Slice", [flat, *[self._constant(0)] * 3])
            self._empty[value] = self._insert(before, "Cast", [nothing], {"to": ir.DataType.INT64.value})
        return self._empty[value]

    def _constant(self, *numbers: int) -> ir.Value:
        if numbers not in self._constants:
            name = f"after_{len(self._constants)}"
            tensor = ir.tensor(list(numbers), dtype=ir.DataType.INT64, name=name)
            self._constants[numbers] = ir.Value(name=name, const_value=tensor)
            self._graph.register_initializer(self._constants[numbers])
        return self._constants[numbers]

    def _insert(
        self, before: ir.Node, kind: str, inputs: Sequence[ir.Value | None], attributes: dict[str, int] | None = None
    ) -> ir.Value:
        node = ir.node(kind, inputs, attributes)
        self._graph.insert_before(before, node)
        return node.outputs[0]
