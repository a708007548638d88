"""``pack_padded_sequence`` and ``pad_packed_sequence``: in a graph, a packed batch stays padded.

PyTorch removes the padding, so the number of rows depends on the values of the lengths, which a graph does not know.
Here the steps of padding are computed too, but nothing reads them::

    pack -> LSTM -> pad    =>    LSTM -> where(step < length, output, padding_value)

The final state of a sequence is the output at its last step. For the backward direction, each sequence is reversed
within its length. Only the final cell of an LSTM is not part of the output. To keep it unchanged through the padding,
an extra input feature closes the input gate there and opens the forget gate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..core.errors import ExportError
from ..engine.programs import operators  # noqa: F401 - which defines the package's own
from ..fx.operator_table import Size, Value, ir, op, replacement, translation

aten = torch.ops.aten
_VF: Any = torch._VF

# Closes or opens a gate completely, even in halves: sigmoid(-1e4) is 0 and sigmoid(1e4) is 1.
_SHUT = 1e4


class _Rows:
    """Stands in for the data of a packed batch, and holds the padded batch, (steps, batch, features)."""

    def __init__(self, padded: torch.Tensor) -> None:
        self.padded = padded
        self.dtype, self.device = padded.dtype, padded.device

    def __getattr__(self, name: str) -> Any:
        raise ExportError(
            f"forward() uses .data of a PackedSequence (attribute {name!r}). Its size depends on the lengths, which a "
            "graph does not know: compute on the padded batch, before packing it or after pad_packed_sequence"
        )


class _Unasked(int):
    """A number that can be told apart from equal ones by identity."""


class _Lengths:
    """Stands in for the batch sizes of a packed batch.

    Attributes:
        each: The lengths, (batch,).
        steps: Number of steps of the padded batch.
        unasked: The same number, as the object that ``pad_packed_sequence`` passes on if it gets no total length.
    """

    device = torch.device("cpu")

    def __init__(self, each: torch.Tensor, steps: Size) -> None:
        self.each, self.steps = each, steps
        self.unasked = _Unasked(steps) if isinstance(steps, int) else steps

    def size(self, dim: int) -> Size:
        """Returns the number of steps, as an object that differs from any total length that a user gives."""
        return self.unasked

    def __getitem__(self, step: int) -> Size:
        """Returns the batch size of the first step, the only one that PyTorch's layers read."""
        return self.each.shape[0]

    def inside(self) -> torch.Tensor:
        """Returns a mask of the steps that are not padding, (steps, batch, 1)."""
        return (torch.arange(self.steps).unsqueeze(1) < self.each).unsqueeze(-1)

    def reversed(self, value: torch.Tensor) -> torch.Tensor:
        """Returns a padded batch with each sequence reversed and the padding in place."""
        step = torch.arange(self.steps).unsqueeze(1)
        source = torch.where(step < self.each, self.each - 1 - step, step)
        return value.gather(0, source.unsqueeze(-1).expand_as(value))

    def last(self, value: torch.Tensor) -> torch.Tensor:
        """Returns the last step of each sequence of a padded batch, (batch, features)."""
        return value.gather(0, (self.each - 1).view(1, -1, 1).expand(1, -1, value.shape[2])).squeeze(0)


