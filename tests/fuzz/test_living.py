"""Programs that read and leave values outside tensors train as in PyTorch: what was wrong once, and drawn ones."""

from __future__ import annotations

import pytest

from ort_trainer.outside.recorder import Recorder

from .compare import BAD
from .living import Case, compare, draw
from .lot import drawn

_CACHED = "R0 = 0.5\n@functools.lru_cache\ndef get0(): return R0"
_FOUND = {
    "an attribute of a member of an enum": Case(
        lines=(("forward", "h = h * E0.A.r; E0.A.r += 1"),),
        changes=((2, "E0.A.r = 2.5"),),
        before=("class E0(enum.Enum): A = 1\nE0.A.r = 0.5",),
        shown=("E0.A.r",),
    ),
    **{
        f"a mode that a run changes, {way}": Case(
            lines=(("forward", "self.d0.training = not self.d0.training; h = h * (2.5 if self.d0.training else 0.5)"),),
            changes=((2, "net.d0.eval()"),),
            init=(("net", "self.d0 = nn.Dropout(0.0)"),),
            shown=("net.d0.training",),
            way=way,
        )
        for way in ("trainer", "module")
    },
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
    "an object that is changed and then replaced": Case(
        lines=(("forward", "h = h * len(get0().v)"), ("forward", "get0().v.append(1); get0().v = [*get0().v, 2][-2:]")),
        before=("get0 = functools.partial(constant, Data([0.5]))",),
        shown=("get0().v",),
    ),
    "a table that a user replaces": Case(
        lines=(("forward", "h = h + 1 if self.r0 is not None else h"), ("forward", "self.r0 = torch.zeros(4)")),
        changes=((1, "net.r0 = 1.0"),),
        init=(("net", "self.r0 = None"),),
    ),
    "a weak proxy": Case(
        lines=(("forward", "h = h * self.w0.v[0]; self.w0.v[0] = 2.5"),),
        init=(("net", "self.w0 = weakref.proxy(KEPT0)"),),
        before=("KEPT0 = Box([0.5])",),
        shown=("KEPT0.v",),
        way="module",
    ),
    "a number that becomes an int and a float": Case(
        lines=(("forward", "h = h * self.r0"), ("forward", "self.r0 = self.r0 * 0.9")),
        changes=((2, "net.r0 = 2"),),
        init=(("net", "self.r0 = 3"),),
    ),
    **{
        name: Case((("forward", f"h = h * {read}"),), ((2, change),), (("net", init),), (before,), way=way)
        for way, name, before, init, read, change in (
            (
                "trainer",
                "a subclass",
                "class B0: r = 0.5\nclass C0(B0): pass",
                "self.c0 = C0()",
                "self.c0.r",
                "C0.r = 2.5",
            ),
            ("module", "a later attribute", "class C0: pass", "pass", "getattr(C0, 'r', 1.5)", "C0.r = 2.5"),
            ("trainer", "a later global", "", "pass", "globals().get('R0', 1.5)", "globals()['R0'] = 2.5"),
            (
                *("module", "a property", "class C0: r = property(lambda self: 0.5)", "self.c0 = C0()", "self.c0.r"),
                "C0.r = property(lambda self: 2.5)",
            ),
            (
                *("trainer", "a static method", "class C0: get = staticmethod(lambda: 0.5)", "pass", "C0.get()"),
                "C0.get = staticmethod(lambda: 2.5)",
            ),
            (
                *("trainer", "a metaclass", "class M0(type):\n    def __call__(cls): return R0", "global R0; R0 = 0.5"),
                *("types.new_class('C0', (), {'metaclass': M0})()", "globals()['R0'] = 2.5"),
            ),
            (
                *("module", "a parameter's attribute", "", "self.fc.weight.r = 0.5"),
                *("getattr(self.fc.weight, 'r', 1.5) * getattr(self.fc.weight, 's', 1.0)", "net.fc.weight.s = 2.5"),
            ),
            (
                *("trainer", "a distribution", "", "self.r0 = torch.distributions.Normal(torch.ones(4), 1.0)"),
                *("self.r0.mean", "net.r0.loc = torch.full((4,), 2.5)"),
            ),
            (
                *(
                    "module",
                    "a C function",
                    "import operator",
                    "self.r0 = operator.itemgetter(0)",
                    "self.r0((0.5, 2.5))",
                ),
                "net.r0 = operator.itemgetter(1)",
            ),
            ("trainer", "memory", "R0 = torch.ones(4)", "pass", "R0", "R0.data = torch.full((4,), 2.5)"),
            ("module", "a set", "", "self.r0 = {Box(0.5)}", "next(iter(self.r0)).v", "next(iter(net.r0)).v = 2.5"),
            ("trainer", "a key", "", "self.r0 = {Box(0.5): 1}", "[*self.r0][0].v", "[*net.r0][0].v = 2.5"),
            (
                *("module", "an object array", "", "self.r0 = np.array([[Box(0.5), None]], dtype=object)"),
                *("self.r0[0, 0].v", "net.r0[0, 0].v = 2.5"),
            ),
            (
                *("trainer", "a context variable", "V0 = contextvars.ContextVar('v', default=Box(0.5))", "pass"),
                *("V0.get().v", "V0.get().v = 2.5"),
            ),
            (
                *("module", "a subclass of dict", "class D0(dict): r = 0.5", "self.r0 = D0(); self.r0.r = 1.5"),
                *("self.r0.r", "net.r0.r = 2.5"),
            ),
            ("trainer", "an event", "", "self.r0 = threading.Event()", "(1.5 + self.r0.is_set())", "net.r0.set()"),
            ("module", "a long list", "", "self.r0 = [0.5] * 2000", "self.r0[1500]", "net.r0[1500] = 2.5"),
            (
                *("trainer", "the type of a number", "", "self.r0 = 1.0"),
                *("(2 * self.r0 if type(self.r0) is float else 1)", "net.r0 = 3.0"),
            ),
        )
    },
}


