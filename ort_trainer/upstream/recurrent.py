"""LSTM and GRU of onnxruntime-training, forward and backward, as loops (``Scan``) over the steps of a sequence.

Shapes are ONNX's: X [steps, batch, inputs], W [1, gates x hidden, inputs], R [1, gates x hidden, hidden],
B [1, 2 x gates x hidden], states [1, batch, hidden], and what an operator returns for each step [steps, 1, batch, ...].
The gates are in the order i, o, f, c and z, r, h.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir

from .operators import Nodes, Outputs, Tensor, operator

__all__: list[str] = []

Body = Callable[[Nodes, list[Tensor], list[Tensor]], tuple[Sequence[Tensor], Sequence[Tensor]]]


def _loop(
    op: Nodes, carried: Sequence[Tensor], inputs: Sequence[Tensor], body: Body, backwards: bool = False
) -> list[Tensor]:
    """Adds a Scan; returns the final states, then the results of all steps, stacked along the first axis.

    Args:
        op: Adds the nodes.
        carried: The initial states, which each step replaces.
        inputs: Sequences; each step receives its slice along the first axis.
        body: Writes one step: (nodes, states, slices of the inputs) -> (new states, results).
        backwards: Whether to run from the last step to the first.
    """
    inner = Nodes(op.emit.inner())

    def body_input(value: ir.Value, first_axis: int) -> Tensor:
        shape = None if value.shape is None else ir.Shape(list(value.shape)[first_axis:])
        return Tensor(inner, ir.Value(name=inner.emit.name("given"), type=value.type, shape=shape))

    body_inputs = (
        [body_input(tensor.value, 0) for tensor in carried],
        [body_input(tensor.value, 1) for tensor in inputs],
    )
    carried_on, results = body(inner, *body_inputs)
    # Outputs of the body need distinct names, but one value may be both carried on and a result.
    outputs = [inner.Identity(tensor).value for tensor in (*carried_on, *results)]
    graph = ir.Graph(
        [tensor.value for part in body_inputs for tensor in part], outputs, nodes=inner.emit.nodes, name="step"
    )
    directions = {"scan_input_directions": [1] * len(inputs), "scan_output_directions": [1] * len(results)}
    return op.several(
        "Scan",
        *carried,
        *inputs,
        outputs=len(outputs),
        body=graph,
        num_scan_inputs=len(inputs),
        **(directions if backwards else {}),
    )


def _check(
    lengths: Tensor | None, direction: str = "forward", activations: Any = None, clip: float | None = None,
    input_forget: int = 0, **_: Any,
) -> None:  # fmt: skip
    """Raises a ValueError for settings that upstream's kernels don't support either."""
    usual: tuple[list[str] | None, ...] = (None, [], ["Sigmoid", "Tanh", "Tanh"], ["Sigmoid", "Tanh"])
    names = None if activations is None else [str(name) for name in activations]
    if lengths is not None or direction != "forward" or clip or input_forget or names not in usual:
        raise ValueError("it has lengths of sequences, another direction than forward, a clip, or other activations")


def _flat(op: Nodes, x: Tensor | None) -> Tensor | None:
    """Removes the axis of directions: the first of weights and states, the second of the outputs of all steps."""
    return None if x is None else op.Squeeze(x, op.ints(x.rank - 3))


def _first(op: Nodes, x: Tensor, r: Tensor, initial: Tensor | None) -> Tensor:
    """Returns a state before the first step, [batch, hidden]: zeros if ``initial`` is None."""
    flat = _flat(op, initial)
    if flat is not None:
        return flat
    return op.zeros(op.Concat(op.slice(x.shape, 1, 2), op.slice(r.shape, 2, 3), axis=0), x)


def _before(op: Nodes, first: Tensor, states: Tensor) -> Tensor:
    """Returns the state before each step."""
    return op.Concat(op.Unsqueeze(first, op.ints(0)), op.slice(states, 0, -1), axis=0)


def _transposed(op: Nodes, x: Tensor) -> Tensor:
    """Returns the transpose of a matrix."""
    return op.Transpose(x, perm=[1, 0])


def _rows(op: Nodes, x: Tensor) -> Tensor:
    """Returns all steps of all sequences as rows."""
    return op.Reshape(x, op.Concat(op.ints(-1), op.slice(x.shape, -1, 1 << 30), axis=0))


def _product(op: Nodes, a: Tensor, b: Tensor) -> Tensor:
    """Returns the gradient of a weight, a^T b over all steps and sequences: a is the gradient of the product, b the
    other operand.
    """
    return _transposed(op, _rows(op, a)) @ _rows(op, b)


def _biases(op: Nodes, b: Tensor | None, w: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the biases of inputs and of states; zeros if there are none."""
    size = op.slice(w.shape, 1, 2)
    if b is None:
        zeros = op.zeros(size, w)
        return zeros, zeros
    flat = op.Reshape(b, op.ints(-1))
    return op.slice(flat, op.ints(0), size), op.slice(flat, size, op.ints(1 << 30))


