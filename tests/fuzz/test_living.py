"""Programs that read and leave values outside tensors train as in PyTorch: what was wrong once."""

from __future__ import annotations

import pytest

from .living import Case, compare, draw

_CACHED = "R0 = 0.5\n@functools.lru_cache\ndef get0(): return R0"
_FOUND = {
    "a default that a run replaces": Case(
        lines=(("forward", "h = h * get0()"), ("forward", "get0.__defaults__ = (h.detach().mean(),)")),
        before=("def get0(r=1.5): return r",),
        shown=("get0()",),
    ),
    "a property of a metaclass": Case(
        lines=(("forward", "h = h * C0.r"),),
        changes=((2, "C0.kept = 2.5"),),
        before=("class M0(type):\n    r = property(lambda cls: cls.kept)\nclass C0(metaclass=M0):\n    kept = 0.5",),
    ),
    "a dict with weak keys": Case(
        lines=(("forward", "h = h * KNOWN0[self.k0]"),),
        changes=((1, "KNOWN0[net.k0] = 2.5"),),
        init=(("net", "self.k0 = Box(0); KNOWN0[self.k0] = 1.5"),),
        before=("KNOWN0 = weakref.WeakKeyDictionary()",),
    ),
    "a cache that is cleared": Case(
        lines=(("forward", "h = h * get0()"),),
        changes=((1, "R0 = 2.5; get0.cache_clear()"), (3, "R0 = 0.25; get0.cache_clear()")),
        before=(_CACHED,),
        heads=("global R0",),
        shown=("get0()",),
        way="module",
    ),
    "a cache that is not cleared": Case(
        lines=(("forward", "h = h * get0()"),),
        changes=((1, "R0 = 2.5"), (3, "R0 = 0.25")),
        before=(_CACHED,),
        heads=("global R0",),
        shown=("get0()",),
    ),
}


@pytest.mark.parametrize("case", _FOUND.values(), ids=_FOUND)
def test_what_was_wrong_once(case: Case) -> None:
    assert compare(case).kind == "equal"


def test_cases_and_what_they_shrink_to_are_programs() -> None:
    for seed in range(100):
        case = draw(seed)
        for each in (case, *case.smaller()):
            compile(each.source(), f"seed {seed}", "exec")
