"""What a session says about an input or output."""

from __future__ import annotations

from dataclasses import dataclass

import onnx

__all__ = ["NodeArg", "node_arg"]


@dataclass(frozen=True)
class NodeArg:
    """An input or output of the session, as ``onnxruntime.NodeArg`` describes one.

    Attributes:
        name: Its name.
        type: Its type, such as ``tensor(float)``.
        shape: Sizes, and names of dimensions.
    """

    name: str
    type: str
    shape: list[int | str | None]


def node_arg(value: onnx.ValueInfoProto) -> NodeArg:
    """Returns what a value of an ONNX model says about itself."""
    tensor = value.type.tensor_type
    kind = onnx.TensorProto.DataType.Name(tensor.elem_type).lower()
    shape = [size.dim_value or size.dim_param or None for size in tensor.shape.dim]
    return NodeArg(value.name, f"tensor({kind})", shape)
