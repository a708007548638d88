"""Sequences, which are lists of values, and optional values, which may be None."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..module import Body
from ..node_table import Node, operator
from ..values import Value, integers

_Tensor = torch.Tensor
_Sequence = list[Any]


@operator("SequenceEmpty", since=11)
def _empty(*, dtype: int | None = None) -> tuple[_Sequence]:
    return ([],)


@operator("SequenceConstruct", since=11)
def _construct(*values: _Tensor) -> tuple[_Sequence]:
    return (list(values),)


@operator("SequenceAt", since=11, known_inputs=(1,))
def _at(sequence: _Sequence, position: Value, *, node: Node) -> Value:
    return sequence[int(integers(position, "position", node)[0])]


@operator("SequenceInsert", since=11, known_inputs=(2,))
def _insert(sequence: _Sequence, value: _Tensor, position: Value, *, node: Node) -> tuple[_Sequence]:
    place = len(sequence) if position is None else int(integers(position, "position", node)[0])
    place = place + len(sequence) if place < 0 else place
    return ([*sequence[:place], value, *sequence[place:]],)


@operator("SequenceErase", since=11, known_inputs=(1,))
def _erase(sequence: _Sequence, position: Value, *, node: Node) -> tuple[_Sequence]:
    place = -1 if position is None else int(integers(position, "position", node)[0])
    place = place + len(sequence) if place < 0 else place
    return ([*sequence[:place], *sequence[place + 1 :]],)


@operator("SequenceLength", since=11)
def _length(sequence: _Sequence) -> Value:
    return np.array(len(sequence), dtype=np.int64)


@operator("ConcatFromSequence", since=11)
def _concat(sequence: _Sequence, *, axis: int, new_axis: int) -> _Tensor:
    return torch.stack(sequence, axis) if new_axis else torch.cat(sequence, axis)


@operator("SequenceMap", since=17)
def _map(sequence: _Sequence, *others: Value, body: Body) -> tuple[Value, ...]:
    results = []
    for i, value in enumerate(sequence):
        arguments = [other[i] if isinstance(other, list) else other for other in others]
        results.append(body.tensors(body(value, *arguments)))
    return tuple(list(values) for values in zip(*results, strict=True))


@operator("Optional", since=15)
def _optional(value: Value, *, type: Any = None) -> tuple[Value]:
    return (value,)


@operator("OptionalHasElement", since=15)
def _has_element(value: Value) -> Value:
    return np.array(value is not None)


@operator("OptionalGetElement", since=15)
def _get_element(value: Value, *, node: Node) -> tuple[Value]:
    if value is None:
        raise node.error("the optional value has no element")
    return (value,)
