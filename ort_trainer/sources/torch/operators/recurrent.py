"""LSTM, GRU and RNN, whose decompositions in torch 2.13 are mended: with all their dropout, and oneDNN's LSTM.

PyTorch's kernels run a layer of an LSTM as one operator, for sequences of any length. For ONNX it is unrolled, which
fixes the length.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch._decomp import decompositions

from .registry import replacement

_unrolling: ContextVar[bool] = ContextVar("unrolling", default=False)
_one_layer, _plain_lstm = decompositions._rnn_helper, decompositions.one_layer_lstm


@replacement(decompositions, "_rnn_helper")
def _layers(
    value: torch.Tensor, hidden: Any, params: Any, biases: bool, count: int, dropout: float, train: bool,
    bidirectional: bool, batch_first: bool, layer: Any,
) -> tuple[torch.Tensor, list[Any]]:  # fmt: skip
    """Puts dropout between the layers. (PyTorch compares the number of layers with the wrong thing, and has none.)"""
    width = 2 if bidirectional else 1
    value = value.transpose(0, 1) if batch_first else value
    final: list[Any] = []
    for start in range(0, count * width, width):
        if start and dropout and train:
            value = torch.dropout(value, dropout, train=True)
        part = slice(start, start + width)
        value, states = _one_layer(  # type: ignore[no-untyped-call]
            value, hidden[part], params[part], biases, 1, 0.0, train, bidirectional, False, layer
        )
        final += states
    return (value.transpose(0, 1) if batch_first else value), final


@replacement(decompositions, "select_one_layer_lstm_function")
def _select_one_layer_lstm(input: torch.Tensor, hx: Any, params: Any) -> Any:
    """Picks oneDNN's layer for what it computes; PyTorch itself does so without gradients only."""
    tensors = [input, *hx, *(weight for layer in params for weight in layer)]
    fit = all(tensor.dtype == torch.float32 and tensor.device.type == "cpu" for tensor in tensors)
    projects = hx[0].size(2) != hx[1].size(2)
    whole = fit and not projects and torch._C._get_mkldnn_enabled() and not _unrolling.get()
    return _onednn_lstm if whole else _plain_lstm


@contextlib.contextmanager
def unrolled_layers() -> Iterator[None]:
    """Under which oneDNN's layer is never picked: its backward operator has no translation."""
    before = _unrolling.set(True)
    try:
        yield
    finally:
        _unrolling.reset(before)


_LSTM = 2  # oneDNN's number for the kind of layer


def _onednn_lstm(
    input: torch.Tensor, hidden: Any, params: Any, has_biases: bool, reverse: bool = False
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """One layer in one direction, in training: the backward operator needs the workspace that it keeps."""
    weights = list(params) if has_biases else [*params, *(torch.zeros(params[0].shape[:1]) for _ in range(2))]
    first, cell = (state.unsqueeze(0).contiguous() for state in hidden)
    output, last, last_cell, _ = torch.ops.aten.mkldnn_rnn_layer.default(
        input.contiguous(),
        *weights[:4],
        first,
        cell,
        reverse,
        [],
        _LSTM,
        first.size(2),
        1,
        has_biases,
        False,
        False,
        True,
    )
    return output, (last.squeeze(0), last_cell.squeeze(0))
