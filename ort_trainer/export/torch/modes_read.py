"""Records the modules whose mode a forward pass reads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

__all__ = ["modes_read"]


@contextlib.contextmanager
def modes_read() -> Iterator[dict[int, nn.Module]]:
    """Yields the modules, by their ``id``, whose attribute ``training`` is read inside the context."""
    found: dict[int, nn.Module] = {}

    def read(module: nn.Module) -> bool:
        try:
            mode: bool = vars(module)["training"]
        except KeyError:  # a TorchScript module; its own lookup comes next
            raise AttributeError("training") from None
        found[id(module)] = module
        return mode

    def write(module: nn.Module, mode: bool) -> None:
        vars(module)["training"] = mode

    nn.Module.training = property(read, write)  # type: ignore[assignment]
    try:
        yield found
    finally:
        del nn.Module.training
