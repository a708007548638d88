"""Rewrites of recurrent layers: unrolled, with one set of matrix products per time step."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import onnx_ir as ir

from ....step.emitter import Emitter
from ..nodes import attributes_of, input_of, operand, refuse, size_of

__all__ = ["RULES"]

# (input part of the gates, recurrent part's weight and bias, state) -> new state; the first entry is the output.
Cell = Callable[[ir.Value, list[ir.Value | None]], list[ir.Value]]


def _lstm(node: ir.Node, e: Emitter) -> Sequence[ir.Value]:
    """Unrolls an LSTM; its gates are in the order input, output, forget, cell."""
    hidden = _checked(node, ["Sigmoid", "Tanh", "Tanh"])
    if input_of(node, 7) is not None:
        raise refuse(node, "peepholes (input P) are not supported: leave them out")

    def cell(recurrent: ir.Value, bias: ir.Value | None) -> Cell:
        def step(gates: ir.Value, state: list[ir.Value | None]) -> list[ir.Value]:
            h, c = state
            if h is not None:
                gates = e("Add", gates, e("MatMul", h, recurrent))
            i, o, f, g = (e.slice(gates, k * hidden, (k + 1) * hidden, 1) for k in range(4))
            new = e("Mul", e("Sigmoid", i), e("Tanh", g))
            if c is not None:
                new = e("Add", e("Mul", e("Sigmoid", f), c), new)
            return [e("Mul", e("Sigmoid", o), e("Tanh", new)), new]

        return step

    return _unroll(node, e, hidden, 4, cell, states=2)


def _gru(node: ir.Node, e: Emitter) -> Sequence[ir.Value]:
    """Unrolls a GRU; its gates are in the order update, reset, hidden."""
    hidden = _checked(node, ["Sigmoid", "Tanh"])
    before_reset = bool(attributes_of(node).get("linear_before_reset", 0))

    def cell(recurrent: ir.Value, bias: ir.Value | None) -> Cell:
        def part(value: ir.Value, start: int, end: int, axis: int) -> ir.Value:
            return e.slice(value, start * hidden, end * hidden, axis)

        def step(gates: ir.Value, state: list[ir.Value | None]) -> list[ir.Value]:
            (h,) = state
            both = part(gates, 0, 2, 1)
            if bias is not None:
                both = e("Add", both, part(bias, 0, 2, 0))
            if h is not None:
                both = e("Add", both, e("MatMul", h, part(recurrent, 0, 2, 1)))
            both = e("Sigmoid", both)
            update, reset = part(both, 0, 1, 1), part(both, 1, 2, 1)
            inner: ir.Value | None = None
            if h is not None:
                seen = h if before_reset else e("Mul", reset, h)
                inner = e("MatMul", seen, part(recurrent, 2, 3, 1))
            if bias is not None:
                own = part(bias, 2, 3, 0)
                inner = own if inner is None else e("Add", inner, own)
            new = part(gates, 2, 3, 1)
            if inner is not None:
                new = e("Add", new, e("Mul", reset, inner) if before_reset else inner)
            new = e("Mul", e("Sub", e.scalar(1.0), update), e("Tanh", new))
            return [new if h is None else e("Add", new, e("Mul", update, h))]

        return step

    return _unroll(node, e, hidden, 3, cell, split_bias=True)


def _rnn(node: ir.Node, e: Emitter) -> Sequence[ir.Value]:
    """Unrolls an RNN; it has one gate, with the node's own activation."""
    activations = attributes_of(node).get("activations", ["Tanh"])
    hidden = _checked(node, [activations[0]])
    if activations[0] not in ("Tanh", "Relu", "Sigmoid"):
        raise refuse(node, f"activation {activations[0]!r} is not supported: use Tanh, Relu or Sigmoid")

    def cell(recurrent: ir.Value, bias: ir.Value | None) -> Cell:
        def step(gates: ir.Value, state: list[ir.Value | None]) -> list[ir.Value]:
            (h,) = state
            return [e(activations[0], gates if h is None else e("Add", gates, e("MatMul", h, recurrent)))]

        return step

    return _unroll(node, e, hidden, 1, cell)


def _checked(node: ir.Node, default: list[str]) -> int:
    """Returns the hidden size, after checking for unsupported attributes."""
    attributes = attributes_of(node)
    directions = 2 if attributes.get("direction") == "bidirectional" else 1
    if attributes.get("activations", default * directions) != default * directions:
        raise refuse(node, f"activations must be {default}, but are {attributes['activations']}")
    for name in ("clip", "input_forget", "layout"):
        if attributes.get(name):
            raise refuse(node, f"attribute {name}={attributes[name]!r} is not supported: leave it at its default")
    return int(attributes["hidden_size"])


def _unroll(
    node: ir.Node,
    e: Emitter,
    hidden: int,
    gates: int,
    cell: Callable[[ir.Value, ir.Value | None], Cell],
    states: int = 1,
    split_bias: bool = False,
) -> Sequence[ir.Value]:
    """Emits all steps of all directions.

    Shapes: input (length, batch, features), weights (directions, gates * hidden, features or hidden), bias
    (directions, 2 * gates * hidden), states (directions, batch, hidden).
    """
    x, w, r = (operand(node, index) for index in range(3))
    length = size_of(x, 0)
    bias, lengths = input_of(node, 3), input_of(node, 4)
    direction = attributes_of(node).get("direction", "forward")
    reversals = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
    outputs: list[list[ir.Value]] = []
    final: list[list[ir.Value]] = []
    for index, backwards in enumerate(reversals):
        weight, recurrent = (
            e("Transpose", e("Gather", value, e.constant(index), axis=0), perm=[1, 0]) for value in (w, r)
        )
        projected = e("MatMul", x, weight)
        recurrent_bias = None
        if bias is not None:
            both = e("Gather", bias, e.constant(index), axis=0)
            own, recurrent_bias = (e.slice(both, k * gates * hidden, (k + 1) * gates * hidden, 0) for k in range(2))
            projected = e("Add", projected, own if split_bias else e("Add", own, recurrent_bias))
        step = cell(recurrent, recurrent_bias if split_bias else None)
        first = [input_of(node, 5 + k) for k in range(states)]
        state = [None if value is None else e("Gather", value, e.constant(index), axis=0) for value in first]
        steps: list[ir.Value] = []
        for time in reversed(range(length)) if backwards else range(length):
            new = step(e("Gather", projected, e.constant(time), axis=0), state)
            output = new[0]
            if lengths is not None:
                # After its end, a sequence keeps its state and its output is zero.
                inside = e("Less", e.constant(time, "int32"), lengths)
                inside = e("Unsqueeze", inside, e.constant([1]))
                zero = e.scalar(0.0)
                output = e("Where", inside, output, zero)
                new = [e("Where", inside, a, zero if b is None else b) for a, b in zip(new, state, strict=True)]
            state = [*new]
            steps.append(output)
        outputs.append(steps[::-1] if backwards else steps)
        final.append([value for value in state if value is not None])
    every = [[e("Unsqueeze", value, e.constant([0, 1])) for value in one] for one in outputs]
    whole = [one[0] if length == 1 else e("Concat", *one, axis=0) for one in every]
    results = [whole[0] if len(whole) == 1 else e("Concat", *whole, axis=1)]
    for position in range(states):
        last = [e("Unsqueeze", one[position], e.constant([0])) for one in final]
        results.append(last[0] if len(last) == 1 else e("Concat", *last, axis=0))
    return results


RULES = {"GRU": _gru, "LSTM": _lstm, "RNN": _rnn}
