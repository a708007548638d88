"""The rewrite of Einsum."""

from __future__ import annotations

import onnx_ir as ir

from ....step.emitter import Emitter
from ..nodes import attributes_of, refuse

__all__ = ["RULES"]


def _einsum(node: ir.Node, e: Emitter) -> ir.Value:
    """Rewrites one operand to a transposed sum, and two to a batched matrix product or a sum of products."""
    equation = attributes_of(node)["equation"].replace(" ", "")
    left, arrow, out = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        letters = left.replace(",", "")
        out = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    if "." in equation or len(terms) > 2 or any(len(set(term)) < len(term) for term in (*terms, out)):
        raise refuse(node, f"{equation!r} has an ellipsis, a repeated index or more than two operands: split it up")
    operands = []
    for index, (value, term) in enumerate(zip(node.inputs, terms, strict=True)):
        assert value is not None
        kept = {*out, *"".join(terms[:index] + terms[index + 1 :])}
        lone = [axis for axis, letter in enumerate(term) if letter not in kept]
        operands.append((e.reduce_sum(value, lone, False) if lone else value, "".join(c for c in term if c in kept)))
    if len(operands) == 1:
        value, term = operands[0]
        return _transposed(e, value, term, out)
    (a, term_a), (b, term_b) = operands
    batch = [c for c in out if c in term_a and c in term_b]
    summed = [c for c in term_a if c in term_b and c not in out]
    only_a, only_b = ([c for c in term if c not in other] for term, other in ((term_a, term_b), (term_b, term_a)))
    if len(summed) == 1 and len(only_a) <= 1 and len(only_b) <= 1:
        rows, columns = (only_a or ["<"]), (only_b or [">"])
        product = e(
            "MatMul",
            _aligned(e, a, term_a, [*batch, *rows, *summed]),
            _aligned(e, b, term_b, [*batch, *summed, *columns]),
        )
        found = [*batch, *rows, *columns]
        absent = [axis for axis, c in enumerate(found) if c in "<>"]
        if absent:
            product = e("Squeeze", product, e.constant(absent))
        return _transposed(e, product, "".join(c for c in found if c not in "<>"), out)
    order = [*batch, *only_a, *only_b, *summed]
    product = e("Mul", _aligned(e, a, term_a, order), _aligned(e, b, term_b, order))
    if summed:
        product = e.reduce_sum(product, range(len(order) - len(summed), len(order)), False)
    return _transposed(e, product, "".join(order[: len(order) - len(summed)]), out)


def _transposed(e: Emitter, value: ir.Value, term: str, order: str) -> ir.Value:
    return value if term == order else e("Transpose", value, perm=[term.index(c) for c in order])


def _aligned(e: Emitter, value: ir.Value, term: str, order: list[str]) -> ir.Value:
    """Transposes dimensions into an order, and adds missing ones with size 1."""
    value = _transposed(e, value, term, "".join(c for c in order if c in term))
    absent = [axis for axis, c in enumerate(order) if c not in term]
    return e("Unsqueeze", value, e.constant(absent)) if absent else value


RULES = {"Einsum": _einsum}