def _split_lstm_gates(op: Nodes, gates: Tensor) -> Sequence[Tensor]:
    return op.several("Split", gates, outputs=4, axis=-1, num_outputs=4)


@operator("LSTMTraining")
def _lstm(
    op: Nodes, x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None, lengths: Tensor | None = None,
    h0: Tensor | None = None, c0: Tensor | None = None, peephole: Tensor | None = None, **attributes: Any,
) -> Outputs:  # fmt: skip
    """Writes the states of all steps, the last state and cell, and all cells and gates, which the backward pass needs.

    i, o, f, g = sigmoid(i), sigmoid(o), sigmoid(f), tanh(g) of x W^T + h R^T + b;  c = f c + i g;  h = o tanh(c)
    """
    _check(lengths if peephole is None else peephole, **attributes)
    transposed_w, transposed_r = (_transposed(op, op.Squeeze(weight, op.ints(0))) for weight in (w, r))
    of_inputs, of_states = _biases(op, b, w)

    def step(inner: Nodes, carried: list[Tensor], inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        h, c = carried
        i, o, f, g = _split_lstm_gates(inner, inputs[0] + h @ transposed_r)
        i, o, f, g = inner.Sigmoid(i), inner.Sigmoid(o), inner.Sigmoid(f), inner.Tanh(g)
        c = f * c + i * g
        h = o * inner.Tanh(c)
        return [h, c], [h, c, inner.Concat(i, o, f, g, axis=-1)]

    first = [_first(op, x, r, state) for state in (h0, c0)]
    h, c, *every = _loop(op, first, [x @ transposed_w + (of_inputs + of_states)], step)
    states, cells, gates = (op.Unsqueeze(value, op.ints(1)) for value in every)
    return states, op.Unsqueeze(h, op.ints(0)), op.Unsqueeze(c, op.ints(0)), cells, gates


@operator("LSTMGrad")
def _lstm_grad(
    op: Nodes, x: Tensor, w: Tensor, r: Tensor, lengths: Tensor | None, h0: Tensor | None, c0: Tensor | None,
    states: Tensor, cells: Tensor, gates: Tensor, d_states: Tensor | None = None, d_last: Tensor | None = None,
    d_cell: Tensor | None = None, **attributes: Any,
) -> Outputs:  # fmt: skip
    _check(lengths, **attributes)
    flat_w, flat_r = (op.Squeeze(weight, op.ints(0)) for weight in (w, r))
    states, cells, gates = (op.Squeeze(value, op.ints(1)) for value in (states, cells, gates))
    d_outputs = op.zeros(states.shape, x) if d_states is None else op.Squeeze(d_states, op.ints(1))
    before = [_before(op, _first(op, x, r, first), every) for first, every in ((h0, states), (c0, cells))]

    def step(inner: Nodes, carried: list[Tensor], inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        (dh, dc), (d_output, c, c_before, values) = carried, inputs
        i, o, f, g = _split_lstm_gates(inner, values)
        dh, tanh = dh + d_output, inner.Tanh(c)
        dc = dc + dh * o * (1 - tanh * tanh)
        d_gates = inner.Concat(
            dc * g * i * (1 - i), dh * tanh * o * (1 - o), dc * c_before * f * (1 - f), dc * i * (1 - g * g), axis=-1
        )
        return [d_gates @ flat_r, dc * f], [d_gates]

    first = [_first(op, x, r, value) for value in (d_last, d_cell)]
    dh0, dc0, d_gates = _loop(op, first, [d_outputs, cells, before[1], gates], step, backwards=True)
    total = op.sum(_rows(op, d_gates), [0], keep=False)
    weights = [_product(op, d_gates, x), _product(op, d_gates, before[0]), op.Concat(total, total, axis=0)]
    axis = op.ints(0)
    return (d_gates @ flat_w, *(op.Unsqueeze(value, axis) for value in (*weights, dh0, dc0)))


def _split_gru_gates(op: Nodes, gates: Tensor) -> Sequence[Tensor]:
    return op.several("Split", gates, outputs=3, axis=-1, num_outputs=3)


@operator("GRUTraining")
def _gru(
    op: Nodes, x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None, lengths: Tensor | None = None,
    h0: Tensor | None = None, linear_before_reset: int = 0, **attributes: Any,
) -> Outputs:  # fmt: skip
    """Writes the states of all steps, the last state, and all gates, which the backward pass needs.

    z and r are sigmoids of x W^T + h R^T + b;  n = tanh(x Wn^T + bW + (r h) Rn^T + bR), or, with linear_before_reset,
    n = tanh(x Wn^T + bW + r (h Rn^T + bR));  h = (1 - z) n + z h
    """
    _check(lengths, **attributes)
    transposed_w = _transposed(op, op.Squeeze(w, op.ints(0)))
    rz, rr, rn = (_transposed(op, part) for part in op.several(
        "Split", op.Squeeze(r, op.ints(0)), outputs=3, axis=0, num_outputs=3
    ))  # fmt: skip
    of_inputs, of_states = _biases(op, b, w)
    bz, br, bn = op.several("Split", of_states, outputs=3, axis=0, num_outputs=3)

    def step(inner: Nodes, carried: list[Tensor], inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        (h,) = carried
        xz, xr, xn = _split_gru_gates(inner, inputs[0])
        z, reset = inner.Sigmoid(xz + h @ rz + bz), inner.Sigmoid(xr + h @ rr + br)
        hidden = reset * (h @ rn + bn) if linear_before_reset else (reset * h) @ rn + bn
        n = inner.Tanh(xn + hidden)
        h = (1 - z) * n + z * h
        return [h], [h, inner.Concat(z, reset, n, axis=-1)]

    h, *every = _loop(op, [_first(op, x, r, h0)], [x @ transposed_w + of_inputs], step)
    states, gates = (op.Unsqueeze(value, op.ints(1)) for value in every)
    return states, op.Unsqueeze(h, op.ints(0)), gates


@operator("GRUGrad")
def _gru_grad(
    op: Nodes, x: Tensor, w: Tensor, r: Tensor, b: Tensor | None, lengths: Tensor | None, h0: Tensor | None,
    states: Tensor, gates: Tensor, d_states: Tensor | None = None, d_last: Tensor | None = None,
    linear_before_reset: int = 0, **attributes: Any,
) -> Outputs:  # fmt: skip
    _check(lengths, **attributes)
    flat_w = op.Squeeze(w, op.ints(0))
    rz, rr, rn = op.several("Split", op.Squeeze(r, op.ints(0)), outputs=3, axis=0, num_outputs=3)
    _, _, bn = op.several("Split", _biases(op, b, w)[1], outputs=3, axis=0, num_outputs=3)
    states, gates = (op.Squeeze(value, op.ints(1)) for value in (states, gates))
    d_outputs = op.zeros(states.shape, x) if d_states is None else op.Squeeze(d_states, op.ints(1))
    before = _before(op, _first(op, x, r, h0), states)
    transposed_rn = _transposed(op, rn)

    def step(inner: Nodes, carried: list[Tensor], inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        (dh,), (d_output, h, values) = carried, inputs
        z, reset, n = _split_gru_gates(inner, values)
        dh = dh + d_output
        dn = dh * (1 - z) * (1 - n * n)
        if linear_before_reset:
            d_hidden, factor = dn * reset, h
            d_reset, dh_before = dn * (h @ transposed_rn + bn), d_hidden @ rn
        else:
            d_product = dn @ rn
            d_hidden, factor = dn, reset * h
            d_reset, dh_before = d_product * h, d_product * reset
        dz, dr = dh * (h - n) * z * (1 - z), d_reset * reset * (1 - reset)
        new_dh = dh_before + dh * z + dz @ rz + dr @ rr
        return [new_dh], [inner.Concat(dz, dr, dn, axis=-1), inner.Concat(dz, dr, axis=-1), d_hidden, factor]

    first = [_first(op, x, r, d_last)]
    dh0, d_gates, d_two, d_hidden, factor = _loop(op, first, [d_outputs, before, gates], step, backwards=True)
    dr = op.Concat(_product(op, d_two, before), _product(op, d_hidden, factor), axis=0)
    sums = [op.sum(_rows(op, value), [0], keep=False) for value in (d_gates, d_two, d_hidden)]
    axis = op.ints(0)
    weights = (_product(op, d_gates, x), dr, op.Concat(*sums, axis=0), dh0)
    return (d_gates @ flat_w, *(op.Unsqueeze(value, axis) for value in weights))