@replacement(_VF, "_pack_padded_sequence")
def _pack(input: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> tuple[_Rows, _Lengths]:
    """Keeps the batch padded, with its checked lengths."""
    value = input.transpose(0, 1) if batch_first else input
    steps = value.shape[0]
    each = torch.ops.ort_trainer.checked_lengths.default(lengths, steps, False)
    return _Rows(value), _Lengths(each, steps)


_pad_packed = _VF._pad_packed_sequence


@replacement(_VF, "_pad_packed_sequence")
def _pad(
    data: Any, sizes: Any, batch_first: bool, padding_value: float, total_length: Size
) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes the padding value behind each sequence; a total length adds steps at the end."""
    if not isinstance(sizes, _Lengths):
        return _pad_packed(data, sizes, batch_first, padding_value, total_length)  # type: ignore[no-any-return]
    each = sizes.each
    asked = total_length is not sizes.unasked
    if not asked:  # PyTorch's result is as long as its longest sequence
        each = torch.ops.ort_trainer.checked_lengths.default(each, sizes.steps, True)
    value = data.padded.flatten(2) if data.padded.dim() > 2 else data.padded.unsqueeze(-1)
    value = torch.where(_Lengths(each, sizes.steps).inside(), value, padding_value).view(data.padded.shape)
    if asked:
        more = total_length - sizes.steps
        value = F.pad(value, [0, 0] * (value.dim() - 1) + [0, more], value=padding_value)
    return (value.transpose(0, 1) if batch_first else value), each


def _check(original: Callable[..., None]) -> Callable[..., None]:
    """Returns a layer's check of its arguments, which accepts packed batches unchecked."""

    def check_forward_args(self: nn.RNNBase, input: Any, hidden: Any, batch_sizes: Any) -> None:
        if not isinstance(batch_sizes, _Lengths):  # the original would turn their symbolic sizes into numbers
            original(self, input, hidden, batch_sizes)

    return check_forward_args


replacement(nn.RNNBase, "check_forward_args")(_check(nn.RNNBase.check_forward_args))
replacement(nn.LSTM, "check_forward_args")(_check(nn.LSTM.check_forward_args))


def _packed(name: str) -> None:
    """Replaces the function that runs all layers of a kind, for packed batches."""
    original = getattr(_VF, name)

    def layers(*args: Any) -> Any:
        if isinstance(args[1], _Lengths):
            return _layers(name, *args)
        return original(*args)

    replacement(_VF, name)(layers)


for _name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    _packed(_name)


def _layers(
    name: str, data: _Rows, lengths: _Lengths, states: Any, weights: Sequence[torch.Tensor], biases: bool, count: int,
    dropout: float, train: bool, bidirectional: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """Runs all layers and directions on a padded batch; returns what PyTorch's function does for a packed one."""
    directions = (False, True) if bidirectional else (False,)
    each = len(weights) // (count * len(directions))
    initial = states if name == "lstm" else (states,)
    value, final = data.padded, []
    for layer in range(count):
        if layer and dropout and train:
            value = torch.dropout(value, dropout, train=True)
        outputs = []
        for reverse in directions:
            number = layer * len(directions) + reverse
            first = [state[number : number + 1] for state in initial]
            part = weights[number * each : (number + 1) * each]
            turned = lengths.reversed(value) if reverse else value
            output, last = _layer(name, turned, lengths, first, part, biases, train)
            outputs.append(lengths.reversed(output) if reverse else output)
            final.append(last)
        value = torch.cat(outputs, -1)
    return _Rows(value), *(torch.stack(states) for states in zip(*final, strict=True))


def _layer(
    name: str, value: torch.Tensor, lengths: _Lengths, first: list[torch.Tensor], weights: Sequence[torch.Tensor],
    biases: bool, train: bool,
) -> tuple[torch.Tensor, list[torch.Tensor]]:  # fmt: skip
    """Runs one layer in one direction; returns its output and the states at the ends of the sequences."""
    settings = (biases, 1, 0.0, train, False, False)
    if name != "lstm":
        output, _ = getattr(aten, name).input(value, first[0], list(weights), *settings)
        return output, [lengths.last(output)]
    into = weights[0]
    width = into.shape[0] // 4
    shut = torch.cat([into.new_full((width, 1), bias) for bias in (-_SHUT, _SHUT, 0.0, 0.0)])
    padding = lengths.inside().logical_not().to(value.dtype)
    inputs, into = torch.cat([value, padding], -1), torch.cat([into, shut], 1)
    output, _, cell = aten.lstm.input(inputs, first, [into, *weights[1:]], *settings)
    return output, [lengths.last(output), cell.squeeze(0)]


@translation(torch.ops.ort_trainer.checked_lengths.default)
def _translate_checked_lengths(lengths: Value, steps: Any, exact: bool) -> Value:
    """Reads an index out of bounds if a length is wrong: ONNX has no assertions, and the error names the node."""
    steps = op.Constant(value_int=steps) if isinstance(steps, int) else op.Reshape(steps, op.Constant(value_ints=[]))
    longest, shortest = op.ReduceMax(lengths, keepdims=0), op.ReduceMin(lengths, keepdims=0)
    right = op.Equal(longest, steps) if exact else op.LessOrEqual(longest, steps)
    right = op.And(right, op.GreaterOrEqual(shortest, op.Constant(value_int=1)))
    wrong = op.Cast(op.Not(right), to=ir.DataType.INT64)
    return op.Gather(op.Unsqueeze(lengths, op.Constant(value_ints=[0])), wrong)
