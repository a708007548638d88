"""Symbolic sizes in terms of the model description's names, and the conditions under which a graph is valid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ort_trainer.core.dims import evaluate, holds
from ort_trainer.fx.symbols import SymbolTable, hint

from ..export.captures import captured


class Scaled(nn.Module):
    """Multiplies a function of one input by a parameter."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.function(x) * self.scale).sum()


def symbols_of(function: Callable[[torch.Tensor], torch.Tensor]) -> SymbolTable:
    return captured(Scaled(function), {"x": ["batch", 4]}, torch.randn(5, 4)).symbols


def test_sizes_are_expressions_over_the_described_dimensions() -> None:
    model = Scaled(lambda x: torch.cat([x, x[:, :2]], 1).flatten())
    found = captured(model, {"x": ["batch", "length"]}, torch.randn(3, 5))
    (flat,) = (n for n in found.module.graph.nodes if n.name.startswith("view") or n.name.startswith("reshape"))
    (size,) = found.symbols.shape(flat.meta["val"])
    for batch, length in ((3, 5), (2, 9)):
        assert evaluate(size, {"batch": batch, "length": length}) == batch * (length + 2)
    assert hint(flat.meta["val"].shape[0]) == 3 * 7 and hint(4) == 4
    assert found.symbols.expression(4) == 4 and not found.symbols.fixed


@pytest.mark.parametrize(
    ("function", "right", "wrong"),
    [
        (lambda x: x * 2 if x.shape[0] > 4 else x, (5, 9), (4, 2)),
        (lambda x: x * 2 if x.shape[0] > 1 else x, (2, 9), (1,)),
        (lambda x: x * 2 if x.shape[0] % 2 else x, (3, 7), (2, 8)),
    ],
)
def test_a_branch_is_a_condition(
    function: Callable[[torch.Tensor], torch.Tensor], right: Sequence[int], wrong: Sequence[int]
) -> None:
    conditions, frozen = symbols_of(function).guards()
    assert not frozen
    for sizes, expected in ((right, True), (wrong, False)):
        for size in sizes:
            assert all(holds(condition, {"batch": size}) for condition in conditions) is expected, (size, conditions)


def test_a_model_that_fixes_a_size() -> None:
    symbols = symbols_of(lambda x: x + torch.ones(5, 4))
    assert symbols.fixed == {"batch": 5}
    assert "in <lambda>: symbols = symbols_of(" in symbols.reason("batch") and symbols.reason("length") == ""


def test_a_size_that_depends_on_values_has_no_expression() -> None:
    found = captured(Scaled(lambda x: x), {"x": ["batch", 4]}, torch.randn(5, 4))
    unbacked = next(iter(found.batch)).meta["val"].fake_mode.shape_env.create_unbacked_symint()
    assert found.symbols.expression(unbacked) is None


@pytest.mark.parametrize(
    ("place", "least", "kept"), [("_compute_stride", 1, False), ("_compute_stride", 2, True), ("forward", 1, True)]
)
def test_a_condition_that_finds_strides_is_none_if_only_one_element_violates_it(
    place: str, least: int, kept: bool
) -> None:
    """Inductor asks whether a flat tensor has more elements than one row; a view of one element has any strides."""
    symbols = symbols_of(lambda x: x * 2)
    (symbol,) = symbols._names
    symbols._shape_env.guards.append(SimpleNamespace(expr=4 * symbol > 4 * least, sloc=f"(file.py:1 in {place})"))
    conditions, _ = symbols.guards()
    assert any(not holds(condition, {"batch": 1}) for condition in conditions) is kept
