"""Lets a trainer work on a module's own tensors: each sees what the other changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from ..capture.borrow import BORROWED
from ..engine.ownership import own_copies, owned_dtype, shared_groups
from ..engine.torch_memory import freed_storages
from .condition import Condition
from .memory import ModelMemory, Named


class _Watch(Protocol):
    may_train: frozenset[str]


@dataclasses.dataclass(frozen=True)
class _SharedTensor:
    """Where a module keeps a tensor.

    Attributes:
        name: The tensor's name.
        tensors: The module's dict of parameters, or of buffers.
        key: The tensor's key in that dict.
        ours: The tensor that the trainer works on.
        address: The address of the module's tensor.
    """

    name: str
    tensors: dict[str, Any]
    key: str
    ours: torch.Tensor
    address: int


class SharedTensors(ModelMemory):
    """The parameters and buffers of a module, which the trainer trains in place.

    Graphs are bound to addresses, so the caller must learn which tensors were given other memory from outside
    (``p.data = value``, ``load_state_dict(assign=True)``, ``buffer = value``).

    Small updates are lost in a bfloat16 tensor, so the trainer keeps a float32 copy of it. After each update, the copy
    is rounded into the module's tensor. If the module's tensor differs from the rounded copy, it was changed from
    outside, and the copy takes its value.

    Args:
        model: The module.
        watch: Knows which parameters may be trained.
    """

    def __init__(self, model: nn.Module, watch: _Watch) -> None:
        self._model, self._watch = model, watch
        self._same: list[_SharedTensor] = []
        self._rounded: list[_SharedTensor] = []
        self._compile()

    def adopt(self, device: torch.device) -> Named:
        """Moves the module's tensors to the device and makes them contiguous; see the base class."""
        with BORROWED:
            parameters = dict(self._model.named_parameters())
            named = self._named()
            apart = {
                name
                for name, tensor in named.items()
                if tensor.device != device
                or not tensor.is_contiguous()
                or tensor.is_neg()
                or tensor.dtype != owned_dtype(tensor.dtype)
            }
            # Tensors that share memory move together.
            apart.update(*(group for group in shared_groups(named, parameters) if apart & set(group)))
            copies = own_copies({name: named[name] for name in named if name in apart}, parameters, device)
            ours = {name: copies[name] if name in copies else tensor.detach() for name, tensor in named.items()}
            for name, copy in copies.items():
                if copy.dtype == named[name].dtype:
                    named[name].data = copy
            names = {id(tensor): name for name, tensor in named.items()}
            places = [
                _SharedTensor(names[id(tensor)], tensors, key, ours[names[id(tensor)]], tensor.data_ptr())
                for module in self._model.modules()
                for tensors in (module._parameters, module._buffers)
                for key, tensor in tensors.items()
                if tensor is not None
            ]
            self._same = [place for place in places if place.tensors[place.key].dtype == place.ours.dtype]
            self._rounded = [place for place in places if place.tensors[place.key].dtype != place.ours.dtype]
            self._compile()
            return ours

    def _compile(self) -> None:
        """Compiles the check that all tensors are where they are now."""
        condition = Condition()
        for place in self._same:
            tensor = place.tensors[place.key]
            name = condition.name(tensor)
            condition.add(f"{condition.name(place.tensors)}[{place.key!r}] is {name}")
            condition.add(f"{name}.data_ptr() == {place.address}")
            condition.add(f"{name}.is_contiguous()")
            condition.add(f"{name}.shape == {condition.name(tensor.shape)}")
        self._holds = condition.function()

    def take_changes(self) -> Named:
        """Adopts changes from outside; fast if there are none. See the base class.

        Raises:
            RuntimeError: If a tensor is missing, or has a device, shape or dtype that graphs can't take.
        """
        with BORROWED:
            changed: dict[str, torch.Tensor] = {}
            try:
                same = self._holds()
            except KeyError:
                same = False
            for index, place in enumerate(() if same else self._same):
                tensor = place.tensors.get(place.key)
                if (
                    tensor is None
                    or tensor.data_ptr() != place.address
                    or not tensor.is_contiguous()
                    or tensor.shape != place.ours.shape
                ):
                    ours = self._checked(place)
                    if ours.device != place.ours.device:
                        self._refuse(place, f"was moved to {ours.device}, but training runs on {place.ours.device}")
                    if not ours.is_contiguous():
                        ours = place.tensors[place.key].data = ours.contiguous()
                    self._same[index] = dataclasses.replace(place, ours=ours, address=ours.data_ptr())
                    changed[place.name] = ours
            if not same:
                self._compile()
            for place in self._rounded:
                tensor = self._checked(place)
                if not torch.equal(place.ours.to(tensor.device, tensor.dtype), tensor):
                    place.ours.copy_(tensor)
            return changed

    def publish(self, names: Collection[str]) -> None:
        """Copies new values to the module's tensors of another dtype; the others are shared."""
        for place in self._rounded:
            if place.name in names:
                place.tensors[place.key].detach().copy_(place.ours)

    def add_gradients(self, gradients: Named) -> None:
        """Adds to ``p.grad``."""
        with BORROWED:
            for name, gradient in gradients.items():
                parameter = self._model.get_parameter(name)
                if parameter.grad is None:
                    parameter.grad = gradient.to(parameter.device, parameter.dtype)
                else:
                    parameter.grad.add_(gradient)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Returns ``p.grad`` of the parameters that have one, in the trainer's dtypes.

        PyTorch's optimizers, too, use a gradient that is there although its parameter has been frozen since.
        """
        with BORROWED:
            return {
                name: parameter.grad.detach().to(owned_dtype(parameter.grad.dtype)).contiguous()
                for name, parameter in self._model.named_parameters()
                if name in self._watch.may_train and parameter.grad is not None
            }

    def drop_gradients(self) -> None:
        """Removes ``p.grad``, as ``model.zero_grad()`` does."""
        with BORROWED:
            for name in self._watch.may_train:
                self._model.get_parameter(name).grad = None

    def _named(self) -> dict[str, torch.Tensor]:
        return {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}

    def _checked(self, place: _SharedTensor) -> torch.Tensor:
        """Returns the module's current tensor at a place, if the trainer can continue with it."""
        tensor, ours = place.tensors.get(place.key), place.ours
        if not isinstance(tensor, torch.Tensor):
            self._refuse(place, "was removed")
        if tensor.is_meta:
            self._refuse(place, "is on the meta device, so it has lost its value")
        if freed_storages("", [(place.name, tensor)]):
            self._refuse(place, "has lost its value, because its storage was freed (untyped_storage().resize_(0))")
        if tensor.shape != ours.shape or owned_dtype(tensor.dtype) != ours.dtype:
            self._refuse(place, f"now has shape {list(tensor.shape)} and dtype {tensor.dtype}")
        return tensor.detach()

    def _refuse(self, place: _SharedTensor, change: str) -> NoReturn:
        raise RuntimeError(
            f"{place.name!r} of {type(self._model).__name__} {change}. The trainer trains the model's own tensors: "
            "undo the change, or make the trainer with the option utils.share_weights=False, which trains copies and "
            "does not touch the model"
        )
