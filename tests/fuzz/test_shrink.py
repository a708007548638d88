"""Does a failing case become small?"""

from __future__ import annotations

from . import program
from .recipe import Recipe, draw
from .shrink import shrink


def test_what_is_not_needed_is_left_out() -> None:
    recipe = Recipe(
        seed=3,
        data="tokens",
        layers=tuple(enumerate_layers("linear", "gru", "cumsum", "dropout", "mean over time", "layer norm")),
        loss="cross entropy",
        optimizer="adamw",
        options=(("accumulation", 2), ("clip", 0.5)),
        settings=(("read", "global", 1), ("left", "counter", 2)),
        changes=((1, ("draw",)), (2, ("freeze the head",))),
        sizes=((2, 3), (3, 4), (2, 3), (3, 4)),
        dtype="float64",
        tied=True,
    )

    def fails(candidate: Recipe) -> bool:
        text = program.source(candidate)
        return "cumsum" in text and "max_grad_norm" in text and len(candidate.sizes) > 1

    small = shrink(recipe, fails)
    assert [kind for _, kind, _ in small.layers] == ["cumsum"] and dict(small.options) == {"clip": 0.5}
    assert (small.settings, small.changes, small.tied, small.dtype) == ((), (), False, "float32")
    assert (small.data, small.loss, small.optimizer, small.sizes) == ("vectors", "mse", "sgd", ((2, 3), (2, 3)))


def test_what_fails_no_more_is_kept() -> None:
    recipe = draw(5)
    assert shrink(recipe, lambda candidate: False) == recipe


def test_attempts_are_limited() -> None:
    tried = []
    shrink(draw(5), lambda candidate: bool(tried.append(candidate)), attempts=3)
    assert len(tried) == 3


def enumerate_layers(*kinds: str) -> list[tuple[int, str, int]]:
    return [(number, kind, 0) for number, kind in enumerate(kinds)]
