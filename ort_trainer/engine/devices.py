"""PyTorch's devices: which one trains, how much memory it may take, and its random generator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch


def resolve_device(
    name: str | None, tensors: Iterable[torch.Tensor] = (), local_rank: int | None = None
) -> torch.device:
    """Returns the device to train on, with its index.

    Args:
        name: The option ``device.id``; None if the user left it out. Then training runs where the tensors are, if that
            is not the CPU; else on CUDA, if PyTorch sees a device; else on the CPU.
        tensors: Parameters of the model.
        local_rank: Rank of this process on this machine; None if unknown. It chooses the device if the name has no
            index; without it, PyTorch's current device is used.

    Raises:
        ValueError: If the device is unknown or not available.
    """
    if name is None:
        places = [value.device for value in tensors if value.device.type not in ("cpu", "meta")]
        if places:
            return places[0]
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        module = torch.get_device_module(device)
    except RuntimeError as error:
        raise ValueError(f"device.id {name!r} is not a device of PyTorch {torch.__version__}: {error}") from None
    if device.type == "cpu":
        return torch.device("cpu")
    title = device.type.upper()
    if not hasattr(module, "device_count") or not module.is_available():
        raise ValueError(
            f"device.id {name!r} was asked for, but PyTorch {torch.__version__} sees no {title} device: set device.id "
            f"to 'cpu', leave it out, or install a build of PyTorch and a driver for {title}"
        )
    index, count = device.index, module.device_count()
    if index is None and local_rank is not None:
        index = local_rank if count > 1 else 0  # some launchers show each process only one device
        if index >= count:
            raise ValueError(
                f"there are {count} {title} devices, but this process has the local rank {local_rank}: launch at most "
                f"{count} processes here, or set device.id"
            )
    if index is None:
        index = module.current_device() if hasattr(module, "current_device") else 0
    if index >= count:
        raise ValueError(f"device.id {name!r} was asked for, but there are {count} {title} devices")
    return torch.device(device.type, index)


def device_of(tensors: Iterable[torch.Tensor]) -> torch.device:
    """Returns the device of the first tensor; the CPU if there is none."""
    return next((value.device for value in tensors), torch.device("cpu"))


def limit_memory(device: torch.device, limit: int) -> None:
    """Limits what PyTorch's allocator may take of a CUDA device, for the whole process; 0 changes nothing.

    Args:
        device: The device.
        limit: Bytes. PyTorch raises ``torch.OutOfMemoryError`` beyond them.
    """
    if limit:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(limit / total, 1.0), device)


def default_generator(device: torch.device) -> torch.Generator:
    """Returns PyTorch's global generator for a device."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    module.init()  # creates the generators
    if not hasattr(module, "default_generators"):
        return module._get_default_mps_generator()  # type: ignore[no-any-return]
    index = module.current_device() if device.index is None else device.index
    return module.default_generators[index]  # type: ignore[no-any-return]


@contextlib.contextmanager
def as_default_generator(generator: torch.Generator) -> Iterator[None]:
    """A context in which PyTorch's operators on the generator's device draw from it.

    Operators such as attention with dropout take no generator. States are a few bytes in the host's memory, so nothing
    waits for the device.
    """
    default = default_generator(generator.device)
    if default is generator:
        yield
        return
    before = default.get_state()
    default.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(default.get_state())
        default.set_state(before)
