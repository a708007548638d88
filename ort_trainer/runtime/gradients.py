"""The gradients of an accumulation window: where a run writes them, what is added up, and what an update has used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

__all__ = ["Gradients"]


class Gradients:
    """Gradients by parameter name.

    They are added up from run to run until :meth:`reset`, after which the next run starts anew. What an update has used
    can be looked at until then.

    Args:
        parameters: All parameters by name.
        device: Where everything is.
        memory: Where gradients are to lie, by parameter name; those that are not in it may lie anywhere.

    Attributes:
        tensors: The memory of each; what is in it counts only for those that :meth:`present` returns.
        stays: Whether a run writes into memory that was bound before, so that the tensors must stay where they are.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        device: torch.device,
        memory: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self._parameters, self._device = parameters, device
        self._memory = {} if memory is None else memory
        self.tensors: dict[str, torch.Tensor] = dict(self._memory)
        self.stays = False
        self._present: set[str] = set()
        self._scratch: dict[str, torch.Tensor] = {}
        self._reset = True
        self._used = False

    @property
    def are_fresh(self) -> bool:
        """Whether the next run starts anew."""
        return self._reset or not self._present

    def memory(self, name: str) -> torch.Tensor:
        """Returns the tensor of a gradient, which is made where there is none, or was given up."""
        found = self.tensors.get(name)
        if found is None or found.shape != self._parameters[name].shape:
            found = self.tensors[name] = torch.zeros_like(self._parameters[name])
        return found

    def destinations(self, names: Iterable[str], fresh: bool) -> dict[str, torch.Tensor]:
        """Returns the tensors that a run writes: the gradients, or what is added to them then."""
        if fresh:
            return {name: self.memory(name) for name in names}
        for name in names:
            if name not in self._scratch:
                self._scratch[name] = torch.empty_like(self.memory(name))
        return {name: self._scratch[name] for name in names}

    def forget(self) -> None:
        """Gives up what an update has used: its memory is better spent on the coming run."""
        self._used = False
        if not self.stays:
            self.tensors |= dict.fromkeys(
                self.tensors.keys() - self._memory.keys(), torch.empty(0, device=self._device)
            )

    def take(self, written: Mapping[str, torch.Tensor], fresh: bool) -> None:
        """Takes what a run has written, into :meth:`destinations` or new memory: starts anew with it, or adds it."""
        if fresh:
            copied = [name for name in written if name in self._memory and written[name] is not self._memory[name]]
            if copied:
                torch._foreach_copy_([self._memory[name] for name in copied], [written[name] for name in copied])
            self.tensors |= {**written, **{name: self._memory[name] for name in copied}} if copied else written
            self._present = set(written)
        else:
            known = [name for name in written if name in self._present]
            if known:
                torch._foreach_add_([self.tensors[name] for name in known], [written[name] for name in known])
            for name in written.keys() - self._present:
                self.memory(name).copy_(written[name])
                self._present.add(name)
        self._reset = False

    def reset(self) -> None:
        """Makes the next run start anew."""
        self._reset = True

    def present(self) -> dict[str, torch.Tensor]:
        """Returns the gradients since the last reset; empty right after one."""
        return {} if self._reset else self._found()

    def use(self) -> dict[str, torch.Tensor]:
        """Returns those that are present, for an update, which changes them in place.

        Raises:
            RuntimeError: If there are none.
        """
        if self._reset:
            raise RuntimeError("there are no gradients to apply: call train_step before optimizer_step")
        self._used = True
        return self.present()

    def hold(self, gradients: Mapping[str, torch.Tensor] | None) -> None:
        """Takes what an update uses instead of what is present; empty if what is here means nothing any more."""
        if gradients is not None:
            self.tensors |= gradients
            self._present = set(gradients)
        self._reset, self._used = False, True

    def used(self) -> dict[str, torch.Tensor]:
        """Returns what the last update has used, divided and clipped, until the next run; then nothing."""
        return self._found() if self._reset and self._used else {}

    def restore(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Sets what is present; empty for none."""
        for name, value in gradients.items():
            self.memory(name).copy_(value)
        self._present = set(gradients)
        self._reset, self._used = not gradients, False

    def _found(self) -> dict[str, torch.Tensor]:
        """Returns those that are present, in an order that is the same in all processes."""
        return {name: tensor for name, tensor in self.tensors.items() if name in self._present}
