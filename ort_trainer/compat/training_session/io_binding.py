"""``IOBinding``: the inputs and outputs of a run of a training session, bound to memory."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from ...core.dims import evaluate
from ...core.errors import shown
from ...engine import ort
from ...step import Step


class IOBinding:
    """Binds memory to the inputs and outputs of a :class:`~ort_trainer.TrainingSession`.

    The methods are those of ``onnxruntime.IOBinding``.
    """

    def __init__(self) -> None:
        self._inputs: dict[str, torch.Tensor] = {}
        # Output -> the memory to write to, or the device where the run allocates it.
        self._outputs: dict[str, torch.Tensor | torch.device] = {}
        self._results: dict[str, torch.Tensor] = {}

    def bind_cpu_input(self, name: str, arr_on_cpu: np.ndarray[Any, Any]) -> None:
        """Binds an input to an array."""
        self._inputs[name] = torch.from_numpy(np.ascontiguousarray(arr_on_cpu).reshape(np.shape(arr_on_cpu)))

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """Binds an input to contiguous memory, which the caller keeps alive until the run is over.

        Args:
            name: The name of the input.
            device_type: ``cpu`` or ``cuda``.
            device_id: The index of the device.
            element_type: A numpy type, or a number of ``onnx.TensorProto``, such as its ``BFLOAT16``.
            shape: The shape.
            buffer_ptr: The address of the memory.
        """
        self._inputs[name] = _memory(device_type, device_id, element_type, shape, buffer_ptr)

    def bind_ortvalue_input(self, name: str, ortvalue: Any) -> None:
        """Binds an input to an OrtValue."""
        self._inputs[name] = to_torch(ortvalue)

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Binds an output to memory; without an address, the run allocates the memory on the device.

        Raises:
            ValueError: If an address is given without type or shape, or there is no such device.
        """
        if buffer_ptr is None:
            self._outputs[name] = _device(device_type, device_id)
            return
        if element_type is None or shape is None:
            raise ValueError(f"output {name!r} is bound to an address, which also needs element_type and shape")
        self._outputs[name] = _memory(device_type, device_id, element_type, shape, buffer_ptr)

    def bind_ortvalue_output(self, name: str, ortvalue: Any) -> None:
        """Binds an output to the memory of an OrtValue."""
        self._outputs[name] = to_torch(ortvalue)

    def synchronize_inputs(self) -> None:
        """Waits until copies of inputs to a CUDA device are complete."""
        _synchronize(self._inputs.values())

    def synchronize_outputs(self) -> None:
        """Waits until the results are complete."""
        _synchronize(self._results.values())

    def get_outputs(self) -> list[Any]:
        """Returns the outputs of the last run as OrtValues, in the order in which they were bound."""
        return [to_ort_value(value) for value in self._results.values()]

    def get_outputs_as_ortvaluevector(self) -> Any:
        """Returns the same as :meth:`get_outputs` in an ``OrtValueVector``, as ONNX Runtime's C++ bindings take it."""
        vector = ort.engine().capi._pybind_state.OrtValueVector()
        for value in self.get_outputs():
            vector.push_back(value._ortvalue)
        return vector

    def copy_outputs_to_cpu(self) -> list[np.ndarray[Any, Any]]:
        """Returns the outputs of the last run as arrays."""
        return [value.cpu().numpy().copy() for value in self._results.values()]

    def clear_binding_inputs(self) -> None:
        """Removes the bound inputs."""
        self._inputs.clear()

    def clear_binding_outputs(self) -> None:
        """Removes the bound outputs and their results."""
        self._outputs.clear()
        self._results.clear()

    @property
    def inputs(self) -> dict[str, torch.Tensor]:
        """The bound inputs."""
        return dict(self._inputs)

    @property
    def output_names(self) -> list[str]:
        """The names of the bound outputs."""
        return list(self._outputs)

    def check(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> None:
        """Checks that an output matches the memory that it is bound to.

        Raises:
            ValueError: If the shape or dtype differs.
        """
        memory = self._outputs.get(name)
        if isinstance(memory, torch.Tensor) and (tuple(memory.shape) != tuple(shape) or memory.dtype != dtype):
            raise ValueError(
                f"output {name!r} is bound to memory of shape {list(memory.shape)} and {memory.dtype}, but it has "
                f"shape {list(shape)} and {dtype}"
            )

    def deliver(self, results: Sequence[torch.Tensor]) -> None:
        """Stores the results of a run, in the order of :attr:`output_names`.

        Raises:
            ValueError: If a result does not match the memory that its output is bound to. Nothing is written then.
        """
        pairs = list(zip(self._outputs.items(), results, strict=True))
        for (name, _), value in pairs:
            self.check(name, value.shape, value.dtype)
        self._results = {
            name: memory.copy_(value) if isinstance(memory, torch.Tensor) else value.to(memory)
            for (name, memory), value in pairs
        }


def to_torch(ortvalue: Any) -> torch.Tensor:
    """Returns an OrtValue as a tensor that shares its memory."""
    if not hasattr(ortvalue, "_ortvalue"):
        raise TypeError(f"expected an onnxruntime.OrtValue, but a {type(ortvalue).__name__} was given")
    if ortvalue.data_type() == "tensor(bool)":  # ONNX Runtime's DLPack does not support bool
        memory = _memory(ortvalue.device_name(), 0, np.bool_, ortvalue.shape(), ortvalue.data_ptr())
        memory._ort_value = ortvalue  # type: ignore[attr-defined]  # which owns the memory
        return memory
    return torch.utils.dlpack.from_dlpack(ortvalue._ortvalue.to_dlpack())


def to_ort_value(value: torch.Tensor) -> Any:
    """Returns a tensor as an OrtValue."""
    return ort.to_ort_value(value.cpu().numpy(), ort.Device(value.device.type, value.device.index or 0))


def _synchronize(tensors: Any) -> None:
    for device in {value.device for value in tensors if value.is_cuda}:
        torch.cuda.synchronize(device)


class _CudaMemory:
    """CUDA memory in the form that PyTorch wraps without a copy."""

    def __init__(self, shape: Sequence[int], typestr: str, address: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": tuple(shape),
            "typestr": typestr,
            "data": (address, False),
            "version": 3,
        }


def _device(device_type: str, device_id: int) -> torch.device:
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f"device_type must be 'cpu' or 'cuda', but {shown(device_type)} was given")
    count = torch.cuda.device_count() if device_type == "cuda" else 1
    if device_id not in range(count):
        raise ValueError(f"there is no device {device_type}:{shown(device_id)}: PyTorch has {count} of this type")
    return torch.device(device_type, device_id) if device_type == "cuda" else torch.device("cpu")


