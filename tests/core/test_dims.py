from __future__ import annotations

import re
import time

import pytest

from ort_trainer.core.dims import evaluate, evaluate_number, holds, symbols_of

from ..portable.expressions import DIVISIONS_BY_ZERO, REFUSED, SIZES, VALUES


@pytest.mark.parametrize(("expression", "value"), VALUES.items(), ids=[text[:40] for text in VALUES])
def test_arithmetic(expression: str, value: int) -> None:
    assert evaluate(expression, SIZES) == value and evaluate(7, SIZES) == 7
    assert holds(expression, SIZES) == bool(value)


@pytest.mark.parametrize("expression", REFUSED, ids=[text[:40] for text in REFUSED])
def test_what_is_refused_is_named_at_once(expression: str) -> None:
    start = time.process_time()
    for function in (evaluate, holds):
        text = f"{re.escape(repr(expression[:20])[:-1])}.* (is not arithmetic over dimensions|has no value for .*):"
        with pytest.raises(ValueError, match=text.replace('"', ".").replace("'", ".")):
            function(expression, SIZES)
    assert time.process_time() - start < 1


@pytest.mark.parametrize("expression", DIVISIONS_BY_ZERO)
def test_divisions_by_zero(expression: str) -> None:
    assert not holds(expression, SIZES)
    for function in (evaluate, evaluate_number):
        with pytest.raises(ValueError, match="has no value for .*: it divides by zero"):
            function(expression, SIZES)


def test_a_size_from_a_file_that_is_no_size() -> None:
    with pytest.raises(ValueError, match="has more than 64 bits"):
        evaluate("dim('batch') > 0", {"batch": 1 << 70})


def test_symbols() -> None:
    assert symbols_of("max(dim('a'), dim('b c')) + 1") == {"a", "b c"}
    assert symbols_of(3) == set()
    with pytest.raises(KeyError):
        evaluate("dim('other')", SIZES)
