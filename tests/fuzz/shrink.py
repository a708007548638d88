"""Which decisions of a failing case are needed? The others are left out, one at a time.

Hypothesis would shrink the choices of a drawing. Here a case is a list of decisions that can each be left out, and a
failure may end the process, so a loop of a few lines does more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from .recipe import Recipe

__all__ = ["shrink"]


def shrink(recipe: Recipe, fails: Callable[[Recipe], bool], attempts: int = 50) -> Recipe:
    """Returns the smallest case found that still fails.

    Args:
        recipe: A case that fails.
        fails: Whether a case fails in the same way.
        attempts: How many cases to try at most.
    """
    smaller = True
    while smaller and attempts > 0:
        smaller = False
        for candidate in _smaller(recipe):
            if attempts <= 0:
                break
            attempts -= 1
            if fails(candidate):
                recipe, smaller = candidate, True
                break
    return recipe


def _smaller(recipe: Recipe) -> Iterator[Recipe]:
    """Yields the case without one thing, starting with what most likely is not needed."""
    for name in ("layers", "settings", "changes", "options"):
        if len(getattr(recipe, name)) > 1:
            yield dataclasses.replace(recipe, **{name: ()})
    for name in ("settings", "changes", "options", "layers"):
        values = getattr(recipe, name)
        for number in reversed(range(len(values))):
            yield dataclasses.replace(recipe, **{name: (*values[:number], *values[number + 1 :])})
    if len(recipe.sizes) > 1:
        yield dataclasses.replace(recipe, sizes=recipe.sizes[:-1])
        yield dataclasses.replace(
            recipe,
            sizes=recipe.sizes[1:],
            changes=tuple((max(step - 1, 0), what) for step, what in recipe.changes),
        )
    for name, simple in (
        ("tied", False),
        ("dtype", "float32"),
        ("optimizer", "sgd"),
        ("loss", "mse"),
        ("data", "vectors"),
        ("data", "sequences"),
    ):
        if getattr(recipe, name) != simple and not (name == "data" and recipe.data == "vectors"):
            yield dataclasses.replace(recipe, **{name: simple})
    if len(set(recipe.sizes)) > 1:
        for size in sorted(set(recipe.sizes)):
            yield dataclasses.replace(recipe, sizes=(size,) * len(recipe.sizes))
    elif recipe.sizes[0] != (2, 3):
        yield dataclasses.replace(recipe, sizes=((2, 3),) * len(recipe.sizes))
