"""Recurrent layers: RNN, GRU and LSTM.

PyTorch's operators compute the layers that PyTorch has too. Others are computed step by step over the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ..node_table import Node, operator
from .activations import ACTIVATIONS

_Tensor = torch.Tensor
_Function = Callable[[_Tensor], _Tensor]

_DEFAULTS = {"RNN": ("tanh",), "GRU": ("sigmoid", "tanh"), "LSTM": ("sigmoid", "tanh", "tanh")}
# The position of each of PyTorch's gates among ONNX's: GRU r, z, n among z, r, h; LSTM i, f, g, o among i, o, f, c.
_ORDER = {"RNN": (0,), "GRU": (1, 0, 2), "LSTM": (0, 2, 3, 1)}
_NATIVE: dict[str, Any] = {"tanh": torch.rnn_tanh, "relu": torch.rnn_relu, "GRU": torch.gru, "LSTM": torch.lstm}


@dataclass(frozen=True)
class _Direction:
    """One direction of a layer.

    Attributes:
        kind: The operator.
        weight: The weight of the input, gates * H x I.
        recurrent: The weight of the state, gates * H x H.
        bias: The biases of both, 2 * gates * H, or None.
        peepholes: The weights of the LSTM's cell in its gates, 3 * H, or None.
        names: The activation functions by name.
        functions: The activation functions.
        linear_before_reset: Of a GRU: whether the reset gate comes after the product.
        input_forget: Of an LSTM: whether the forget gate is coupled to the input gate.
        is_plain: Whether PyTorch has a layer with these attributes.
        node: The node.
    """

    kind: str
    weight: _Tensor
    recurrent: _Tensor
    bias: _Tensor | None
    peepholes: _Tensor | None
    names: Sequence[str]
    functions: Sequence[_Function]
    linear_before_reset: bool
    input_forget: bool
    is_plain: bool
    node: Node

    def run(self, x: _Tensor, lengths: _Tensor | None, h: _Tensor, c: _Tensor) -> tuple[_Tensor, _Tensor, _Tensor]:
        """Runs the layer over T x N x I.

        Returns:
            All states, T x N x H, and the last state and cell, both N x H.
        """
        # PyTorch returns the cell at the last step of the batch only, not at the end of each shorter sequence.
        if self.is_plain and (lengths is None or self.kind != "LSTM" or not self.node.wants(2)):
            return self._native(x, lengths, h, c)
        return self._stepwise(x, lengths, h, c)

    def _native(self, x: _Tensor, lengths: _Tensor | None, h: _Tensor, c: _Tensor) -> tuple[_Tensor, _Tensor, _Tensor]:
        """Runs PyTorch's operator; outputs after the end of a sequence are replaced by zeros."""
        weights = [_reordered(self.weight, self.kind), _reordered(self.recurrent, self.kind)]
        if self.bias is not None:
            weights += [_reordered(part, self.kind) for part in self.bias.chunk(2)]
        settings = (weights, self.bias is not None, 1, 0.0, self.node.training, False, False)
        if self.kind == "LSTM":
            y, last, cell = torch.lstm(x, [h.unsqueeze(0), c.unsqueeze(0)], *settings)
            cell = cell[0]
        else:
            y, last = _NATIVE[self.names[0] if self.kind == "RNN" else self.kind](x, h.unsqueeze(0), *settings)
            cell = c
        if lengths is None:
            return y, last[0], cell
        at_end = (lengths - 1).clamp(min=0).reshape(1, -1, 1).expand(1, -1, y.shape[2])
        end = torch.where((lengths > 0).unsqueeze(1), y.gather(0, at_end)[0], h)
        inside = torch.arange(x.shape[0]).unsqueeze(1) < lengths
        return torch.where(inside.unsqueeze(2), y, torch.zeros_like(y)), end, cell

    def _stepwise(
        self, x: _Tensor, lengths: _Tensor | None, h: _Tensor, c: _Tensor
    ) -> tuple[_Tensor, _Tensor, _Tensor]:
        if not isinstance(x.shape[0], int):
            raise self.node.error(
                "PyTorch has no such layer, so it is computed step by step, which needs sequences of a fixed length: "
                "give that dimension of the input a fixed size"
            )
        advance: Any = {"RNN": self._rnn_step, "GRU": self._gru_step, "LSTM": self._lstm_step}[self.kind]
        bias, recurrent_bias = (None, None) if self.bias is None else self.bias.chunk(2)
        inputs = F.linear(x, self.weight, bias)
        outputs = []
        for t in range(x.shape[0]):
            new_h, new_c = advance(inputs[t], h, c, recurrent_bias)
            if lengths is None:
                h, c = new_h, new_c
                outputs.append(h)
            else:
                inside = (lengths > t).unsqueeze(1)
                h, c = torch.where(inside, new_h, h), torch.where(inside, new_c, c)
                outputs.append(torch.where(inside, new_h, torch.zeros_like(h)))
        return torch.stack(outputs) if outputs else x.new_zeros([0, *h.shape]), h, c

    def _rnn_step(self, x: _Tensor, h: _Tensor, c: _Tensor, bias: _Tensor | None) -> tuple[_Tensor, _Tensor]:
        return self.functions[0](x + F.linear(h, self.recurrent, bias)), c

    def _gru_step(self, x: _Tensor, h: _Tensor, c: _Tensor, bias: _Tensor | None) -> tuple[_Tensor, _Tensor]:
        """Returns the state after a step.

        z, r = f(x W^T + h R^T + b);  n = g(x Wn^T + (r h) Rn^T + bn), or with linear_before_reset
        n = g(x Wn^T + r (h Rn^T + bn));  h = (1 - z) n + z h
        """
        f, g = self.functions
        size = h.shape[1]
        of_gates = None if bias is None else bias[: 2 * size]
        of_candidate = None if bias is None else bias[2 * size :]
        update, reset = f(x[:, : 2 * size] + F.linear(h, self.recurrent[: 2 * size], of_gates)).chunk(2, 1)
        weight = self.recurrent[2 * size :]
        if self.linear_before_reset:
            candidate = g(x[:, 2 * size :] + reset * F.linear(h, weight, of_candidate))
        else:
            candidate = g(x[:, 2 * size :] + F.linear(reset * h, weight, of_candidate))
        return (1 - update) * candidate + update * h, c

    def _lstm_step(self, x: _Tensor, h: _Tensor, c: _Tensor, bias: _Tensor | None) -> tuple[_Tensor, _Tensor]:
        """Returns the state and the cell after a step.

        i, o, f from the activation f, the candidate from g:  c = f c + i g;  h = o last(c). Peepholes add the cell to
        the gates: the old cell to i and f, the new one to o.
        """
        f, g, last = self.functions
        of_input, of_output, of_forget, of_cell = (x + F.linear(h, self.recurrent, bias)).chunk(4, 1)
        peep_input, peep_output, peep_forget = (0, 0, 0) if self.peepholes is None else self.peepholes.chunk(3)
        enter = f(of_input + peep_input * c)
        keep = 1 - enter if self.input_forget else f(of_forget + peep_forget * c)
        c = keep * c + enter * g(of_cell)
        return f(of_output + peep_output * c) * last(c), c


