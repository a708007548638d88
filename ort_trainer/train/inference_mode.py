"""Methods that may be called under ``torch.inference_mode``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

__all__ = ["outside_inference_mode"]

Method = TypeVar("Method", bound=Callable[..., Any])


def outside_inference_mode(method: Method) -> Method:
    """Runs a method outside ``torch.inference_mode``, because later steps could not change inference tensors."""

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_inference_mode_enabled():
            return method(*args, **kwargs)
        with torch.inference_mode(False):
            return method(*args, **kwargs)

    return wrapped  # type: ignore[return-value]
