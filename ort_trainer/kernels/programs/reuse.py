"""Finds operators that can overwrite an operand with their result, because nothing reads the operand afterwards.

The result then needs no memory of its own::

    v5 = gelu_backward(v4, v2)       =>    v5 = gelu_backward.grad_input(v4, v2, grad_input=v4)
    v6 = mul.Scalar(v5, 0.125)             v6 = mul_.Scalar(v5, 0.125)

1. Every element of the result depends only on the same element of the operand, or on its row if the kernel is known to
   have read the whole row before writing; or the result is the operand with some elements changed.
2. The operand's memory was allocated in the same program, and all its other readers precede the operator.
3. Operand and result have the same dtype, sizes and strides, and no other operand is a view of that memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from ...fx.symbols import size_in_bytes
from ...fx.values import Node, base_of, same_sizes

aten = torch.ops.aten
_has_kernel: Callable[[str, str], bool] = torch._C._dispatch_has_kernel_for_dispatch_key

# Fewer bytes are in the cache anyway, and allocating them takes no time.
_WORTH_IT = 1 << 16
# These compute row by row, and read a row before they write to it.
_ROW_BY_ROW = frozenset({aten._softmax.default, aten._softmax_backward_data.default, aten._log_softmax.default})
# These change some elements of a copy of their first argument.
_INTO_FIRST = frozenset(
    {
        aten.index_add.default,
        aten.index_copy.default,
        aten.index_put.default,
        aten.scatter.src,
        aten.scatter.value,
        aten.scatter_add.default,
    }
)


class Reuse(NamedTuple):
    """How an operator writes over an operand.

    Attributes:
        target: The overload that does so.
        argument: Name of its argument for the result; None if it changes its first argument.
        operand: The operand.
    """

    target: str
    argument: str | None
    operand: Node


def find_reuse(node: Node, is_free: Callable[[Node], bool]) -> Reuse | None:
    """Returns how an operator can write over one of its operands, if it can.

    Args:
        node: The operator.
        is_free: Whether a value was allocated in the program, and nothing but the operator still reads its memory.
    """
    operator = node.target
    assert isinstance(operator, torch._ops.OpOverload)
    into_first = operator in _INTO_FIRST
    if torch.Tag.pointwise not in operator.tags and operator not in _ROW_BY_ROW and not into_first:
        return None
    result = node.meta["val"]
    if not isinstance(result, torch.Tensor) or size_in_bytes(result) < _WORTH_IT:
        return None
    out, changing = _overloads(operator)
    operands, others = list(node.args), list(node.all_input_nodes)
    if into_first:  # it reads the others while it writes
        out, operands, others = None, operands[:1], []
        torch.fx.map_arg(node.args[1:], others.append)
    for place, operand in enumerate(operands):
        if not isinstance(operand, Node) or not _is_alike(operand, result):
            continue
        base = base_of(operand)
        if any(base_of(other) is base for other in others if into_first or other is not operand) or not is_free(base):
            continue
        if out is not None:
            return Reuse(*out, operand)
        if changing is not None and place == 0:
            return Reuse(changing, None, operand)
    return None


def _is_alike(operand: Node, result: torch.Tensor) -> bool:
    """Returns whether an operand fills its memory and has the dtype, sizes and strides of the result."""
    value = operand.meta["val"]
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == result.dtype
        and same_sizes(value.shape, result.shape)
        and same_sizes(value.stride(), result.stride())
        # A part of a larger tensor would keep all of it in memory.
        and size_in_bytes(base_of(operand).meta["val"]) == size_in_bytes(value)
    )


@functools.cache
def _overloads(operator: torch._ops.OpOverload) -> tuple[tuple[str, str] | None, str | None]:
    """Returns the overload that takes the result's memory, with the argument's name; and the one that changes ``self``.

    The former only counts if it has a kernel of its own: otherwise it would compute a new tensor and copy it.
    """
    signature = [(argument.name, str(argument.type)) for argument in operator._schema.arguments]
    packet = operator.overloadpacket
    out: tuple[str, str] | None = None
    for name in packet.overloads():
        overload = getattr(packet, name)
        arguments = overload._schema.arguments
        written = [argument.name for argument in arguments if argument.is_out]
        others = [(argument.name, str(argument.type)) for argument in arguments if not argument.is_out]
        if len(written) == 1 and others == signature and _has_kernel(overload.name(), "CPU"):
            out = str(overload), written[0]
    changing = None
    if operator.namespace == "aten":
        changing = getattr(getattr(aten, f"{packet.__name__}_", None), operator._overloadname, None)
    return out, None if changing is None else str(changing)