def _reordered(weight: _Tensor, kind: str) -> _Tensor:
    """Returns a weight or bias with its gates in PyTorch's order."""
    order = _ORDER[kind]
    if len(order) == 1:
        return weight
    gates = weight.chunk(len(order))
    return torch.cat([gates[i] for i in order])


@operator("RNN", "GRU", "LSTM", since=7)
def _layer(
    x: _Tensor,
    weight: _Tensor,
    recurrent: _Tensor,
    bias: _Tensor | None,
    lengths: _Tensor | None,
    h: _Tensor | None,
    c: _Tensor | None,
    peepholes: _Tensor | None,
    *,
    activation_alpha: list[float] | None = None,
    activation_beta: list[float] | None = None,
    activations: list[str] | None = None,
    clip: float | None = None,
    direction: str,
    hidden_size: int | None = None,
    input_forget: int = 0,
    layout: int = 0,
    linear_before_reset: int = 0,
    node: Node,
) -> tuple[_Tensor, ...]:
    """Runs the layer in all directions."""
    directions = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}.get(direction)
    if directions is None:
        raise node.error(f"direction is {direction!r}, but must be 'forward', 'reverse' or 'bidirectional'")
    kind, size, count = node.op_type, recurrent.shape[2], weight.shape[0]
    of_lstm = c is not None or peepholes is not None or input_forget
    if (of_lstm and kind != "LSTM") or (linear_before_reset and kind != "GRU"):
        raise node.error("only an LSTM has initial_c, P and input_forget, and only a GRU linear_before_reset")
    if hidden_size not in (None, size):
        raise node.error(f"hidden_size is {hidden_size}, but the weights have {size}")
    defaults = _DEFAULTS[kind]
    names = [name.lower() for name in activations or defaults * count]
    if kind == "RNN" and len(names) == 2 and count == 1:
        del names[1]  # ONNX's default is for two directions
    if len(names) != len(defaults) * count:
        raise node.error(f"activations are {activations}, but must be {len(defaults) * count} names")
    functions = list(_functions(names, activation_alpha, activation_beta, clip, node))
    is_plain = clip is None and peepholes is None and not input_forget and (kind != "GRU" or bool(linear_before_reset))
    if layout:
        x = x.transpose(0, 1)
        h, c = (None if state is None else state.transpose(0, 1) for state in (h, c))
    lengths = None if lengths is None else lengths.long()
    zeros = x.new_zeros([x.shape[1], size])
    results = []
    for i, is_reverse in zip(range(count), directions, strict=True):
        part = slice(i * len(defaults), (i + 1) * len(defaults))
        one_direction = _Direction(
            kind,
            weight[i],
            recurrent[i],
            None if bias is None else bias[i],
            None if peepholes is None else peepholes[i],
            names[part],
            functions[part],
            bool(linear_before_reset),
            bool(input_forget),
            is_plain and tuple(names[part]) in (defaults, *([("relu",)] if kind == "RNN" else [])),
            node,
        )
        values = _reversed(x, lengths) if is_reverse else x
        y, *last = one_direction.run(values, lengths, zeros if h is None else h[i], zeros if c is None else c[i])
        results.append([_reversed(y, lengths) if is_reverse else y, *last])
    states, *ends = zip(*results, strict=True)
    if layout:
        y = torch.stack(states, 2).transpose(0, 1)
        return y, *(torch.stack(end, 1) for end in ends)
    return torch.stack(states, 1), *(torch.stack(end) for end in ends)


