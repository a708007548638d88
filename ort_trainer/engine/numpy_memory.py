"""NumPy's arrays and ONNX Runtime's own tensors, which ONNX Runtime reads and writes in place."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from .ort import CPU, Device, OrtValue, engine
from .runner import Output, Wanted

Array = np.ndarray[Any, Any]


class Generator(Protocol):
    """Draws random numbers."""

    def draw(self, wanted: Wanted) -> list[Array]:
        """Returns new random numbers for inputs of given shapes."""


class OrtValueMemory:
    """Inputs are arrays or OrtValues, and outputs are OrtValues, which own their memory.

    Args:
        device: The device of the outputs.
    """

    def __init__(self, device: Device) -> None:
        self._device = device

    def dtypes(self, name: str) -> tuple[np.dtype[Any], np.dtype[Any]]:
        """Returns the dtypes in which an output is written and returned."""
        dtype = np.dtype(name)
        return dtype, dtype

    def bind_input(self, binding: Any, name: str, value: Array | OrtValue) -> Array | OrtValue:
        """Binds a contiguous tensor, and returns it."""
        if isinstance(value, np.ndarray):
            binding.bind_cpu_input(name, value)
        else:
            binding.bind_ortvalue_input(name, value)
        return value

    def bind_output(self, binding: Any, name: str, value: OrtValue) -> None:
        """Binds a tensor that a run writes."""
        binding.bind_ortvalue_output(name, value)

    def bind_new(self, binding: Any, output: Output) -> Array | None:
        """Lets ONNX Runtime allocate an output: an OrtValue over an array could outlive the array."""
        binding.bind_output(output.name, self._device.type, self._device.number)
        return None

    def received(self, value: OrtValue) -> Any:
        """Returns a tensor that ONNX Runtime has allocated."""
        return value

    def draw(self, wanted: Wanted, generator: Generator) -> list[Array]:
        """Returns new random numbers."""
        return generator.draw(wanted)


class NumPyMemory(OrtValueMemory):
    """Outputs are arrays."""

    def __init__(self) -> None:
        super().__init__(CPU)

    def bind_new(self, binding: Any, output: Output) -> Array | None:
        """Binds and returns a new array; None if only ONNX Runtime knows its shape."""
        if output.shape is None:
            return super().bind_new(binding, output)
        array = np.empty(output.shape, output.bound)
        address = array.__array_interface__["data"][0]
        binding.bind_output(output.name, "cpu", 0, output.bound.type, output.shape, address)
        return array

    def received(self, value: OrtValue) -> Array:
        """Returns a tensor that ONNX Runtime has allocated."""
        array: Array = value.numpy()
        return array


class StateTensor:
    """A tensor at a fixed address on a device, so it needs to be bound only once.

    Args:
        array: Its initial values; on the CPU its memory is reused if possible.
        device: The device of the tensor.

    Attributes:
        value: The tensor for ONNX Runtime.
        dtype: The element type.
        shape: The sizes.
    """

    def __init__(self, array: Array, device: Device) -> None:
        self.dtype: np.dtype[Any] = array.dtype
        self.shape: tuple[int, ...] = array.shape
        self._array: Array | None = None
        if device.type == "cpu":
            self._array = array = np.require(array, requirements=["C", "W", "O"])
        # Shares the array's memory on the CPU, and copies it to other devices.
        self.value: OrtValue = engine().OrtValue.ortvalue_from_numpy(array, device.type, device.number)

    def view(self) -> Array:
        """Returns the values: on the CPU the memory itself, elsewhere a copy."""
        return self.value.numpy() if self._array is None else self._array

    def read(self) -> Array:
        """Returns a copy of the values."""
        return self.value.numpy() if self._array is None else self._array.copy()

    def write(self, array: Array) -> None:
        """Copies values of the same type and size into the tensor."""
        if self._array is None:
            self.value.update_inplace(np.ascontiguousarray(array).reshape(self.shape))
        else:
            np.copyto(self._array, array.reshape(self.shape))
