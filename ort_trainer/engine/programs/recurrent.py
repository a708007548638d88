"""Recurrent cells, forward and backward: one step, and a loop over the steps with PyTorch's kernels.

A step is written once, for tensors and for values of an ONNX graph: ``maths`` has the functions, and both support the
operators ``+ - *``. It contains only what depends on the previous step::

    before the loop    gates = input @ W_ih.T + bias          one product for all steps
    in the loop        h, c = step(gates[t] + h @ W_hh.T, c)  forward
                       d_gates[t], d_h, d_c                   backward, from the last step to the first
    after the loop     d_W_hh = sum over t of d_gates[t].T @ h[t - 1]

The caller of the loop is ``operators/recurrent.py``. Names are those of the formulas in the documentation
of ``torch.nn.LSTM``, ``GRU`` and ``RNN``; ``d_x`` is the gradient of the loss with respect to x. States are (batch,
hidden), gates (batch, 4 * hidden) in an LSTM, 3 * hidden in a GRU, and ``W_hh`` is (4 * hidden, hidden).

Backward steps use sigmoid'(x) = s * (1 - s), where s = sigmoid(x), and tanh'(x) = 1 - t * t, where t = tanh(x), so they
need only the activated gates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class Maths(Protocol):
    """The functions that a step uses, beside ``+ - *``."""

    one: Any
    """The number 1."""

    def addmm(self, bias: Any, left: Any, right: Any, transposed: bool = False) -> Any:
        """Returns bias + left @ right, or with left @ right.T; the bias may be None."""

    def chunk(self, value: Any, count: int) -> Sequence[Any]:
        """Returns the columns of a matrix in equal parts."""

    def cat(self, values: Sequence[Any]) -> Any:
        """Returns matrices side by side."""

    def sigmoid(self, value: Any) -> Any:
        """Returns 1 / (1 + exp(-x))."""

    def tanh(self, value: Any) -> Any:
        """Returns the hyperbolic tangent."""

    def relu(self, value: Any) -> Any:
        """Returns max(x, 0)."""

    def relu_backward(self, gradient: Any, result: Any) -> Any:
        """Returns the gradient where the result of a ReLU is above 0 or NaN, and 0 elsewhere."""


Values = Sequence[Any]
"""Tensors, or values of an ONNX graph."""

StepResult = tuple[list[Any], list[Any]]
"""The new states, and the results of the step."""

Step = Callable[[Maths, Values, Values, Values], StepResult]
"""Maths, states (batch, ...), the sequences' elements at this step, weights -> new states, results of the step."""


def _lstm(m: Maths, states: Values, inputs: Values, weights: Values) -> StepResult:
    """Returns h, c, and the concatenated activated gates i, f, g, o.

    Weights: ``W_hh``, and with a projection ``W_hr`` (projected, hidden).
    """
    (h, c), (gates,) = states, inputs
    i, f, g, o = m.chunk(m.addmm(gates, h, weights[0], transposed=True), 4)
    i, f, g, o = m.sigmoid(i), m.sigmoid(f), m.tanh(g), m.sigmoid(o)
    c = f * c + i * g
    h = o * m.tanh(c)
    if len(weights) > 1:
        h = m.addmm(None, h, weights[1], transposed=True)
    return [h, c], [h, c, m.cat([i, f, g, o])]


def _lstm_backward(m: Maths, states: Values, inputs: Values, weights: Values) -> StepResult:
    """Returns the gradient of the gates before activation, and with a projection that of h.

    Inputs: the gradient of the output, the activated gates, c after and before the step, and perhaps a gradient of c.
    """
    (d_h, d_c), (d_output, activated, c, previous_c, *d_cells) = states, inputs
    i, f, g, o = m.chunk(activated, 4)
    d_h = d_h + d_output
    d_hidden = m.addmm(None, d_h, weights[1]) if len(weights) > 1 else d_h
    tanh_c = m.tanh(c)
    d_c = d_c + d_hidden * o * (m.one - tanh_c * tanh_c)
    for d_cell in d_cells:
        d_c = d_c + d_cell
    d_i, d_f = d_c * g * i * (m.one - i), d_c * previous_c * f * (m.one - f)
    d_g, d_o = d_c * i * (m.one - g * g), d_hidden * tanh_c * o * (m.one - o)
    d_gates = m.cat([d_i, d_f, d_g, d_o])
    return [m.addmm(None, d_gates, weights[0]), d_c * f], [d_gates, *([d_h] if len(weights) > 1 else [])]


def _gru(m: Maths, states: Values, inputs: Values, weights: Values) -> StepResult:
    """Returns h, and concatenated r, z, n and h_n, the product that r gates."""
    (h,), (gates,), (weight, bias) = states, inputs, weights
    r, z, n = m.chunk(gates, 3)
    h_r, h_z, h_n = m.chunk(m.addmm(bias, h, weight, transposed=True), 3)
    r, z = m.sigmoid(r + h_r), m.sigmoid(z + h_z)
    n = m.tanh(n + r * h_n)
    h = (h - n) * z + n  # (1 - z) * n + z * h, as PyTorch's kernel computes it
    return [h], [h, m.cat([r, z, n, h_n])]


def _gru_backward(m: Maths, states: Values, inputs: Values, weights: Values) -> StepResult:
    """Returns the gradients of both contributions to the gates, that of the inputs and that of h.

    They differ only in n, where the contribution of h is multiplied by r.
    """
    (d_h,), (d_output, activated, previous_h), weight = states, inputs, weights[0]
    r, z, n, h_n = m.chunk(activated, 4)
    d_h = d_h + d_output
    d_n = d_h * (m.one - z) * (m.one - n * n)
    d_z = d_h * (previous_h - n) * z * (m.one - z)
    d_r = d_n * h_n * r * (m.one - r)
    d_of_h = m.cat([d_r, d_z, d_n * r])
    return [m.addmm(d_h * z, d_of_h, weight)], [m.cat([d_r, d_z, d_n]), d_of_h]


