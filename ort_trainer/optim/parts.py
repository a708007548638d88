"""What of each parameter a process updates: all of it, unless several processes share the optimizer's state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

__all__ = ["Named", "Parts", "global_norm"]

Named = Mapping[str, torch.Tensor]


def global_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns the Euclidean norm of all gradients taken together, a scalar; not finite if any element is not.

    ``torch.nn.utils.get_total_norm`` rounds the norm of all halves to a half.
    """
    norms = torch._foreach_norm(list(gradients))
    total: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.float() for norm in norms]))
    return total


class Parts:
    """Everything of every parameter.

    Attributes:
        are_shared: Whether other processes have the rest of the tensors, so that norms take a message.
    """

    are_shared = False

    def of(self, tensors: Named) -> dict[str, torch.Tensor]:
        """Returns views of the parts of parameters, or of their gradients; some may have no elements."""
        return dict(tensors)

    def total_norm(self, gradients: Iterable[torch.Tensor]) -> torch.Tensor:
        """Returns the Euclidean norm of whole gradients of which each process has its parts, a scalar."""
        return global_norm(gradients)

    def norms(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the norm of each whole tensor of which each process has its part, scalars."""
        return list(torch._foreach_norm(list(tensors)))
