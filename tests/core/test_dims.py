from __future__ import annotations

import pytest

from ort_trainer.core.dims import evaluate, symbols_of

SIZES = {"batch": 6, "seq len": 5}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (7, 7),
        ("dim('batch')", 6),
        ("dim('batch')*dim('seq len') - 4", 26),
        ("(dim('batch') + 1)//2", 3),
        ("dim('batch') % 4", 2),
        ("dim('batch')**2", 36),
        ("max(dim('batch'), 10)", 10),
        ("-dim('batch')", -6),
        ("dim('batch') == 6 and dim('seq len') <= 5", 1),
        ("dim('batch') < 6 or not dim('seq len') == 5", 0),
        ("1 if dim('batch') > 5 else 2", 1),
        ("math.floor(dim('seq len') / 2)", 2),
    ],
)
def test_arithmetic(expression: int | str, value: int) -> None:
    assert evaluate(expression, SIZES) == value


@pytest.mark.parametrize(
    "expression", ["__import__('os')", "dim(3)", "batch", "(lambda: 1)()", "'a'", "dim.x", "[1][0]", "open('f')"]
)
def test_nothing_else_is_evaluated(expression: str) -> None:
    with pytest.raises(ValueError, match=r"not arithmetic|must be written as dim"):
        evaluate(expression, SIZES)


def test_symbols() -> None:
    assert symbols_of("max(dim('a'), dim('b c')) + 1") == {"a", "b c"}
    assert symbols_of(3) == set()
    with pytest.raises(KeyError):
        evaluate("dim('other')", SIZES)
