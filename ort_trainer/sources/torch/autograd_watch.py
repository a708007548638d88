"""Notices custom backward passes in a model that is captured: an exported program does not have them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch._functorch import utils as functorch_utils
from torch.utils.checkpoint import CheckpointFunction

from ...errors import ExportError

__all__ = ["watch_autograd"]


@contextlib.contextmanager
def watch_autograd() -> Iterator[list[str]]:
    """Gives a list that tells, when the block ends, which custom backward passes the model has.

    ``Function.apply`` itself may be bound to a name long before, so what it calls first is watched.
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
        if not getattr(function, "made_of_operators", False):
            found.append(getattr(function, "__name__", "a custom function"))
        return unwrap(args)  # type: ignore[no-untyped-call]

    def watched_hook(tensor: torch.Tensor, hook: Any) -> Any:
        found.append("register_hook")
        return register_hook(tensor, hook)  # type: ignore[no-untyped-call]

    with (
        mock.patch.object(functorch_utils, "unwrap_dead_wrappers", watched_apply),
        mock.patch.object(torch.Tensor, "register_hook", watched_hook),
    ):
        yield found
