"""Turns the arguments of a step into tensors by name, and checks them before any counter or state changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from ..capture.nested import Layout, argument_of, default_layout, flatten
from ..core.errors import shown
from ..engine.torch_memory import in_order, order_of, readable
from ..options import InputDescription, ModelDescription

_MASKED = "input {!r} is a masked array, whose mask would be lost: call filled(), and pass the mask as another input"


class InputTypeError(TypeError):
    """An input is not a tensor, or has the wrong dtype; no change of the description would help."""


class Batch(dict[str, torch.Tensor]):
    """Tensors by input name.

    Attributes:
        layouts: Each argument that is not a single tensor, with its layout; graphs depend on them.
        orders: Each input whose dimensions had another order in memory, with that order. PyTorch draws random numbers
            like such an input in that order.
        on_host: The tensors on the CPU that were moved to another device, by name.
    """

    layouts: tuple[tuple[str, Layout], ...] = ()
    orders: tuple[tuple[str, tuple[int, ...]], ...] = ()
    on_host: Mapping[str, torch.Tensor] = MappingProxyType({})

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Batch:
        """Returns a batch with these tensors, and the same layouts and orders."""
        batch = Batch(tensors)
        batch.layouts, batch.orders = self.layouts, self.orders
        return batch

    def move(self, device: torch.device) -> None:
        """Moves tensors on the CPU to another device, without waiting for it if their memory is pinned."""
        self.on_host = {name: value for name, value in self.items() if value.device.type == "cpu"}
        self.update({name: value.to(device, non_blocking=True) for name, value in self.on_host.items()})

    def as_given(self) -> Batch:
        """Returns a batch of ordinary tensors, in the memory order in which the caller passed them."""
        ordinary = {name: value.clone() if value.is_inference() else value for name, value in self.items()}
        return self.with_tensors({**ordinary, **{name: in_order(ordinary[name], order) for name, order in self.orders}})

    def array(self, name: str) -> np.ndarray[Any, Any]:
        """Returns the values of an input."""
        return self.on_host.get(name, self[name]).cpu().numpy()

    def extremes(self, name: str, ignored: int | None) -> tuple[int, int]:
        """Returns the lowest and highest value, computed where the caller's tensor is; ignored values count as 0."""
        values = self.on_host.get(name, self[name])
        if not values.numel():
            return 0, 0
        lowest, highest = torch.aminmax(values)
        bounds = int(lowest.item()), int(highest.item())
        if ignored is not None and ignored in bounds:
            lowest, highest = torch.aminmax(values.masked_fill(values == ignored, 0))
            bounds = int(lowest.item()), int(highest.item())
        return bounds


def read_batch(
    names: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    optional: Sequence[str] = (),
    arguments: Sequence[str] = (),
    constants: Collection[str] = (),
    keeps_orders: bool = False,
) -> Batch:
    """Assigns the arguments of ``train_step`` or ``eval_step`` to the described inputs.

    Args:
        names: The inputs, in the order of the description. Each part of a tuple or dict argument is named by the
            argument, a dot, and its key or index.
        args: Positional arguments in that order; or one dict, list or tuple that holds the batch.
        kwargs: Keyword arguments, for the inputs not given by position.
        optional: Inputs that may be left out.
        arguments: The arguments in order; derived from ``names`` if empty.
        constants: Names of further arguments, which may be None, bools, numbers or strings.
        keeps_orders: Whether graphs depend on the orders of dimensions in memory.

    Returns:
        Name -> contiguous, detached tensor, in the order of the description.

    Raises:
        TypeError: If an argument is missing, unknown, given twice, or not a tensor.
    """
    if len(args) == 1 and not kwargs:
        args, kwargs = unpack(args, kwargs)
    arguments = arguments or tuple(dict.fromkeys(map(argument_of, names)))
    if len(args) > len(arguments):
        raise TypeError(
            f"{len(args)} inputs were given, but the model description has {len(arguments)}: {list(arguments)}"
        )
    inputs = dict(zip(arguments, args, strict=False))
    if kwargs:
        unknown = [name for name in kwargs if name not in names and name not in arguments and name not in constants]
        if unknown:
            raise TypeError(f"unknown inputs {unknown}: the model description has {list(names)}")
        twice = [name for name in kwargs if name in inputs]
        if twice:
            raise TypeError(f"inputs {twice} were given both by position and by name")
        inputs.update(kwargs)
    layouts: dict[str, Layout] = {}
    for value in inputs.values():
        if not isinstance(value, (torch.Tensor, np.ndarray)):
            inputs, layouts = _taken_apart(inputs, names)
            break
    if not all(map(names.__contains__, inputs)):
        strange = [name for name in inputs if name not in names]
        raise TypeError(
            f"inputs {strange} are tensors, but the model description has no such tensors: it has {list(names)}"
        )
    if len(inputs) < len(names):
        missing = [name for name in names if name not in inputs and name not in optional]
        if missing:
            hint = "; trainer.predict() needs no label" if missing == list(names[-1:]) else ""
            raise TypeError(f"inputs {missing} are missing: the model description has {list(names)}{hint}")
    batch = Batch()
    for name in names:
        if name in inputs:
            value = inputs[name]
            if type(value) is torch.Tensor and value.layout is torch.strided:
                value = readable(name, value).detach()
            else:
                value = _as_tensor(name, value)
            if not value.is_contiguous():
                if keeps_orders and 0 not in value.stride():
                    batch.orders += ((name, order_of(value)),)
                value = value.contiguous()
            batch[name] = value
    if arguments != names:
        for name in batch:
            argument = argument_of(name)
            if argument != name and argument not in layouts:  # the caller gave its parts by their own names
                layouts[argument] = default_layout(argument, batch)
    if layouts:
        batch.layouts = tuple(sorted(layouts.items()))
    return batch