def _rnn(activation: str) -> Step:
    """Returns the step of a cell with this activation; it returns h."""

    def step(m: Maths, states: Values, inputs: Values, weights: Values) -> StepResult:
        preactivation = m.addmm(inputs[0], states[0], weights[0], transposed=True)
        h = m.tanh(preactivation) if activation == "tanh" else m.relu(preactivation)
        return [h], [h]

    return step


def _rnn_backward(activation: str) -> Step:
    """Returns the backward step; it returns the gradient of the sum before activation."""

    def step(m: Maths, states: Values, inputs: Values, weights: Values) -> StepResult:
        (d_h,), (d_output, h) = states, inputs
        d_h = d_h + d_output
        d_preactivation = d_h * (m.one - h * h) if activation == "tanh" else m.relu_backward(d_h, h)
        return [m.addmm(None, d_preactivation, weights[0])], [d_preactivation]

    return step


def _linear(m: Maths, states: Values, inputs: Values, weights: Values) -> StepResult:
    """Returns h = a * h + b."""
    (h,), (a, b) = states, inputs
    h = a * h + b
    return [h], [h]


def _linear_backward(m: Maths, states: Values, inputs: Values, weights: Values) -> StepResult:
    """Returns the gradient of h, which is also that of b."""
    (d_h,), (d_output, a) = states, inputs
    d_h = d_h + d_output
    return [d_h * a], [d_h]


CELLS: dict[str, Step] = {
    "linear": _linear,
    "linear_backward": _linear_backward,
    "lstm": _lstm,
    "lstm_backward": _lstm_backward,
    "gru": _gru,
    "gru_backward": _gru_backward,
    "rnn_tanh": _rnn("tanh"),
    "rnn_tanh_backward": _rnn_backward("tanh"),
    "rnn_relu": _rnn("relu"),
    "rnn_relu_backward": _rnn_backward("relu"),
}


class _Tensors:
    """The maths of a step on tensors."""

    one = 1.0
    sigmoid, tanh = staticmethod(torch.sigmoid), staticmethod(torch.tanh)
    relu = staticmethod(torch.relu)

    @staticmethod
    def addmm(
        bias: torch.Tensor | None, left: torch.Tensor, right: torch.Tensor, transposed: bool = False
    ) -> torch.Tensor:
        right = right.t() if transposed else right
        return torch.mm(left, right) if bias is None else torch.addmm(bias, left, right)

    @staticmethod
    def relu_backward(gradient: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        d_input: torch.Tensor = torch.ops.aten.threshold_backward.default(gradient, result, 0)
        return d_input

    @staticmethod
    def chunk(value: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
        return value.chunk(count, 1)

    @staticmethod
    def cat(values: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(values), 1)


def steps(
    cell: str, reverse: bool, states: list[torch.Tensor], sequences: list[torch.Tensor], weights: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Runs a cell over the steps of sequences.

    Args:
        cell: Key of :data:`CELLS`.
        reverse: Whether to start with the last step.
        states: The initial states, (batch, ...).
        sequences: (steps, batch, ...), at least one step.
        weights: Tensors that all steps share.

    Returns:
        The states after the last step, and the results of all steps, (steps, batch, ...).
    """
    step, maths = CELLS[cell], _Tensors()
    results: list[list[torch.Tensor]] = []
    rows = list(zip(*(sequence.unbind(0) for sequence in sequences), strict=True))
    for row in reversed(rows) if reverse else rows:
        states, out = step(maths, states, row, weights)
        results.append(out)
    if reverse:
        results.reverse()
    return [*states, *(torch.stack(values) for values in zip(*results, strict=True))]


def linear_recurrence(factors: torch.Tensor, terms: torch.Tensor) -> torch.Tensor:
    """Returns h[t] = factors[t] * h[t - 1] + terms[t] for all steps, (steps, ...), where h[-1] is zero."""
    return steps("linear", False, [torch.zeros_like(terms[0])], [factors, terms], [])[-1]


def steps_fake(
    cell: str, reverse: bool, states: list[torch.Tensor], sequences: list[torch.Tensor], weights: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Returns the results of :func:`steps` for tensors without data; one step determines all shapes."""
    after, results = CELLS[cell](_Tensors(), states, [sequence[0] for sequence in sequences], weights)
    length = sequences[0].shape[0]
    return [*after, *(value.new_empty((length, *value.shape)) for value in results)]


def checked_lengths(lengths: torch.Tensor, steps: int, exact: bool) -> torch.Tensor:
    """Returns the lengths of the sequences of a padded batch.

    Args:
        lengths: (batch), int64.
        steps: Number of steps of the batch.
        exact: Whether the longest sequence must have exactly this length.

    Raises:
        ValueError: If a length is out of range.
    """
    shortest, longest = int(lengths.min()), int(lengths.max())
    if shortest < 1 or longest > steps:
        raise ValueError(
            f"pack_padded_sequence: lengths must be 1 to {steps}, the number of steps in the batch, but they are "
            f"{shortest} to {longest}"
        )
    if exact and longest < steps:
        raise ValueError(
            f"pad_packed_sequence: the longest sequence has {longest} of the {steps} steps of the batch. PyTorch would "
            "cut off the rest, but a graph can't: pad each batch to its longest sequence, or pass total_length"
        )
    return lengths.clone()
