"""The gradients of an accumulation window: their memory, their sums, and their release after an update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

__all__ = ["Gradients"]


class Gradients:
    """Gradients by parameter name.

    Runs add to them until :meth:`reset`, after which the next run overwrites them. The gradients that an update has
    used can be read until that run.

    Args:
        parameters: All parameters by name.
        device: The device of all tensors.
        memory: Required memory of gradients, by parameter name; other gradients may be anywhere.

    Attributes:
        tensors: The memory of each gradient; only the contents of those from :meth:`present` are valid.
        stays: Whether runs write into memory that was bound earlier, so that the tensors must not move.
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
        """Whether the next run overwrites the gradients."""
        return self._reset or not self._present

    def memory(self, name: str) -> torch.Tensor:
        """Returns the tensor of a gradient; creates it if it does not exist or was released."""
        found = self.tensors.get(name)
        if found is None or found.shape != self._parameters[name].shape:
            found = self.tensors[name] = torch.zeros_like(self._parameters[name])
        return found

    def destinations(self, names: Iterable[str], fresh: bool) -> dict[str, torch.Tensor]:
        """Returns the tensors that a run writes: the gradients, or scratch tensors to add to them."""
        if fresh:
            return {name: self.memory(name) for name in names}
        for name in names:
            if name not in self._scratch:
                self._scratch[name] = torch.empty_like(self.memory(name))
        return {name: self._scratch[name] for name in names}

    def begin(self) -> bool:
        """Releases used gradients, so that the next run can use their memory; returns whether it overwrites them."""
        if not self._reset and self._present:
            return False
        self._used = False
        if not self.stays:
            self.tensors |= dict.fromkeys(
                self.tensors.keys() - self._memory.keys(), torch.empty(0, device=self._device)
            )
        return True

    def take(self, written: Mapping[str, torch.Tensor], fresh: bool) -> None:
        """Replaces the gradients by a run's results, or adds them; they are in :meth:`destinations` or new memory."""
        if fresh and not self._memory:
            self.tensors |= written
            self._present = set(written)
        elif fresh:
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
        """Makes the next run overwrite the gradients."""
        self._reset = True

    def present(self) -> dict[str, torch.Tensor]:
        """Returns the gradients since the last reset; empty right after one."""
        if not self._reset and len(self._present) == len(self.tensors):
            return dict(self.tensors)
        return {} if self._reset else self._found()

    def hold(self, gradients: Mapping[str, torch.Tensor] | None) -> None:
        """Records the gradients that an update uses instead of the present ones; empty invalidates the gradients."""
        if gradients is not None:
            self.tensors |= gradients
            self._present = set(gradients)
        self._reset, self._used = False, True

    def used(self) -> dict[str, torch.Tensor]:
        """Returns the gradients that the last update used, divided and clipped; empty from the next run on."""
        return self._found() if self._reset and self._used else {}

    def restore(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Sets the present gradients; empty for none."""
        for name, value in gradients.items():
            self.memory(name).copy_(value)
        self._present = set(gradients)
        self._reset, self._used = not gradients, False

    def _found(self) -> dict[str, torch.Tensor]:
        """Returns the present gradients, in the same order in all processes."""
        return {name: tensor for name, tensor in self.tensors.items() if name in self._present}