def _taken_apart(arguments: Mapping[str, Any], names: Sequence[str]) -> tuple[dict[str, Any], dict[str, Layout]]:
    """Returns the leaves of all arguments by input name, and the layout of each argument that is not one tensor."""
    leaves: dict[str, Any] = {}
    layouts = {argument: flatten(argument, value, leaves) for argument, value in arguments.items()}
    layouts = {argument: layout for argument, layout in layouts.items() if layout != ("tensor", argument)}
    for argument, layout in layouts.items():
        expected = [name for name in names if argument_of(name) == argument]
        part_names = [name for name in leaves if argument_of(name) == argument]
        if sorted(part_names) != sorted(expected):
            if expected == [argument]:
                raise _no_tensor(argument, arguments[argument])
            what = shown(arguments[argument]) if layout[0] == "value" else f"a nested value with the parts {part_names}"
            raise TypeError(
                f"input {argument!r} is {what}, but the model description has "
                + (f"{expected} for it" if expected else "no tensors for it")
            )
    return leaves, layouts


def unpack(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Returns positional and keyword arguments; unpacks a single dict, list or tuple that holds the whole batch."""
    if len(args) == 1 and not kwargs:
        (whole,) = args
        if isinstance(whole, Mapping):
            return [], whole
        if isinstance(whole, (list, tuple)):
            return whole, kwargs
    return args, kwargs


def to_tensor(name: str, value: Any) -> torch.Tensor:
    """Returns an input as a contiguous, detached tensor.

    Raises:
        TypeError: If it is neither a dense tensor nor a numpy array, or has no memory of its own.
    """
    return _as_tensor(name, value).contiguous()


def _as_tensor(name: str, value: Any) -> torch.Tensor:
    """Returns an input as a detached tensor, in the memory order that it has."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(_MASKED.format(name))
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        array = array.astype(array.dtype.newbyteorder("="), copy=not array.flags.writeable)
        # PyTorch supports neither negative strides nor those of parts of records.
        if any(stride < 0 or stride % max(array.itemsize, 1) for stride in array.strides):
            array = np.ascontiguousarray(array)
        value = torch.from_numpy(array)
    if not isinstance(value, torch.Tensor):
        raise _no_tensor(name, value)
    return readable(name, value).detach()


def _no_tensor(name: str, value: Any) -> InputTypeError:
    """Returns the error for an input that is neither a tensor nor an array."""
    what = shown(value)
    if isinstance(value, (list, tuple)):  # to show the list would hide the advice
        function = "stack" if any(isinstance(entry, torch.Tensor) for entry in value) else "tensor"
        what = f"make a tensor of it, torch.{function}(...)"
    kind = type(value).__name__
    return InputTypeError(f"input {name!r} must be a torch.Tensor or a numpy array, but a {kind} was given: {what}")


def check_batch(
    description: ModelDescription,
    batch: Batch,
    device: torch.device,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Checks a batch against the description.

    Args:
        description: The model description.
        batch: The inputs by name.
        device: Where the tensors must be.
        dtypes: The dtypes that the exported graph takes; None before the first export.

    Raises:
        TypeError: If a tensor has the wrong dtype.
        ValueError: If a tensor has the wrong shape, or is on another device; or if two inputs give one
            symbolic dimension different sizes.
    """
    sizes: dict[str, tuple[int, str]] = {}
    for entry in description.inputs:
        if entry.name in batch:
            _check(entry, batch[entry.name], device, (dtypes or {}).get(entry.name), sizes)


def _check(
    entry: InputDescription,
    value: torch.Tensor,
    device: torch.device,
    dtype: torch.dtype | None,
    sizes: dict[str, tuple[int, str]],
) -> None:
    """Checks one input; ``sizes`` maps a symbolic dimension to its size and the input that had it first."""
    shape = list(value.shape)
    described = list(entry.shape)
    if len(shape) != len(described):
        raise ValueError(
            f"input {entry.name!r} has {len(shape)} dimensions, shape {shape}, but the model description says "
            f"{len(described)}: {described}"
        )
    for axis, (size, expected) in enumerate(zip(shape, described, strict=True)):
        if isinstance(expected, int):
            if size != expected:
                raise ValueError(
                    f"input {entry.name!r} has size {size} in dimension {axis}, but the model description says "
                    f"{expected}: {described}. If the size may change, give the dimension a name there"
                )
            continue
        first_size, first_name = sizes.setdefault(expected, (size, entry.name))
        if first_size != size:
            raise ValueError(
                f"Mismatch in dynamic shape {expected}: it is {first_size} in input {first_name!r} and {size} in input "
                f"{entry.name!r}, whose shape is {shape}"
            )
    if dtype is not None and value.dtype != dtype:
        raise InputTypeError(
            f"input {entry.name!r} has dtype {value.dtype}, but training began with {dtype}: use .to({dtype})"
        )
    if value.device != device:
        raise ValueError(
            f"input {entry.name!r} is on {value.device}, but training runs on {device}: move it with .to('{device}')"
        )
