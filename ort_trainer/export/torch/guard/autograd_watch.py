"""Detects custom backward passes during a capture, because an exported program lacks them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._functorch import utils as functorch_utils
from torch.utils.checkpoint import CheckpointFunction

from ....core.errors import ExportError

__all__ = ["watch_autograd"]

_OF_OPERATORS = "GeneratedBackwardFor_"


@contextlib.contextmanager
def watch_autograd() -> Iterator[list[str]]:
    """Yields a list that collects the names of the model's custom backward passes.

    ``Function.apply`` itself may have been bound to another name before, so the first function it calls is watched.
    """
    found: list[str] = []
    unwrap, register_hook = functorch_utils.unwrap_dead_wrappers, torch.Tensor.register_hook

    def watched_apply(args: Any) -> Any:
        function = sys._getframe(1).f_locals.get("cls")
        if function is CheckpointFunction:
            raise ExportError(
                "torch.utils.checkpoint with use_reentrant=True calls backward() while it runs, which can't be "
                "captured: pass use_reentrant=False"
            )
        name = getattr(function, "__name__", "a custom function")
        # An operator of torch.library stays whole in an exported program, and keeps its backward pass.
        if not getattr(function, "made_of_operators", False) and not name.startswith(_OF_OPERATORS):
            found.append(name)
        return unwrap(args)  # type: ignore[no-untyped-call]

    def watched_hook(tensor: torch.Tensor, hook: Any) -> Any:
        found.append("register_hook")
        return register_hook(tensor, hook)  # type: ignore[no-untyped-call]

    with (
        mock.patch.object(functorch_utils, "unwrap_dead_wrappers", watched_apply),
        mock.patch.object(torch.Tensor, "register_hook", watched_hook),
    ):
        yield found