_ACTIVATIONS = {name.lower(): entry for name, entry in ACTIVATIONS.items() if name}


def _functions(
    names: Sequence[str], alphas: list[float] | None, betas: list[float] | None, clip: float | None, node: Node
) -> Iterator[_Function]:
    """Yields the activation functions with their parameters, which ``alphas`` and ``betas`` list in order."""
    lists = iter(alphas or ()), iter(betas or ())
    for name in names:
        if name not in _ACTIVATIONS:
            raise node.error(f"the activation function {name!r} is unknown: there are {sorted(_ACTIVATIONS)}")
        function, defaults = _ACTIVATIONS[name]
        parameters = [next(values, default) for values, default in zip(lists, defaults, strict=False)]
        yield _clipped(function, parameters, clip)


def _clipped(function: Callable[..., _Tensor], parameters: list[float], clip: float | None) -> _Function:
    return lambda x: function(x if clip is None else x.clamp(-clip, clip), *parameters)


def _reversed(x: _Tensor, lengths: _Tensor | None) -> _Tensor:
    """Reverses sequences, (time, batch, ...), each within its length."""
    if lengths is None:
        return x.flip(0)
    t = torch.arange(x.shape[0]).unsqueeze(1)
    place = torch.where(t < lengths, lengths - 1 - t, t)
    return x.gather(0, place.unsqueeze(2).expand(-1, -1, x.shape[2]))
