"""Programs that read and leave values outside tensors train as in PyTorch: what was wrong once, and cases by lot."""

from __future__ import annotations

import hashlib
import time

import pytest

from ..harness import choose
from .compare import BAD
from .living import Case, compare, draw

# Processor seconds after which no case begins.
_SECONDS = 10.0
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


def test_cases_of_this_commit(request: pytest.FixtureRequest) -> None:
    commit = request.config.getoption("seed") or choose.commit()
    seed = int.from_bytes(hashlib.sha256(commit.encode()).digest()[:4], "big") * 100
    end = time.process_time() + _SECONDS
    for number in range(seed, seed + 20):
        outcome = compare(draw(number))
        assert outcome.kind not in BAD, f"python -m tests.fuzz.living --case {number} repeats it\n{outcome}"
        if time.process_time() > end:
            break
