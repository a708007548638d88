"""The description of a session's input or output."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ...export.onnx.nodes import shape_of

__all__ = ["NodeArg", "node_arg"]


@dataclass(frozen=True)
class NodeArg:
    """An input or output of the session, as ``onnxruntime.NodeArg`` describes one.

    Attributes:
        name: The name.
        type: The type, such as ``tensor(float)``.
        shape: Sizes, or names of symbolic dimensions.
    """

    name: str
    type: str
    shape: list[int | str | None]


def node_arg(value: ir.Value) -> NodeArg:
    """Returns the description of a value of an ONNX model."""
    kind = "undefined" if value.dtype is None else value.dtype.name.lower()
    return NodeArg(str(value.name), f"tensor({kind})", list(shape_of(value) or ()))
