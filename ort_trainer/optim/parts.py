"""The part of each parameter that a process updates: all of it, unless processes share the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

Named = Mapping[str, torch.Tensor]


def global_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns the Euclidean norm of all gradients together, a scalar; not finite if any element is not.

    Unlike ``torch.nn.utils.get_total_norm``, it does not round the norm of fp16 gradients to fp16.
    """
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients))).float())
    return total


class Parts:
    """All of every parameter.

    Attributes:
        are_shared: Whether other processes have the rest of the tensors, so that norms need communication.
    """

    are_shared = False

    def of(self, tensors: Named) -> dict[str, torch.Tensor]:
        """Returns views of the parts of parameters, or of their gradients; some may have no elements."""
        return dict(tensors)

    def total_norm(self, gradients: Iterable[torch.Tensor]) -> torch.Tensor:
        """Returns the Euclidean norm of the whole gradients, a scalar, given the parts of this process."""
        return global_norm(gradients)

    def norms(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the norm of each whole tensor, scalars, given the parts of this process."""
        return list(torch._foreach_norm(list(tensors)))
