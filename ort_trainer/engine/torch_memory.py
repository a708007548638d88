"""PyTorch's tensors, which ONNX Runtime reads and writes in place."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from ..core.masks import KEYS
from ..step import RandomInput
from .programs.dropout import draw_mask, unpacked

if TYPE_CHECKING:
    from .ort import OrtValue
    from .runner import Output, Wanted

_NUMPY_TYPES: dict[torch.dtype, Any] = {
    torch.float64: np.float64,
    torch.float32: np.float32,
    torch.float16: np.float16,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.bool: np.bool_,
}


_FREED = "freed (untyped_storage().resize_(0))"


class TorchMemory:
    """PyTorch's tensors on one device.

    Args:
        device: The device.

    Attributes:
        device: As given.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._place = (device.type, device.index or 0)
        self._nothing = torch.zeros(1, device=device)

    def dtypes(self, name: str) -> tuple[torch.dtype, torch.dtype]:
        """Returns the dtypes in which an output is written and returned: bfloat16 is written as fp32."""
        dtype = getattr(torch, name)
        return _bound_type(dtype), dtype

    def bind_input(self, binding: Any, name: str, value: torch.Tensor) -> torch.Tensor:
        """Binds a tensor, contiguous and in the dtype of the graph's input, and returns it."""
        value = as_taken(value).contiguous()
        if value.is_neg():
            value = value.resolve_neg()
        binding.bind_input(name, *self._described(name, value))
        return value

    def bind_output(self, binding: Any, name: str, value: torch.Tensor) -> None:
        """Binds a tensor that a run writes."""
        binding.bind_output(name, *self._described(name, value))

    def bind_new(self, binding: Any, output: Output) -> torch.Tensor | None:
        """Binds and returns a new tensor; None if only ONNX Runtime knows its shape."""
        if output.shape is None:
            binding.bind_output(output.name, *self._place)
            return None
        value = torch.empty(output.shape, dtype=output.bound, device=self.device)
        binding.bind_output(output.name, *self._described(output.name, value))
        return value

    def received(self, value: OrtValue) -> torch.Tensor:
        """Returns a tensor that ONNX Runtime has allocated."""
        return torch.from_numpy(value.numpy()).to(self.device)

    def draw(self, wanted: Wanted, generator: torch.Generator | None) -> list[torch.Tensor]:
        """Returns new random numbers, contiguous and in dtypes that can be bound."""
        # All masks of a run are derived from one key, which is drawn before any other number.
        with_key = any(spec.kind in ("key", "mask") for spec, _ in wanted)
        key = torch.randint(KEYS, (), generator=generator, device=self.device).cpu() if with_key else None
        return [_sample(spec, shape, self.device, generator, key) for spec, shape in wanted]

    def _described(self, name: str, value: torch.Tensor) -> tuple[Any, ...]:
        """Returns device, element type, shape and address of a tensor, for a binding."""
        kind = _NUMPY_TYPES.get(value.dtype)
        if kind is None:
            raise TypeError(
                f"{name!r} has dtype {value.dtype}, which can't be shared with ONNX Runtime: use one of "
                f"{[str(dtype) for dtype in _NUMPY_TYPES]}"
            )
        address = value.data_ptr()
        if not address:
            readable(name, value)
            address = self._nothing.data_ptr()  # an empty tensor has no address, but ONNX Runtime requires one
        return (*self._place, kind, value.shape, address)


def readable(name: str, value: torch.Tensor) -> torch.Tensor:
    """Returns a tensor whose memory holds its values as they are, so that it can be read by its address.

    Returns a copy of a tensor with a lazy negation or conjugation. Takes less than half a microsecond.

    Args:
        name: The name of the input, for the error.
        value: The tensor.

    Raises:
        TypeError: If the tensor has no such memory.
    """
    try:
        has_memory = value.data_ptr() or (not value.numel() and not value.is_meta and not _is_other_kind(value))
    except (RuntimeError, ValueError):  # a sparse tensor, for example, or a parameter of a lazy module
        has_memory = False
    if not has_memory or value.is_nested or value.is_quantized:
        raise TypeError(f"input {name!r} must be an ordinary tensor with values in memory, but it is {_kind(value)}")
    return value.resolve_conj().resolve_neg() if value.is_neg() or value.is_conj() else value


def order_of(value: torch.Tensor) -> tuple[int, ...]:
    """Returns the dimensions of a tensor from the largest stride to the smallest."""
    strides = value.stride()
    return tuple(sorted(range(value.dim()), key=lambda axis: (-strides[axis], axis)))


