"""LSTM, GRU and RNN, whose decompositions in torch 2.13 are mended: always arithmetic, and with all their dropout."""

from __future__ import annotations

from typing import Any

import torch
from torch._decomp import decompositions

from .registry import replacement

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
def _select_one_layer_lstm_function(*_: Any) -> Any:
    """Picks no kernel of oneDNN where the input needs no gradient: nothing translates its backward operator."""
    return _plain_lstm
