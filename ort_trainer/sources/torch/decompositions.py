"""Which operators are decomposed after differentiation: a lever on the size, speed and rightness of the graph."""

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

    It is PyTorch's core table, to which every operator is added that torch.onnx does not know. (torch.onnx itself
    decomposes only the latter. That keeps composite operators, of which it translates some wrongly: an
    ``_unsafe_index_put`` that accumulates, for one.) What the table of operators says goes before both.
    """
    return _decomposition_table(revision())


@functools.lru_cache(maxsize=1)
def _decomposition_table(revision: int) -> dict[Operator, Callable[..., Any]]:
    from .translate import has_translation  # a second; whoever only captures a model does without

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