def _dtype(element_type: Any) -> torch.dtype:
    try:
        if isinstance(element_type, int):
            return ir.tensor_adapters.to_torch_dtype(ir.DataType(element_type))
        return torch.from_numpy(np.empty(0, element_type)).dtype
    except (TypeError, ValueError, KeyError) as error:
        raise TypeError(
            "element_type must be a numpy type of numbers, such as numpy.float32, or a number of onnx.TensorProto, but "
            f"{shown(element_type)} was given"
        ) from error


def _memory(device_type: str, device_id: int, element_type: Any, shape: Sequence[int], address: int) -> torch.Tensor:
    """Returns the memory at an address as a tensor, without a copy."""
    dtype, device = _dtype(element_type), _device(device_type, device_id)
    size = math.prod(shape) * dtype.itemsize
    if size < 0 or (size and (not isinstance(address, int) or address <= 0)):
        raise ValueError(
            f"buffer_ptr must be the address of memory of shape {shown(list(shape))}, but {shown(address)} was given"
        )
    if not size:
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    if device.type == "cuda":
        data = torch.as_tensor(_CudaMemory([size], "|u1", address), device=device)
    else:
        data = torch.from_numpy(np.asarray((ctypes.c_uint8 * size).from_address(address)))
    return data.view(dtype).reshape(tuple(shape))


def check_binding(
    binding: IOBinding,
    graph: Step,
    batch: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor],
    all_finite: str,
) -> None:
    """Checks bound memory before anything changes, for outputs whose shapes are known.

    Args:
        binding: The binding.
        graph: The graph to run.
        batch: The inputs.
        gradients: Parameter name -> gradient; the output ``<name>_grad`` has its shape.
        all_finite: The name of the output that tells whether gradients were finite.

    Raises:
        TypeError, ValueError: If memory has the wrong shape or dtype.
    """
    sizes = graph.sizes({name: tuple(value.shape) for name, value in batch.items()})
    for spec in graph.outputs:
        if spec.shape is not None:
            binding.check(spec.name, [evaluate(size, sizes) for size in spec.shape], getattr(torch, spec.dtype))
    for name, value in gradients.items():
        binding.check(f"{name}_grad", value.shape, value.dtype)
    binding.check(all_finite, [1], torch.bool)
