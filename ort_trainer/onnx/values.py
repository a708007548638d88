"""The values that flow through an imported model: tensors, and numbers that are known while it is traced.

A known value is a NumPy array. An array of dtype ``object`` holds symbolic sizes, as Shape returns them; other arrays
hold constants of the model. The result of an operator is known if all its inputs are, until an operator needs a tensor.
Sizes therefore stay symbolic, and one graph serves all sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeGuard

import numpy as np
import onnx_ir as ir
import torch

from ..core.errors import ExportError

Known = np.ndarray[Any, np.dtype[Any]]
"""An array of numbers that are known while the model is traced, some of them symbolic."""
Number = Any
"""A Python number, or a symbolic one."""
Value = Any
"""A tensor, a known array, a sequence (a list of values), rounded numbers or an absent optional (None)."""


@dataclass(frozen=True)
class Rounded:
    """Quantized numbers as floats, through which a gradient passes as if they had not been rounded.

    Attributes:
        values: The numbers, of a type in which they are exact.
        dtype: Their type in the model: of integers, or of 8-bit floats.
    """

    values: torch.Tensor
    dtype: torch.dtype

    @property
    def tensor(self) -> torch.Tensor:
        """The numbers in their own type, without a gradient."""
        return self.values.detach().to(self.dtype)


def floats(x: torch.Tensor | Rounded) -> torch.Tensor:
    """Returns a tensor as it is, and quantized numbers as floats with their gradient."""
    return x.values if isinstance(x, Rounded) else x


# torch packs two numbers of 4 bits in a byte, and has no arithmetic on them: they are kept in the next wider type that
# represents each of them.
_WIDER = {
    ir.DataType.INT4: torch.int8,
    ir.DataType.UINT4: torch.uint8,
    ir.DataType.INT2: torch.int8,
    ir.DataType.UINT2: torch.uint8,
    ir.DataType.FLOAT4E2M1: torch.float8_e4m3fn,
}
NOT_IN_NUMPY: dict[torch.dtype, Any] = {
    torch.bfloat16: np.int16,
    torch.float8_e4m3fn: np.uint8,
    torch.float8_e4m3fnuz: np.uint8,
    torch.float8_e5m2: np.uint8,
    torch.float8_e5m2fnuz: np.uint8,
    torch.float8_e8m0fnu: np.uint8,
}
"""Types that NumPy lacks -> the type in which NumPy can hold their bits."""
# The alignment of PyTorch's allocator on the CPU, in bytes. Memory that lacks it is copied.
_ALIGNMENT = 64
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)


class Refusing(Protocol):
    """Whatever makes errors that name a node, such as :class:`~.node_table.Node`."""

    def error(self, reason: str) -> ExportError:
        """Returns an error that names the node."""
        ...


def torch_dtype(dtype: ir.DataType | int) -> torch.dtype:
    """Returns the dtype of tensors that hold values of an ONNX type.

    Raises:
        ExportError: If torch has none.
    """
    dtype = ir.DataType(dtype)
    if dtype in _WIDER:
        return _WIDER[dtype]
    try:
        return ir.tensor_adapters.to_torch_dtype(dtype)
    except TypeError:
        raise ExportError(
            f"PyTorch has no tensors of {dtype.name}: change the model's type, for example with a Cast before it"
        ) from None


def tensor_of(
    tensor: ir.TensorProtocol, flat_tensors: dict[tuple[int, int, ir.DataType], torch.Tensor] | None = None
) -> torch.Tensor:
    """Returns a tensor of the model as PyTorch's, sharing its memory if that is writable and aligned.

    Args:
        tensor: The tensor.
        flat_tensors: The flat results of earlier calls, by address, bytes and type: tensors that share memory in the
            model share it here too. Updated in place.
    """
    raw = getattr(tensor, "raw", None)
    key = (raw.ctypes.data, raw.nbytes, tensor.dtype) if isinstance(raw, np.ndarray) else (0, 0, tensor.dtype)
    if flat_tensors is None or key not in flat_tensors:
        flat = _flat(tensor)
        if flat_tensors is None or not key[0]:
            return flat.reshape(tensor.shape.numpy())
        flat_tensors[key] = flat
    return flat_tensors[key].reshape(tensor.shape.numpy())


def _flat(tensor: ir.TensorProtocol) -> torch.Tensor:
    """Returns the elements of a tensor of the model, in one dimension."""
    dtype = torch_dtype(tensor.dtype)
    values = np.ascontiguousarray(tensor.numpy()).reshape(-1)
    if tensor.dtype == ir.DataType.FLOAT4E2M1:
        return torch.tensor(values.astype(np.float32)).to(dtype)
    if tensor.dtype in _WIDER:
        return torch.tensor(values.astype(np.int8 if dtype == torch.int8 else np.uint8))
    if dtype in NOT_IN_NUMPY:
        values = values.view(NOT_IN_NUMPY[dtype])
    shared = values.flags.writeable and values.ctypes.data % _ALIGNMENT == 0
    stored = torch.from_numpy(values) if shared else torch.tensor(values)
    return stored.view(dtype) if dtype in NOT_IN_NUMPY else stored


def is_known(value: Value) -> TypeGuard[Known]:
    """Returns whether a value is known while the model is traced."""
    return isinstance(value, np.ndarray)


def known_array(values: Any) -> Known:
    """Returns numbers as a known array: of int64, float32 or bool, or of objects if one is symbolic.

    Args:
        values: A number, an array, or a (nested) sequence of numbers.
    """
    array = np.asarray(values) if isinstance(values, (np.ndarray, np.generic)) else _objects(values)
    if array.dtype != object or any(isinstance(value, _SYMBOLIC) for value in array.flat):
        return array
    if any(isinstance(value, (float, np.floating)) for value in array.flat):
        return array.astype(np.float32)
    if array.size and all(isinstance(value, (bool, np.bool_)) for value in array.flat):
        return array.astype(np.bool_)
    return array.astype(np.int64)


def each(function: Callable[[Any], Any], values: Known) -> Known:
    """Returns an array of objects: what a function returns for each element, which may be symbolic."""
    return np.asarray(np.frompyfunc(function, 1, 1)(values), dtype=object)


def _objects(values: Any) -> Known:
    """Returns an array of objects; ``np.array`` would try to convert symbolic numbers."""
    if not isinstance(values, (list, tuple)):
        array = np.empty((), dtype=object)
        array[()] = values
        return array
    parts = [_objects(value) for value in values]
    return np.stack(parts) if parts else np.empty((0,), dtype=object)


def as_tensor(value: Value, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Returns a value as a tensor.

    Args:
        value: A tensor, which is returned as it is, or a known array.
        dtype: The dtype for a known array; by default its own, or int64 or float32 if it is symbolic.
    """
    if isinstance(value, torch.Tensor):
        return value
    if value.dtype != object:
        tensor = torch.from_numpy(np.array(value, order="C"))
        return tensor if dtype is None else tensor.to(dtype)
    if dtype is None:
        is_float = any(isinstance(entry, (float, torch.SymFloat)) for entry in value.flat)
        is_bool = bool(value.size) and all(isinstance(entry, (bool, torch.SymBool)) for entry in value.flat)
        dtype = torch.float32 if is_float else torch.bool if is_bool else torch.int64
    if not value.size:
        return torch.zeros(value.shape, dtype=dtype)
    scalars = [torch.scalar_tensor(entry, dtype=dtype) for entry in value.flat]
    return scalars[0] if value.ndim == 0 else torch.stack(scalars).reshape(value.shape)


