"""Which decisions of a failing case are needed? The others are left out, one at a time.

Hypothesis would shrink the choices of a drawing. Here a case is a list of decisions that can each be left out, and a
failure may end the process, so a loop of a few lines does more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from .recipe import Recipe

__all__ = ["shrink"]


def shrink(recipe: Recipe, fails: Callable[[Recipe], bool], attempts: int = 50) -> Recipe:
    """Returns the smallest case found that still fails.

    Args:
        recipe: A case that fails.
        fails: Whether a case fails in the same way.
        attempts: How many cases to try at most.
    """
    tried = {recipe}
    smaller = True
    while smaller:
        smaller = False
        for edit in _edits(recipe):
            candidate = edit(recipe)
            if candidate in tried or len(tried) > attempts:
                continue
            tried.add(candidate)
            if fails(candidate):
                recipe, smaller = candidate, True
    return recipe


def _edits(recipe: Recipe) -> list[Callable[[Recipe], Recipe]]:
    """Returns what leaves out one thing each, starting with what most likely is not needed."""
    edits: list[Callable[[Recipe], Recipe]] = []
    for name in ("layers", "settings", "changes", "options"):
        if len(getattr(recipe, name)) > 1:
            edits.append(_with(**{name: ()}))
    for name in ("settings", "changes", "options", "layers"):
        edits += [_without(name, item) for item in reversed(getattr(recipe, name))]
    edits += [_without_last, _without_first] * (len(recipe.sizes) - 1)
    simple = {"tied": False, "dtype": "float32", "optimizer": "sgd", "loss": "mse", "data": "vectors"}
    edits += [_with(**{name: value}) for name, value in simple.items()]
    edits += [_of_one_size(size) for size in ((2, 3), *sorted(set(recipe.sizes)))]
    return edits


def _with(**values: Any) -> Callable[[Recipe], Recipe]:
    return lambda recipe: dataclasses.replace(recipe, **values)


def _without(name: str, item: Any) -> Callable[[Recipe], Recipe]:
    return lambda recipe: dataclasses.replace(
        recipe, **{name: tuple(other for other in getattr(recipe, name) if other != item)}
    )


def _without_last(recipe: Recipe) -> Recipe:
    return dataclasses.replace(recipe, sizes=recipe.sizes[:-1] or recipe.sizes)


def _without_first(recipe: Recipe) -> Recipe:
    earlier = tuple((max(step - 1, 0), what) for step, what in recipe.changes)
    return dataclasses.replace(recipe, sizes=recipe.sizes[1:], changes=earlier) if recipe.sizes[1:] else recipe


def _of_one_size(size: tuple[int, int]) -> Callable[[Recipe], Recipe]:
    def edit(recipe: Recipe) -> Recipe:
        simple = len(set(recipe.sizes)) == 1 and size != (2, 3)
        return recipe if simple else dataclasses.replace(recipe, sizes=(size,) * len(recipe.sizes))

    return edit
