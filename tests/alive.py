"""The memory of operators' results."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Alive(TorchDispatchMode):
    """Records the most bytes that are in memory at once, of what operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._readers: Counter[int] = Counter()
        self._bytes: dict[int, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        for value in found if isinstance(found, (tuple, list)) else [found]:
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                place = storage.data_ptr()
                self._readers[place] += 1
                self._bytes[place] = storage.nbytes()
                weakref.finalize(value, self._release, place)
        self.peak = max(self.peak, sum(self._bytes.values()))
        return found

    def _release(self, place: int) -> None:
        self._readers[place] -= 1
        if not self._readers[place]:
            del self._bytes[place]
