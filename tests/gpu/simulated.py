"""A device that is not the CPU, simulated in Python: its tensors keep their values in tensors on the CPU.

Only the device's operators may touch them. What runs on ordinary tensors of the CPU instead, and what reads values
back, is counted.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

__all__ = ["NAME", "Generator", "Watch", "register"]

aten = torch.ops.aten
NAME = "simulated"
_TorchGenerator = torch.Generator
# These return a number, or a tensor whose size depends on values.
_READS = (aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default, aten.nonzero.default)


class Generator(_TorchGenerator):
    """A generator of the CPU in place of one of the device, which PyTorch can't have from Python."""

    def __new__(cls, device: Any = "cpu") -> Generator:
        """Returns a generator of the CPU."""
        made: Generator = _TorchGenerator.__new__(cls, "cpu")  # type: ignore[call-arg]
        return made


class _Module(_DummyBackendModule):
    """What ``torch.simulated`` is."""

    def init(self) -> None:
        pass

    @property
    def default_generators(self) -> list[torch.Generator]:
        return [torch.default_generator]

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.default_generator.get_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.default_generator.set_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


class _Tensor(torch.Tensor):
    """A tensor of the device.

    Attributes:
        values: Its values, on the CPU.
    """

    values: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, values: torch.Tensor) -> _Tensor:
        made: _Tensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, values.size(), strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype,
            device=f"{NAME}:0",
        )  # fmt: skip
        made.values = values
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(function, args, kwargs or {})

    # Addresses say which tensors share memory.
    def untyped_storage(self) -> Any:
        return self.values.untyped_storage()

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        return self.values.numpy(force=force)


def _run(function: Any, args: Any, kwargs: Any) -> Any:
    """Runs an operator of the device on the values of its tensors."""
    wanted = kwargs.get("device")
    leaves = pytree.tree_leaves((args, kwargs))
    result = function(*pytree.tree_map(_values_of, args), **pytree.tree_map(_values_of, kwargs))
    if wanted is not None and torch.device(wanted).type != NAME:  # a copy to another device
        return result
    known = {id(leaf.values): leaf for leaf in leaves if isinstance(leaf, _Tensor)}  # what an operator has changed
    return pytree.tree_map(lambda value: known[id(value)] if id(value) in known else _as_tensor(value), result)


def _values_of(value: Any) -> Any:
    if isinstance(value, _Tensor):
        return value.values
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _as_tensor(value: Any) -> Any:
    return _Tensor(value) if isinstance(value, torch.Tensor) else value


@functools.cache
def register() -> None:
    """Makes the device known to PyTorch, for as long as the process lives."""
    _setup_privateuseone_for_python_backend(NAME, _Module())  # type: ignore[no-untyped-call]
    library = torch.library.Library("_", "IMPL")
    library.fallback(lambda function, *args, **kwargs: _run(function, args, kwargs), "PrivateUse1")
    _kept.append(library)


_kept: list[Any] = []


class Watch(TorchDispatchMode):
    """A context that counts the operators that read values back, and those that compute on the CPU.

    Attributes:
        reads: Operator -> how often it has read values of the device.
        on_cpu: Operator -> how often it has computed something on the CPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[str] = Counter()
        self.on_cpu: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        taken, made = (list(filter(_is_tensor, pytree.tree_leaves(part))) for part in ((args, kwargs), result))
        of_device = any(isinstance(value, _Tensor) for value in taken)
        if of_device and (function in _READS or any(not isinstance(value, _Tensor) for value in made)):
            self.reads[str(function)] += 1
        elif not of_device and any(not isinstance(value, _Tensor) and value.numel() > 1 for value in made):
            self.on_cpu[str(function)] += 1
        return result


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)
