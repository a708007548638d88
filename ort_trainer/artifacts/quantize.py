"""Quantizes frozen weights to 8 or 4 bits, which take less memory on a device that trains the others."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from ..core.quantized import int4_blocks, int8_rows
from ..state.state import Array, State
from ..step import Step
from ..step.emitter import Emitter
from ..step.names import Names
from .files import Described

_BLOCK = 32
"""Number of consecutive elements of a row that share a scale in 4 bits."""


def with_quantized(
    models: Mapping[str, Described], checkpoint: State, kind: str, buffers: Collection[str]
) -> tuple[dict[str, Described], State]:
    """Returns models that take quantized frozen weights, and the checkpoint with these weights.

    Frozen float32 weights of two or more dimensions are quantized symmetrically: in 8 bits with a scale for each row,
    in 4 bits with a scale for each block of 32 elements of a row. In the checkpoint, ``<name>.int8`` or
    ``<name>.int4``, and ``<name>.scale`` replace a weight. A weight that is multiplied by itself, or is an output, is
    not quantized.

    Args:
        models: Name of a file -> model and its description; the graphs of steps are changed in place.
        checkpoint: The state, which is not changed.
        kind: ``int8`` or ``int4``.
        buffers: Names of the parameters that are buffers of the model.

    Raises:
        ValueError: If no weight is frozen.
    """
    unquantized = {*checkpoint.trainable, *buffers}
    frozen = {
        name: value
        for name, value in checkpoint.parameters.items()
        if name not in unquantized
        and value.ndim > 1
        and value.dtype == np.float32
        and value.size
        and np.isfinite(value).all()
    }
    for model, description in models.values():
        if isinstance(description, Step):
            values = {str(value.name): value for value in model.graph.inputs}
            frozen = {
                name: value
                for name, value in frozen.items()
                if name not in description.state or _can_be_rewritten(model.graph, values[description.state[name]])
            }
    if not frozen:
        raise ValueError(
            "quantize_frozen needs a frozen float32 weight of at least two dimensions, but the model has none: freeze "
            "weights with utils.frozen_weights or requires_grad_(False), or leave quantize_frozen out"
        )
    quantized = {
        name: int8_rows(value) if kind == "int8" else int4_blocks(value, _BLOCK) for name, value in frozen.items()
    }
    new_models = dict(models)
    for file, (model, description) in models.items():
        if isinstance(description, Step):
            new_models[file] = model, _rewritten(model, description, frozen, quantized, kind)
    remaining = {name: value for name, value in checkpoint.parameters.items() if name not in frozen}
    stored = {
        key: value
        for name, pair in quantized.items()
        for key, value in zip((f"{name}.{kind}", f"{name}.scale"), pair, strict=True)
    }
    # A trainer can't load this state again, so what only a trainer reads is left out.
    state = replace(checkpoint, parameters=remaining, buffers={**checkpoint.buffers, **stored}, trainer_options=None)
    return new_models, replace(state, transient={}, idle={}, window=None)


def _rewritten(
    model: ir.Model,
    description: Step,
    frozen: Mapping[str, Array],
    quantized: Mapping[str, tuple[Array, Array]],
    kind: str,
) -> Step:
    """Changes the graph of a step, in place, and returns its new description.

    Each use dequantizes the weight again, just before it is needed: a zero computed from the node's other operand is
    added to make the result depend on it. Otherwise ONNX Runtime would merge equal computations and keep the float32
    weight from the forward pass to the backward pass, or dequantize the weights of all layers first.
    """
    graph = model.graph
    values = ir.convenience.create_value_mapping(graph)
    names = Names(values)
    state = dict(description.state)
    for name, value in frozen.items():
        if name not in state:
            continue
        weight = values[state.pop(name)]
        numbers, scale = (
            _input(names.unique(f"{weight.name}.{part}"), array)
            for part, array in zip((kind, "scale"), quantized[name], strict=True)
        )
        place = [*graph.inputs].index(weight)
        for node, index, views in [*_uses(weight)]:
            emit = Emitter(model.opset_imports, names, f"{weight.name}.dequantized")
            if _takes_rows(node, index) and not views:
                rows = [emit("Gather", part, node.inputs[1]) for part in (numbers, scale)]
                float32_rows = _dequantized(emit, rows[0], rows[1], value.shape, kind, None)
                old = node.outputs[0]
                float32_rows.type, float32_rows.shape = old.type, old.shape
                ir.convenience.replace_nodes_and_values(graph, node, [node], emit.nodes, [old], [float32_rows])
                continue
            others = [operand for place, operand in enumerate(node.inputs) if place != index and operand is not None]
            float32 = _dequantized(emit, numbers, scale, value.shape, kind, _zero(emit, others))
            for view in views:
                attributes: dict[str, Any] = dict(view.attributes)
                float32 = emit(view.op_type, float32, *view.inputs[1:], **attributes)
            graph.insert_before(node, emit.nodes)
            node.replace_input_with(index, float32)
        graph.inputs[place : place + 1] = [numbers, scale]
        state |= {f"{name}.{kind}": str(numbers.name), f"{name}.scale": str(scale.name)}
    common_passes.RemoveUnusedNodesPass()(model)
    return replace(description, state=state)


def _can_be_rewritten(graph: ir.Graph, weight: ir.Value) -> bool:
    """Returns whether each use can dequantize the weight: none is a graph output, in a branch, or uses it twice."""
    derived = {weight, *(view.outputs[0] for _, _, views in _uses(weight) for view in views)}
    leaves = {value for value in derived if value in graph.outputs}
    nodes = {node for value in derived for node, _ in value.uses()}
    inside = all(node.graph is graph for node in nodes)
    return inside and not leaves and all(len(derived.intersection(node.inputs)) == 1 for node in nodes)


def _takes_rows(node: ir.Node, index: int) -> bool:
    """Returns whether a node gathers rows of a weight, so that only these rows need to be dequantized."""
    return node.op_type == "Gather" and index == 0 and node.attributes.get_int("axis", 0) == 0


def _uses(value: ir.Value, views: tuple[ir.Node, ...] = ()) -> Iterator[tuple[ir.Node, int, tuple[ir.Node, ...]]]:
    """Yields the nodes that use a value, with the index of the input, and the views (transposes, ...) in between.

    Views are written again for each use: their shared result would stay in memory until the backward pass.
    """
    for node, index in value.uses():
        if node.op_type in ("Identity", "Transpose", "Reshape", "Unsqueeze") and index == 0:
            yield from _uses(node.outputs[0], (*views, node))
        else:
            yield node, index, views


def _dequantized(
    emit: Emitter, numbers: ir.Value, scale: ir.Value, shape: tuple[int, ...], kind: str, zero: ir.Value | None
) -> ir.Value:
    """Returns the float32 weight of a shape, or some rows of it: then their sizes replace the first dimension.

    It is not written as DequantizeLinear, which ONNX Runtime would move around and pair with QuantizeLinear.
    """

    def whole(value: int, dtype: ir.DataType) -> ir.Value:
        """Returns a number to which the zero is added, so that it depends on the other operand."""
        if zero is None:
            return emit.constant(value, dtype.numpy())
        return emit("Cast", emit("Add", emit.constant(value, np.float32), zero), to=dtype)

    last = emit.constant([-1])
    if kind == "int8":
        int8 = numbers if zero is None else emit("BitwiseAnd", numbers, whole(-1, ir.DataType.INT8))
        axes = emit.constant([*range(1 - len(shape), 0)])
        return emit("Mul", emit("Cast", int8, to=ir.DataType.FLOAT), emit("Unsqueeze", scale, axes))
    low = emit("BitwiseAnd", numbers, whole(15, ir.DataType.UINT8))
    high = emit("BitShift", numbers, whole(4, ir.DataType.UINT8), direction="RIGHT")
    pairs = emit("Concat", *(emit("Unsqueeze", half, last) for half in (low, high)), axis=-1)
    rows = emit("Slice", emit("Shape", numbers), emit.constant([0]), emit.constant([-2]))
    blocks = emit("Reshape", pairs, emit("Concat", rows, emit.constant([-1, _BLOCK]), axis=0))
    centred = emit("Sub", emit("Cast", blocks, to=ir.DataType.FLOAT), emit.constant(8, np.float32))
    weight = emit("Mul", centred, emit("Unsqueeze", scale, last))
    weight = emit("Reshape", weight, emit("Concat", rows, last, axis=0))
    columns = math.prod(shape[1:])
    if columns % _BLOCK:
        weight = emit("Slice", weight, emit.constant([0]), emit.constant([columns]), last)
    return (
        weight if len(shape) == 2 else emit("Reshape", weight, emit("Concat", rows, emit.constant(shape[1:]), axis=0))
    )


def _zero(emit: Emitter, operands: Sequence[ir.Value]) -> ir.Value | None:
    """Returns 0.0, computed from the first float32 operand; None if there is none.

    It is (isnan(x) and not isnan(x)): unlike x - x or x * 0, it is 0 for NaN and infinity too.
    """
    for operand in operands:
        if operand.dtype == ir.DataType.FLOAT:
            first = emit("Gather", emit("Reshape", operand, emit.constant([-1])), emit.constant(0))
            is_nan = emit("IsNaN", first)
            return emit("Cast", emit("And", is_nan, emit("Not", is_nan)), to=ir.DataType.FLOAT)
    return None


def _input(name: str, like: Array) -> ir.Value:
    kind = ir.TensorType(ir.DataType.from_numpy(like.dtype))
    return ir.Value(name=name, type=kind, shape=ir.Shape(like.shape))
