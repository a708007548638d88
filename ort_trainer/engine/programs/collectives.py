"""Collective operations of ``torch.distributed`` as steps of a program: each waits for its result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

COLLECTIVES = "_c10d_functional"
"""The library of PyTorch's functional collectives; a build of PyTorch without ``torch.distributed`` lacks it."""
WAIT = "_c10d_functional.wait_tensor.default"
"""The operator that waits for a result. It returns the same memory, though its signature does not say so."""


def waiting(operator: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that starts a collective operation and waits for its result, or its list of results."""
    wait = torch.ops._c10d_functional.wait_tensor.default

    def call(*args: Any, **kwargs: Any) -> Any:
        result = operator(*args, **kwargs)
        return wait(result) if isinstance(result, torch.Tensor) else [wait(value) for value in result]

    return call
