"""Stores frozen weights in 8 or 4 bits: a device keeps them small, and trains the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common_passes

from ..core.errors import shown
from ..state.state import Array, State
from ..step import Step
from ..step.emitter import Emitter, Names
from .files import Described

__all__ = ["KINDS", "check_kind", "with_quantized"]

KINDS = ("int8", "int4")
_BLOCK = 32
"""Number of elements of a row that share a scale in 4 bits."""


def check_kind(kind: object) -> None:
    """Checks the name of a type of quantized weights.

    Raises:
        ValueError: If it is unknown.
    """
    if kind not in KINDS:
        raise ValueError(f"quantize_frozen must be None or one of {list(KINDS)}, but {shown(kind)} was given")


def with_quantized(models: Mapping[str, Described], checkpoint: State, kind: str) -> tuple[dict[str, Described], State]:
    """Returns models that take frozen weights in few bits, and the checkpoint with them.

    Float32 weights of two or more dimensions that are not trained are rounded to steps of their own size: 255 steps for
    each row in 8 bits, 15 for each block of 32 elements of a row in 4 bits. In the checkpoint, ``<name>.int8`` or
    ``<name>.int4``, and ``<name>.scale`` take their place.

    Args:
        models: Name of a file -> model and its description; the graphs of steps are changed.
        checkpoint: The state, which is not changed.
        kind: One of :data:`KINDS`.

    Raises:
        ValueError: If no weight is frozen.
    """
    frozen = {
        name: value
        for name, value in checkpoint.parameters.items()
        if name not in checkpoint.trainable and value.ndim > 1 and value.dtype == np.float32 and value.size
    }
    if not frozen:
        raise ValueError(
            "quantize_frozen needs a frozen float32 weight of at least two dimensions, but the model has none: freeze "
            "weights with utils.frozen_weights or requires_grad_(False), or leave quantize_frozen out"
        )
    quantized = {name: (_int8 if kind == "int8" else _int4)(value) for name, value in frozen.items()}
    made = dict(models)
    for file, (model, said) in models.items():
        if isinstance(said, Step):
            made[file] = model, _rewritten(model, said, frozen, quantized, kind)
    left = {name: value for name, value in checkpoint.parameters.items() if name not in frozen}
    stored = {
        key: value
        for name, pair in quantized.items()
        for key, value in zip((f"{name}.{kind}", f"{name}.scale"), pair, strict=True)
    }
    # A trainer can't take the whole state back, but has the weights themselves.
    state = replace(checkpoint, parameters=left, buffers={**checkpoint.buffers, **stored}, trainer_options=None)
    return made, replace(state, transient={}, idle={}, window=None)


def _int8(value: Array) -> tuple[Array, Array]:
    """Returns whole numbers of -127 to 127, and the scale of each row."""
    rows = value.reshape(len(value), -1)
    scale = _scale(np.abs(rows).max(1), 127)
    return np.rint(rows / scale[:, None]).astype(np.int8).reshape(value.shape), scale


def _int4(value: Array) -> tuple[Array, Array]:
    """Returns whole numbers of -7 to 7 plus 8, two in a byte, the first in the lower half, and the scale of each block.

    They have the shapes [rows, blocks, 16] and [rows, blocks].
    """
    rows = value.reshape(len(value), -1)
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % _BLOCK)))
    blocks = padded.reshape(len(rows), -1, _BLOCK)
    scale = _scale(np.abs(blocks).max(2), 7)
    numbers = (np.rint(blocks / scale[..., None]) + 8).astype(np.uint8)
    return numbers[..., ::2] | (numbers[..., 1::2] << 4), scale


def _scale(largest: Array, steps: int) -> Array:
    found = np.where(largest > 0, largest / steps, 1).astype(np.float32)
    # A tiny weight would have a scale of 0.
    return np.maximum(found, np.finfo(np.float32).tiny)


def _rewritten(
    model: ir.Model, said: Step, frozen: Mapping[str, Array], quantized: Mapping[str, tuple[Array, Array]], kind: str
) -> Step:
    """Changes the graph of a step, and returns its description.

    Every use computes the weight again. ONNX Runtime would compute equal things once, and keep them from the forward
    pass to the backward pass; so what the backward pass computes depends on the loss, by a zero that is added.
    """
    graph = model.graph
    values = ir.convenience.create_value_mapping(graph)
    names = Names(values)
    forward = _needed_for(values[said.loss])
    zero: ir.Value | None = None
    state = dict(said.state)
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
            if node not in forward and zero is None:
                zero = _zero(graph, values[said.loss], Emitter(model.opset_imports, names, "zero"))
            own_zero = None if node in forward else zero
            float32 = _dequantized(emit, numbers, scale, value.shape, kind, own_zero)
            for view in views:
                attributes: dict[str, Any] = dict(view.attributes)
                float32 = emit(view.op_type, float32, *view.inputs[1:], **attributes)
            graph.insert_before(node, emit.nodes)
            node.replace_input_with(index, float32)
        graph.inputs[place : place + 1] = [numbers, scale]
        state |= {f"{name}.{kind}": str(numbers.name), f"{name}.scale": str(scale.name)}
    common_passes.RemoveUnusedNodesPass()(model)
    return replace(said, state=state)


def _uses(value: ir.Value, views: tuple[ir.Node, ...] = ()) -> Iterator[tuple[ir.Node, int, tuple[ir.Node, ...]]]:
    """Yields what uses a value, with the number of the input and the nodes in between that only turn the value round.

    Such a node would otherwise keep the value from the forward pass to the backward pass.
    """
    for node, index in value.uses():
        if node.op_type in ("Identity", "Transpose", "Reshape", "Unsqueeze") and index == 0:
            yield from _uses(node.outputs[0], (*views, node))
        else:
            yield node, index, views


def _dequantized(
    emit: Emitter, numbers: ir.Value, scale: ir.Value, shape: tuple[int, ...], kind: str, zero: ir.Value | None
) -> ir.Value:
    """Returns the weight; a zero, float32, goes into every node."""

    def byte(value: int) -> ir.Value:
        if zero is None:
            return emit.constant(value, np.uint8)
        return emit("Cast", emit("Add", emit.constant(value, np.float32), zero), to=ir.DataType.UINT8)

    scale = scale if zero is None else emit("Add", scale, zero)
    if kind == "int8":
        return emit("DequantizeLinear", numbers, scale, axis=0)
    low = emit("BitwiseAnd", numbers, byte(15))
    high = emit("BitShift", numbers, byte(4), direction="RIGHT")
    last = emit.constant([-1])
    halves = [emit("Unsqueeze", half, last) for half in (low, high)]
    blocks = emit("Reshape", emit("Concat", *halves, axis=-1), emit.constant([-1, _BLOCK]))
    scales = emit("Reshape", scale, last)
    middle = emit("ConstantOfShape", emit("Shape", scales), value=ir.tensor(np.array([8], np.uint8)))
    found = emit("DequantizeLinear", blocks, scales, middle, axis=0)
    columns = int(np.prod(shape[1:]))
    found = emit("Reshape", found, emit.constant([shape[0], -1]))
    if columns % _BLOCK:
        found = emit("Slice", found, emit.constant([0]), emit.constant([columns]), emit.constant([1]))
    return emit("Reshape", found, emit.constant(list(shape)))


def _zero(graph: ir.Graph, loss: ir.Value, emit: Emitter) -> ir.Value:
    """Returns 0.0, computed from the loss."""
    is_nan = emit("IsNaN", emit("ReduceMax", loss, keepdims=0))
    found = emit("Cast", emit("And", is_nan, emit("Not", is_nan)), to=ir.DataType.FLOAT)
    producer = loss.producer()
    assert producer is not None
    graph.insert_after(producer, emit.nodes)
    return found


def _needed_for(value: ir.Value) -> Collection[ir.Node]:
    found: set[ir.Node] = set()
    open_values: list[Any] = [value]
    while open_values:
        node = open_values.pop().producer()
        if node is not None and node not in found:
            found.add(node)
            open_values += [given for given in node.inputs if given is not None]
    return found


def _input(name: str, like: Array) -> ir.Value:
    kind = ir.TensorType(ir.DataType.from_numpy(like.dtype))
    return ir.Value(name=name, type=kind, shape=ir.Shape(like.shape))
