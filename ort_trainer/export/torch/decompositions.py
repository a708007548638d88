"""Chooses the operators to decompose after differentiation: it affects size, speed and correctness of the graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._decomp import core_aten_decompositions
from torch._decomp import decomposition_table as all_decompositions

from .operators.registry import Operator, decompositions, revision

__all__ = ["decomposition_table"]


def decomposition_table() -> dict[Operator, Callable[..., Any]]:
    """Returns operator -> decomposition.

    The table is PyTorch's core table plus all operators that torch.onnx does not know. (torch.onnx itself decomposes
    only the latter. It keeps composite operators and translates some of them incorrectly, for example an
    ``_unsafe_index_put`` that accumulates.) Entries of the package's own operator table take precedence.
    """
    return _decomposition_table(revision())


@functools.lru_cache(maxsize=1)
def _decomposition_table(revision: int) -> dict[Operator, Callable[..., Any]]:
    from .translate import has_translation  # takes a second; capturing alone does not need it

    table: dict[Operator, Callable[..., Any]] = dict(core_aten_decompositions())
    for operator, decomposition in all_decompositions.items():
        if operator not in table and hasattr(operator, "_schema") and not has_translation(operator):
            table[operator] = decomposition
    for operator, own in decompositions().items():
        if own is not None:
            table[operator] = own
        else:
            table.pop(operator, None)
    return table
