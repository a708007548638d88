"""Adds gradients to the sums of earlier micro-batches, within the graph of a training step."""

from __future__ import annotations

import math
from collections.abc import Mapping

import onnx_ir as ir

from .names import Names

RESET = "lazy_reset_grad"
BUFFER = "{}_grad.accumulation.buffer"
ACCUMULATED = "{}_grad.accumulation.out"
"""onnxruntime-training's names of a parameter's gradient input and output."""

# Number of elements from which copying a gradient takes longer than the If that avoids the copy.
_WORTH_MOVING = 1 << 15


def accumulate(
    reset: ir.Value,
    gradients: Mapping[str, ir.Value],
    buffers: Mapping[str, ir.Value],
    results: Mapping[str, ir.Value],
    names: Names,
) -> list[ir.Node]:
    """Returns nodes that overwrite gradient buffers, or add to them.

    Args:
        reset: Bool [1]: whether to overwrite.
        gradients: Name of a parameter -> its gradient.
        buffers: Name of a parameter -> the sum of its earlier gradients.
        results: Name of a parameter -> the new sum, with its type and shape.
        names: Names in use.
    """
    large = [name for name, gradient in gradients.items() if _makers(gradient, results[name])]
    small = [name for name in gradients if name not in large]
    return [
        _accumulation(reset, {name: gradients[name] for name in part}, buffers, {n: results[n] for n in part}, names)
        for part in (*([name] for name in large), small)
        if part
    ]


def _accumulation(
    reset: ir.Value,
    gradients: Mapping[str, ir.Value],
    buffers: Mapping[str, ir.Value],
    results: Mapping[str, ir.Value],
    names: Names,
) -> ir.Node:
    """Returns a node that overwrites gradient buffers, or adds to them.

    It is an If: selecting by arithmetic would cost a pass over each buffer and would keep a NaN. Nodes that compute
    only a gradient move into it, which avoids copying the gradient.
    """
    moved = {name: _makers(gradient, results[name]) for name, gradient in gradients.items()}
    branches = {}
    for branch, adds in (("then_branch", False), ("else_branch", True)):
        nodes: list[ir.Node] = []
        outputs = []
        for name, gradient in gradients.items():
            out = results[name]
            inner: dict[ir.Value | None, ir.Value] = {}
            for node in moved[name]:
                values = [inner.get(value, value) for value in node.inputs]
                new_value = ir.Value(name=names.unique(f"{node.outputs[0].name}.{branch}"), type=node.outputs[0].type)
                inner[node.outputs[0]] = new_value
                nodes.append(
                    ir.node(node.op_type, values, dict(node.attributes), outputs=[new_value])  # type: ignore[arg-type]
                )
            value = inner[moved[name][-1].outputs[0]] if moved[name] else gradient
            if adds or not moved[name]:
                new_value = ir.Value(name=names.unique(f"{out.name}.{branch}"))
                operands = [buffers[name], value] if adds else [value]
                nodes.append(ir.node("Add" if adds else "Identity", operands, outputs=[new_value]))
                value = new_value
            value.type, value.shape = out.type, out.shape
            outputs.append(value)
        branches[branch] = ir.Graph([], outputs, nodes=nodes, name=branch)
    return ir.node("If", [reset], branches, outputs=list(results.values()))


def _makers(gradient: ir.Value, result: ir.Value) -> list[ir.Node]:
    """Returns the nodes that compute only this gradient, in order; none for a small gradient."""
    size = math.prod(size for size in result.shape or () if isinstance(size, int))
    if size < _WORTH_MOVING or gradient.uses():
        return []
    node, transposes = gradient.producer(), list[ir.Node]()
    while node is not None and node.op_type == "Identity":
        source = node.inputs[0]
        node = source.producer() if source is not None and len(source.uses()) == 1 else None
    if node is None or node.op_type not in ("Gemm", "MatMul"):
        return []
    for value in node.inputs:  # ONNX Runtime fuses a Transpose into the product
        before = None if value is None or len(value.uses()) > 1 else value.producer()
        if before is not None and before.op_type == "Transpose":
            transposes.append(before)
    return [*transposes, node]
