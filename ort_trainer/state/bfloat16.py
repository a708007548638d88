"""Tensors and NumPy arrays that share memory; for bfloat16, which NumPy lacks, arrays have the dtype of ml_dtypes."""

from __future__ import annotations

import numpy as np
import torch

from .state import Array


def array_of(tensor: torch.Tensor) -> Array:
    """Returns a tensor as an array; copies it if it is not in the CPU's memory."""
    if tensor.dtype != torch.bfloat16:
        return tensor.numpy(force=True)  # type: ignore[no-any-return]
    import ml_dtypes

    return tensor.view(torch.int16).numpy(force=True).view(ml_dtypes.bfloat16)  # type: ignore[no-any-return]


def tensor_of(array: Array) -> torch.Tensor:
    """Returns an array as a tensor.

    Raises:
        TypeError: If PyTorch does not have its dtype.
    """
    if array.dtype.name != "bfloat16":
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
