"""Rewrites operators that the gradient builder can't differentiate into ones that it can, one file per family."""

from ..rewrite import Rule
from . import activation, arithmetic, convolution, einsum, indexing, normalization, recurrent, reduction, resize

__all__ = ["RULES"]

_FAMILIES = (activation, arithmetic, convolution, einsum, indexing, normalization, recurrent, reduction, resize)
RULES: dict[str, Rule] = {operator: rule for family in _FAMILIES for operator, rule in family.RULES.items()}
"""Operator -> its rewrite, applied where gradient flows."""
