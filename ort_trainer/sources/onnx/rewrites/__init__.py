"""Rewrites of operators that the gradient builder can't take into ones that it can, a file for each family."""

from ..rewrite import Rule
from . import activation, arithmetic, convolution, einsum, indexing, normalization, recurrent, reduction, resize

__all__ = ["RULES"]

_FAMILIES = (activation, arithmetic, convolution, einsum, indexing, normalization, recurrent, reduction, resize)
RULES: dict[str, Rule] = {operator: rule for family in _FAMILIES for operator, rule in family.RULES.items()}
"""Operator -> what replaces it, where the gradient passes it."""