@pytest.mark.parametrize("case", _FOUND.values(), ids=_FOUND)
def test_what_was_wrong_once(case: Case) -> None:
    assert compare(case).kind == "equal"


@pytest.mark.parametrize(
    ("seed", "kind"),
    [
        pytest.param(12000055, "in PyTorch", id="a cache that the run clears"),
        pytest.param(12000059, "equal", id="an object in a dict in an attribute of a weight"),
        pytest.param(12000084, "equal", id="a function in a class that code makes"),
        pytest.param(13000196, "refused", id="a lambda that the run leaves"),
        pytest.param(13000212, "equal", id="a name that another function knows"),
        pytest.param(13000151, "equal", id="a dict that a cache has kept"),
        pytest.param(15000066, "equal", id="a set in a view that a cache has kept"),
        pytest.param(15000089, "in PyTorch", id="what a checkpoint changes twice"),
        pytest.param(15000241, "in PyTorch", id="what a checkpoint changes back"),
        pytest.param(16000575, "equal", id="a table in a class that a user replaces"),
        pytest.param(28000143, "refused", id="a local function in a class, read as a method"),
        pytest.param(33100564, "equal", id="an object in a tuple that a cache has kept"),
        pytest.param(34100190, "equal", id="a function in a class in a table"),
        pytest.param(32000466, "in PyTorch", id="a buffer that a checkpoint changes"),
        pytest.param(
            34100432, "refused", id="what a checkpoint changes back, which PyTorch's second run does not reach"
        ),
        pytest.param(31000309, "equal", id="a slot that is assigned what it has"),
        pytest.param(37000170, "equal", id="a tuple that is assigned what it has"),
        pytest.param(16000651, "refused", id="an object in an array that the run replaces"),
        pytest.param(18000210, "equal", id="a function with defaults that one without replaces"),
        pytest.param(19000245, "equal", id="a function with attributes that a builtin function replaces"),
        pytest.param(22000089, "equal", id="a number on two ways, of which one leads elsewhere later"),
        pytest.param(22000602, "equal", id="a function that the run puts where it was"),
        pytest.param(23000224, "refused", id="a view that the run puts into a slot and reads again"),
        pytest.param(14000324, "equal", id="a power that is a float"),
        pytest.param(17000092, "refused", id="an object in a context variable that the run replaces"),
        pytest.param(17000191, "equal", id="what the run has put there before another function is met"),
    ],
)
def test_drawn_cases_that_were_wrong(seed: int, kind: str) -> None:
    assert compare(draw(seed)).kind == kind


@pytest.mark.parametrize("made", ["itertools.cycle([0.5, 1.5])", "itertools.count(2)", "iter([0.5, 1.5, 0.25, 1, 2])"])
def test_only_pytorch_takes_values_from_an_iterator(made: str) -> None:
    case = Case((("forward", "h = h * next(R0)"),), before=(f"import itertools\nR0 = {made}",), way="module")
    assert compare(case).kind == "in PyTorch"


def test_a_mistake_of_the_package_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Recorder, "_note_assigned")
    assert [compare(Case((), way=way)).kind for way in ("trainer", "module")] == ["raw error"] * 2


def test_cases_of_this_commit(seed: int) -> None:
    for case, outcome in drawn(draw, compare, seed):
        assert outcome.kind not in BAD, f"python -m tests.fuzz.living --case {case}: {outcome}"


def test_cases_and_what_they_shrink_to_are_programs() -> None:
    for seed in range(100):
        case = draw(seed)
        for each in (case, *case.smaller()):
            compile(each.source(), f"seed {seed}", "exec")