def integers(value: Value, what: str, node: Refusing) -> list[Any]:
    """Returns integers that an operator needs as numbers, such as the sizes for Reshape, as a list.

    Args:
        value: A known array or a tensor. The values of a tensor can't be read in a trace.
        what: The name of the numbers in the error.
        node: The node.

    Raises:
        ExportError: If they depend on the values of a batch.
    """
    return [_integer(entry) for entry in _entries(value, what, node)]


def numbers(value: Value, what: str, node: Refusing) -> list[Any]:
    """Returns numbers like :func:`integers`, but of any type."""
    return [entry.item() if isinstance(entry, np.generic) else entry for entry in _entries(value, what, node)]


def _entries(value: Value, what: str, node: Refusing) -> Iterable[Any]:
    """Returns the elements of a known array, or of a tensor outside a trace, as numbers."""
    if is_known(value):
        return list(value.reshape(-1))
    if isinstance(value, torch.Tensor) and not is_traced(value):
        return list(value.detach().reshape(-1).tolist())
    raise node.error(
        f"{what} depends on the values of a batch, but a graph for training needs to know it from the model or from "
        "the shapes of the inputs: make it a constant, or compute it from shapes"
    )


def is_traced(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is a tracer that stands for any batch, so that its values can't be read."""
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter)


def _integer(entry: Any) -> Any:
    """Returns a number as an int or SymInt."""
    if isinstance(entry, torch.SymFloat):
        return torch.sym_int(entry)  # type: ignore[no-untyped-call]
    return entry if isinstance(entry, torch.SymInt) else int(entry)