def in_order(value: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Returns a tensor whose dimensions are in an order in memory, as :func:`order_of` returns it."""
    return put_back(value.permute(tuple(order)).contiguous(), order)


def put_back(value: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Undoes ``permute(order)``."""
    return value.permute([order.index(axis) for axis in range(len(order))])  # one argument: there may be no dimensions


def dense_order(sizes: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Returns the dimensions from the largest stride to the smallest; None if there are gaps or shared elements."""
    order = tuple(sorted(range(len(sizes)), key=lambda axis: (-strides[axis], axis)))
    expected = 1
    for axis in reversed(order):
        if sizes[axis] != 1 and strides[axis] != expected:
            return None
        expected *= sizes[axis]
    return order


def freed_storages(owner: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Describes the parameters and buffers whose storage was freed, for an error; "" if there are none."""
    plain = [(name, value) for name, value in tensors if value.layout is torch.strided and not value.is_meta]
    freed = [name for name, value in plain if value.numel() and not value.untyped_storage().nbytes()]
    return f"the storage of {freed[:3]} of {owner} was {_FREED}, as FSDP does between two uses" if freed else ""


def sparse(owner: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Describes the parameters and buffers without strides, for an error; "" if there are none."""
    names = [name for name, value in tensors if value.layout is not torch.strided]
    return f"{names[:3]} of {owner} are sparse, but a graph takes dense tensors" if names else ""


def divided(owner: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Describes the parameters of which each process has a part, for an error; "" if there are none."""
    # DTensor, by a name that needs no torch.distributed; and what FullyShardedDataParallel makes of parameters.
    parts = [name for name, value in tensors if hasattr(value, "device_mesh") or hasattr(value, "_shard_param_infos")]
    return f"{parts[:3]} of {owner} are divided among processes, but a graph takes whole ones" if parts else ""


def _kind(value: torch.Tensor) -> str:
    """Describes a tensor without ordinary memory, and says what to do, for an error."""
    if isinstance(value, (UninitializedBuffer, UninitializedParameter)):
        return "a parameter of a lazy module that has no shape yet: call the module once with a batch"
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        return "of a transform of torch.func, such as vmap or grad: give the tensor that went into the transform"
    if torch._is_functional_tensor(value):
        return "a tensor of torch.func.functionalize: give the tensor that went into it"
    if value.is_quantized:
        return "quantized: call dequantize()"
    if value.is_nested:
        return "nested: call torch.nested.to_padded_tensor(), and pass the lengths or a mask as another input"
    if value.layout is not torch.strided:
        return f"of the layout {value.layout}: call to_dense()"
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        advice = {
            "MaskedTensor": ": call to_tensor(), and pass the mask as another input",
            "DTensor": ": call full_tensor(), or to_local() for this process's part",
            "FakeTensor": ", which holds no values: make the batch outside FakeTensorMode",
        }
        kind = type(value).__name__
        return f"a {kind}{advice.get(kind, ', which holds no values: pass a plain tensor')}"
    if value.is_meta:
        return "on the device 'meta', which holds no values: make it on the model's device"
    if value._is_zerotensor():
        return "a zero tensor: call clone()"
    return f"one whose storage was {_FREED}: create it again, or pass a clone() from before"


def _is_other_kind(value: torch.Tensor) -> bool:
    """Returns whether a tensor's subclass overrides its operators; such a tensor may have no memory."""
    return type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__


def shaped(sizes: Iterable[int | torch.SymInt]) -> torch.Tensor:
    """Returns an empty tensor whose shape carries sizes, for :data:`~ort_trainer.step.SIZES`.

    Its strides are 0, because contiguous strides of many sizes would overflow.
    """
    shape = (0, *sizes)
    return torch.empty_strided(shape, (0,) * len(shape))


def as_taken(value: torch.Tensor) -> torch.Tensor:
    """Returns a batch's tensor in the dtype of the graph's input: bfloat16 becomes fp32."""
    return value.float() if value.dtype is torch.bfloat16 else value


def _bound_type(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which ONNX Runtime reads or writes a tensor of a dtype."""
    return torch.float32 if dtype == torch.bfloat16 else dtype


def _sample(
    spec: RandomInput,
    shape: tuple[int, ...],
    device: torch.device,
    generator: torch.Generator | None,
    key: torch.Tensor | None,
) -> torch.Tensor:
    """Returns new random numbers, sampled as in PyTorch except for masks."""
    if key is not None and spec.kind == "key":
        return key
    if key is not None and spec.kind == "mask":
        kept, number = spec.parameters
        return unpacked(draw_mask(key, math.prod(shape), int(number), kept), shape).to(device)
    dtype = getattr(torch, spec.dtype)
    if spec.kind == "permutation":
        return torch.randperm(*shape, generator=generator, dtype=dtype, device=device)
    order = spec.order or range(len(shape))
    # A view with the strides of PyTorch's own tensor: numbers are drawn in the order of the memory.
    value = put_back(torch.empty([shape[axis] for axis in order], dtype=dtype, device=device), order)
    return _fill(value, spec, generator).contiguous().to(_bound_type(dtype))


def _fill(value: torch.Tensor, spec: RandomInput, generator: torch.Generator | None) -> torch.Tensor:
    """Fills a tensor in place with random numbers, and returns it."""
    if spec.kind == "bernoulli":
        probability, factor = spec.parameters
        value.bernoulli_(probability, generator=generator)
        return value if factor == 1.0 else value.mul_(factor)
    if spec.kind == "uniform":
        return value.uniform_(generator=generator)
    if spec.kind == "normal":
        return value.normal_(generator=generator)
    if spec.kind == "exponential":
        return value.exponential_(*spec.parameters, generator=generator)
    low, high = (int(bound) for bound in spec.parameters)
    return value.random_(low, high, generator=generator)
