"""Random models as source text: each reads or leaves a value in one of many kinds of places outside tensors."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = [
    "HEAD",
    "KINDS",
    "LEFT",
    "READ",
    "STEPS",
    "Place",
    "graphs_of",
    "in_a_loop",
    "place",
    "program",
    "programs",
    "trained",
]

STEPS = 5

HEAD = """
import argparse, collections, dataclasses, enum, functools, types
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
"""

# Of each kind: code before the model, code in __init__, the expression that forward reads, and the change.
READ: dict[str, tuple[str, str, str, str]] = {
    "attribute": ("", "self.v = {a}", "self.v", "model.v = {b}"),
    "attribute of a submodule": ("", "self.fc.v = {a}", "self.fc.v", "model.fc.v = {b}"),
    "object": ("class C: pass", "self.c = C(); self.c.v = {a}", "self.c.v", "model.c.v = {b}"),
    "another object": ("class C: pass", "self.c = C(); self.c.v = {a}", "self.c.v", "model.c = C(); model.c.v = {b}"),
    "object in an object": (
        "class C: pass",
        "self.c = C(); self.c.d = C(); self.c.d.v = {a}",
        "self.c.d.v",
        "model.c.d.v = {b}",
    ),
    "dataclass": (
        "@dataclasses.dataclass\nclass C:\n    v: float = {a}",
        "self.c = C()",
        "self.c.v",
        "model.c.v = {b}",
    ),
    "slots": (
        "class C:\n    __slots__ = ('v',)\n    def __init__(self): self.v = {a}",
        "self.c = C()",
        "self.c.v",
        "model.c.v = {b}",
    ),
    "namespace": ("", "self.c = types.SimpleNamespace(v={a})", "self.c.v", "model.c.v = {b}"),
    "arguments": ("ARGS = argparse.Namespace(v={a})", "", "ARGS.v", "ARGS.v = {b}"),
    "dict": ("", "self.c = {{'v': {a}, 'w': 2}}", "self.c['v']", "model.c['v'] = {b}"),
    "list": ("", "self.c = [1, {a}]", "self.c[1]", "model.c[1] = {b}"),
    "list in a dict": ("", "self.c = {{'d': [{a}]}}", "self.c['d'][0]", "model.c['d'][0] = {b}"),
    "tuple": ("", "self.c = ({a}, 3)", "self.c[0]", "model.c = ({b}, 3)"),
    "class attribute": ("class C: v = {a}", "self.c = C()", "self.c.v", "C.v = {b}"),
    "shadowed class attribute": ("class C: v = {a}", "self.c = C()", "self.c.v", "model.c.v = {b}"),
    "attribute of a class": ("class C: v = {a}", "", "C.v", "C.v = {b}"),
    "inherited": ("class B: v = {a}\nclass C(B): pass", "", "C.v", "B.v = {b}"),
    "class of an object": ("class C: v = {a}", "self.c = C()", "type(self.c).v", "C.v = {b}"),
    "environment": (
        "import os\nos.environ[__name__] = '{a}'",
        "",
        "float(os.environ[__name__])",
        "os.environ[__name__] = '{b}'",
    ),
    "context variable": (
        "import contextvars\nVAR = contextvars.ContextVar('v', default={a})",
        "",
        "VAR.get()",
        "VAR.set({b})",
    ),
    "entry by a key": ("V = {{(0, 1): {a}}}", "self.k = (0, 1)", "V[self.k]", "V[0, 1] = {b}"),
    "added": ("", "", "getattr(self, 'late', {a})", "model.late = {b}"),
    "enum": (
        "class E(enum.Enum):\n    A = {a}\n    B = {b}",
        "self.mode = E.A",
        "self.mode.value",
        "model.mode = E.B",
    ),
    "numpy number": ("", "self.v = np.float32({a})", "float(self.v)", "model.v = np.float32({b})"),
    "numpy array": ("", "self.v = np.full(1, {a})", "float(self.v[0])", "model.v[0] = {b}"),
    "memory of numpy": (
        "",
        "self.a = np.full(1, {a}, dtype=np.float32); self.v = torch.from_numpy(self.a)",
        "self.v",
        "model.a[0] = {b}",
    ),
    "plain tensor": ("", "self.v = torch.full((1,), float({a}))", "self.v", "model.v.fill_({b})"),
    "data of a tensor": ("", "self.v = torch.full((1,), float({a}))", "self.v", "model.v.data.fill_({b})"),
    "another tensor": ("", "self.v = torch.full((1,), float({a}))", "self.v", "model.v = torch.full((1,), float({b}))"),
    "tensor in a list": (
        "",
        "self.v = [torch.full((1,), float({a}))]",
        "self.v[0]",
        "model.v[0] = torch.full((1,), float({b}))",
    ),
    "tensor that comes later": (
        "",
        "self.v = None",
        "({a} if self.v is None else self.v)",
        "model.v = torch.full((1,), float({b}))",
    ),
    "global": ("V = {a}", "", "V", "V = {b}"),
    "global of a helper": ("V = {a}\ndef helper(): return V", "", "helper()", "V = {b}"),
    "global in a generator": ("V = {a}", "", "sum(V * t for t in (0.5, 0.5))", "V = {b}"),
    "global in a lambda": ("V = {a}", "", "(lambda: V)()", "V = {b}"),
    "global dict": ("V = {{'v': {a}}}", "", "V['v']", "V['v'] = {b}"),
    "closure": (
        "def make():\n    v = {a}\n    def get(): return v\n    def put(x):\n        nonlocal v\n        v = x\n"
        "    return get, put\nget, put = make()",
        "",
        "get()",
        "put({b})",
    ),
    "dict that makes its values": (
        "class D(collections.OrderedDict):\n    def __getitem__(self, key): return super().__getitem__(key)()\n"
        "V = D(v=lambda: {a})",
        "",
        "V['v']",
        "V['v'] = lambda: {b}",
    ),
    "default": ("def helper(c=[{a}]): return c[0]", "", "helper()", "helper.__defaults__[0][0] = {b}"),
    "keywords of a partial": (
        "def helper(v): return v",
        "self.f = functools.partial(helper, v={a})",
        "self.f()",
        "model.f = functools.partial(helper, v={b})",
    ),
    "function": ("", "self.f = lambda: {a}", "self.f()", "model.f = lambda: {b}"),
    "property": (
        "class C:\n    def __init__(self): self._v = {a}\n    @property\n    def v(self): return self._v",
        "self.c = C()",
        "self.c.v",
        "model.c._v = {b}",
    ),
    "method": (
        "class C:\n    def __init__(self): self.w = {a}\n    def v(self): return self.w",
        "self.c = C()",
        "self.c.v()",
        "model.c.w = {b}",
    ),
    "replaced forward": (
        "class One(nn.Module):\n    def forward(self): return {a}",
        "self.one = One()",
        "self.one()",
        "model.one.forward = lambda: {b}",
    ),
    "class in an attribute": ("class C: v = {a}", "self.c = C", "self.c.v", "C.v = {b}"),
    "nested class": ("class C:\n    class D: v = {a}", "", "C.D.v", "C.D.v = {b}"),
    "class method": (
        "class C:\n    w = {a}\n    @classmethod\n    def v(cls): return cls.w",
        "",
        "C.v()",
        "C.w = {b}",
    ),
    "singleton": (
        "class C:\n    one = None\n    @classmethod\n    def get(cls): return cls.one\nC.one = C(); C.one.v = {a}",
        "",
        "C.get().v",
        "C.one.v = {b}",
    ),
    "function attribute": ("def helper(): return helper.v\nhelper.v = {a}", "", "helper()", "helper.v = {b}"),
    "python module": ("M = types.ModuleType('m'); M.v = {a}", "self.m = M", "self.m.v", "M.v = {b}"),
    "thread-local": ("import threading\nV = threading.local(); V.v = {a}", "", "V.v", "V.v = {b}"),
    "own kind of number": ("class C(float): pass", "self.v = C({a})", "float(self.v)", "model.v = C({b})"),
    "slots with a property": (
        "class C:\n    __slots__ = ('__w',)\n    def __init__(self): self.put({a})\n"
        "    def put(self, x): self.__w = x\n    @property\n    def v(self): return self.__w",
        "self.c = C()",
        "self.c.v",
        "model.c.put({b})",
    ),
    "item of a tensor": ("", "self.v = torch.full((1,), float({a}))", "self.v.item()", "model.v.fill_({b})"),
    "computed from a tensor": (
        "V = torch.full((1,), float({a}))",
        "",
        "float(V * 2) / 2",
        "V.fill_({b})",
    ),
    "weights of a loss outside": (
        "L = [nn.CrossEntropyLoss()]",
        "",
        "({a} if L[0].weight is None else L[0].weight[0])",
        "L[0].weight = torch.full((3,), float({b}))",
    ),
    "hook outside": (
        "L = [nn.Identity()]",
        "",
        "{a} * L[0](torch.ones(1))",
        "L[0].register_forward_hook(lambda m, x, y: y * {b})",
    ),
    "item of an object": (
        "V = {a}\nclass C:\n    def __getitem__(self, key): return V",
        "self.c = C()",
        "self.c['v']",
        "V = {b}",
    ),
    "item of an own dict": (
        "V = {a}\nclass C(dict):\n    def __missing__(self, key): return V",
        "self.c = C()",
        "self.c['v']",
        "V = {b}",
    ),
    "length of an object": (
        "V = [1]\nclass C:\n    def __len__(self): return len(V)",
        "self.c = C()",
        "len(self.c)",
        "V.append(2)",
    ),
    "object as a number": (
        "V = {a}\nclass C:\n    def __float__(self): return float(V)\n    def __iter__(self): yield V",
        "self.c = C()",
        "(float(self.c) + sum(self.c)) / 2",
        "V = {b}",
    ),
    "object that multiplies": (
        "V = {a}\nclass C:\n    def __rmul__(self, x): return x * V",
        "self.c = C()",
        "(2 * self.c)",
        "V = {b}",
    ),
    "object that makes attributes": (
        "V = {a}\nclass C:\n    def __getattr__(self, name):\n        if name != 'v': raise AttributeError(name)\n"
        "        return V",
        "self.c = C()",
        "self.c.v",
        "V = {b}",
    ),
    "descriptor": (
        "V = {a}\nclass D:\n    def __get__(self, owner, kind): return V\nclass C: v = D()",
        "self.c = C()",
        "self.c.v",
        "V = {b}",
    ),
    "attribute by name": ("class C: v = {a}", "", "getattr(C, 'v')", "C.v = {b}"),
    "global by name": ("V = {a}", "", "globals()['V']", "V = {b}"),
    "imported in a function": (
        "import sys\nM = types.ModuleType('m'); M.v = {a}; sys.modules['{name}_m'] = M\n"
        "def helper():\n    import {name}_m as m\n    return m.v",
        "",
        "helper()",
        "M.v = {b}",
    ),
    "environment by a function": (
        "import os\nos.environ[__name__] = '{a}'",
        "",
        "float(os.getenv(__name__))",
        "os.environ[__name__] = '{b}'",
    ),
    "weak reference": (
        "import weakref\nclass C: pass\nV = C(); V.v = {a}",
        "self.c = weakref.ref(V)",
        "self.c().v",
        "V.v = {b}",
    ),
    "read-only dict": ("V = {{'v': {a}}}", "self.c = types.MappingProxyType(V)", "self.c['v']", "V['v'] = {b}"),
    "view of a dict": ("V = {{'v': {a}}}", "self.c = V.values()", "list(self.c)[0]", "V['v'] = {b}"),
    "method of a dict": ("V = {{'v': {a}}}", "self.c = V.get", "self.c('v')", "V['v'] = {b}"),
    "numpy array of objects": ("", "self.v = np.array([{a}, None])", "self.v[0]", "model.v[0] = {b}"),
    "another class": (
        "class One(nn.Module):\n    def forward(self): return {a}\nclass Two(One):\n    def forward(self): return {b}",
        "self.one = One()",
        "self.one()",
        "model.one.__class__ = Two",
    ),
    "another class of a layer": (
        "class Two(nn.Linear):\n    def forward(self, x): return super().forward(x) * {b}",
        "",
        "1.0",
        "model.fc.__class__ = Two",
    ),
    "hook replaced under its key": (
        "",
        "self.fc.register_forward_hook(lambda m, x, y: y * {a})",
        "1.0",
        "model.fc._forward_hooks[next(iter(model.fc._forward_hooks))] = lambda m, x, y: y * {b}",
    ),
    "absent from an own dict": (
        "class C: pass",
        "self.c = C()",
        "vars(self.c).get('v', {a})",
        "model.c.v = {b}",
    ),
    "own dict": ("", "self.v = {a}", "vars(self)['v']", "model.v = {b}"),
}

# Of each kind: code before the model, code in __init__, the statement in forward that leaves something of h, the
# expression that reads it in the next call, and what is compared in the end.
LEFT: dict[str, tuple[str, str, str, str, str]] = {
    "attribute": ("", "self.s = torch.zeros(1)", "self.s = h.detach().mean(0)[:1]", "self.s", "model.s"),
    "of the first call": (
        "",
        "self.s = None",
        "self.s = h.detach().mean(0)[:1]",
        "(0.0 if self.s is None else self.s)",
        "model.s",
    ),
    "tuple": (
        "",
        "self.s = (torch.zeros(1), torch.zeros(1))",
        "self.s = (h.detach().mean(0)[:1], h.detach().mean(0)[1:2])",
        "self.s[0] + self.s[1]",
        "model.s[1]",
    ),
    "list": ("", "self.s = [torch.zeros(1)]", "self.s[0] = h.detach().mean(0)[:1]", "self.s[0]", "model.s[0]"),
    "dict": ("", "self.s = {{}}", "self.s['h'] = h.detach().mean(0)[:1]", "self.s.get('h', 0.0)", "model.s['h']"),
    "deque": (
        "",
        "self.s = collections.deque([torch.zeros(1)] * 2, maxlen=2)",
        "self.s.append(h.detach().mean(0)[:1])",
        "self.s[0]",
        "model.s[1]",
    ),
    "object": (
        "class C: s = 0.0",
        "self.c = C()",
        "self.c.s = h.detach().mean(0)[:1]",
        "self.c.s",
        "model.c.s",
    ),
    "slots": (
        "class C:\n    __slots__ = ('s',)\n    def __init__(self): self.s = torch.zeros(1)",
        "self.c = C()",
        "self.c.s = h.detach().mean(0)[:1]",
        "self.c.s",
        "model.c.s",
    ),
    "dataclass": (
        "@dataclasses.dataclass\nclass C:\n    s: object",
        "self.c = C(torch.zeros(1))",
        "self.c = C(h.detach().mean(0)[:1])",
        "self.c.s",
        "model.c.s",
    ),
    "global": ("S = torch.zeros(1)", "", "global S; S = h.detach().mean(0)[:1]", "S", "S"),
    "global dict": ("S = {{'s': torch.zeros(1)}}", "", "S['s'] = h.detach().mean(0)[:1]", "S['s']", "S['s']"),
    "closure": (
        "def make():\n    s = torch.zeros(1)\n    def get(): return s\n    def put(x):\n        nonlocal s\n"
        "        s = x\n    return get, put\nget, put = make()",
        "",
        "put(h.detach().mean(0)[:1])",
        "get()",
        "get()",
    ),
    "buffer": (
        "",
        "self.register_buffer('s', torch.zeros(1))",
        "self.s = h.detach().mean(0)[:1]",
        "self.s",
        "model.s",
    ),
    "counter": ("", "self.n = 0", "self.n += 1", "0.0", "torch.tensor(model.n)"),
    "counter that is used": ("", "self.n = 1", "self.n = self.n + 2", "self.n * 0.1", "torch.tensor(model.n)"),
    "counter in an object": ("class C: n = 0", "self.c = C()", "self.c.n += 1", "0.0", "torch.tensor(model.c.n)"),
    "counter in a global": ("N = 0", "", "global N; N += 1", "0.0", "torch.tensor(N)"),
    "counter that decides": (
        "",
        "self.n = 0",
        "self.n += 1",
        "(1.0 if self.n > 1 else 0.0)",
        "torch.tensor(model.n)",
    ),
    "counter in a dict": ("S = {{'n': 0, 'm': 2}}", "", "S['n'] += 1", "0.0", "torch.tensor(list(S.values()))"),
    "counter in a list": ("", "self.s = [3, 1.5]", "self.s[0] += 1", "self.s[1]", "torch.tensor(model.s)"),
    "growing list": ("", "self.s = []", "self.s.append(h.detach().mean(0)[:1])", "0.0", "torch.stack(model.s)"),
    "growing list of numbers": (
        "",
        "self.n, self.s = 0, [5]",
        "self.n += 1; self.s += [self.n, self.n * 2]",
        "0.0",
        "torch.tensor(model.s)",
    ),
    "counter in a class": ("class C: n = 0", "", "C.n += 1", "C.n * 0.1", "torch.tensor(C.n)"),
    "tensor in a class": ("class C: t = torch.zeros(1)", "", "C.t = h.detach().mean(0)[:1]", "C.t", "C.t"),
    "counter of a function": ("def f(): pass\nf.n = 0", "", "f.n += 1", "f.n * 0.1", "torch.tensor(f.n)"),
    "counter of a function that another reads": (
        "def f(): pass\ndef g(): return f.n\nf.n = 0",
        "",
        "f.n += 1",
        "g() * 0.1",
        "torch.tensor(f.n)",
    ),
    "own kind of list": (
        "class C(list): pass",
        "self.s = C([5])",
        "self.s.append(h.detach().mean(0)[:1])",
        "0.0",
        "torch.tensor([len(model.s), model.s[0], float(model.s[-1])])",
    ),
    "decayed number": ("", "self.t = 2.0", "self.t = max(self.t * 0.5, 0.1)", "self.t", "torch.tensor(model.t)"),
}
KINDS = [("read", kind) for kind in READ] + [("left", kind) for kind in LEFT]

# A tensor is an input, what is replaced in each run is a result, and so is a number that is counted. All other kinds
# need a graph for what is before a change and one for what is after, as with TorchDynamo, which needs five for numbers
# that are counted (benchmarks/recompilations.py).
_ONE_GRAPH = {
    "read": ("memory of numpy", "plain tensor", "data of a tensor", "another tensor", "tensor in a list"),
    "left": (
        *("attribute", "tuple", "list", "deque", "slots", "dataclass", "global", "global dict", "closure", "buffer"),
        *("counter", "counter that is used", "counter in a global", "counter in a dict", "counter in a list"),
        *("counter in a class", "tensor in a class", "counter of a function"),
        "counter of a function that another reads",
        *("growing list", "growing list of numbers"),
    ),
}

_USES = (
    "h * {v}",
    "h + {v}",
    "{v} * h.tanh()",
    "h - {v} * h.detach().mean()",
    "torch.where(h > 0, h, h * {v})",
    "(h * 2 if {v} > 1.2 else h) + {v} * 0.0",
)

_MODEL = """
{before}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear({width}, {hidden})
        self.out = nn.Linear({hidden}, 3)
        {init}
    def forward(self, x):
        {declared}h = self.fc(x)
        h = {use}
        h = torch.{activation}(h)
        {leave}
        return self.out(h)
model = Net()
def change():
    {globals}
    {change}
def state():
    return {state}
"""


@dataclass(frozen=True)
class Place:
    """A kind of place in a model, as source text.

    Attributes:
        before: Code before the model.
        init: Code in ``__init__``.
        use: An expression of h, which reads the value.
        declared: A declaration at the beginning of ``forward``, or "".
        leave: A statement in ``forward``, which leaves something of h.
        globals: A declaration at the beginning of a function that changes the value.
        change: A statement that changes the value.
        state: An expression: what is compared in the end.
    """

    before: str
    init: str
    use: str
    declared: str
    leave: str
    globals: str
    change: str
    state: str


def place(how: str, kind: str, draw: random.Random, name: str) -> Place:
    """Returns a kind of place with drawn numbers and a drawn use.

    Args:
        how: ``read`` or ``left``.
        kind: A key of :data:`READ` or :data:`LEFT`.
        draw: Draws the numbers, and how the value is used.
        name: The module's name.
    """
    a, b = draw.choice([(1.0, 3.0), (0.5, 2.0), (1, 2), (2.0, 0.25)])
    if how == "read":
        before, init, expression, change = READ[kind]
        leave, state = "pass", "torch.zeros(1)"
    else:
        before, init, leave, expression, state = LEFT[kind]
        change = "pass"
    declared = ""
    if leave.startswith("global"):
        declared, leave = leave.split(";")[0], leave.split(";")[1].strip()
    tensors = "tensor" in kind or "memory" in kind or (how == "left" and "count" not in kind and "number" not in kind)
    uses = _USES[:-2] if tensors else _USES
    fill = {"a": a, "b": b, "name": name}
    return Place(
        before=before.format(**fill),
        init=init.format(**fill) or "pass",
        use=draw.choice(uses).format(v=f"({expression.format(**fill)})"),
        declared=declared,
        leave=leave.format(**fill),
        globals="global V" if change.startswith("V =") else "pass",
        change=change.format(**fill),
        state=state,
    )


def program(how: str, kind: str, seed: int) -> Any:
    """Returns a Python module with ``model``, ``change()`` and ``state()``; calls with the same seed are equal.

    Args:
        how: ``read`` or ``left``.
        kind: A key of :data:`READ` or :data:`LEFT`.
        seed: Decides about sizes, numbers and how the value is used.
    """
    draw = random.Random(f"{how} {kind} {seed}")
    values = {"width": draw.choice([4, 6]), "hidden": draw.choice([5, 8]), "activation": draw.choice(["relu", "sin"])}
    name = f"program_{abs(hash((how, kind, seed)))}_{len(sys.modules)}"
    parts = asdict(place(how, kind, draw, name))
    parts["declared"] += "\n        " * bool(parts["declared"])
    source = HEAD + _MODEL.format(**parts, **values)
    module = types.ModuleType(name)
    sys.modules[name] = module
    exec(compile(source, f"<{how} {kind} {seed}>", "exec"), vars(module))
    module.source = source  # type: ignore[attr-defined]
    module.width = values["width"]  # type: ignore[attr-defined]
    return module


def graphs_of(how: str, kind: str) -> int:
    """Returns how many graphs a program needs: never more than TorchDynamo compiles."""
    if kind == "own kind of list":  # no object can stand in for it, so its contents count
        return STEPS
    return 1 if kind in _ONE_GRAPH[how] else 2


def programs(how: str, kind: str, seed: int) -> tuple[Any, Any]:
    """Returns two equal programs, with the same weights."""
    first, second = (program(how, kind, seed) for _ in range(2))
    second.model.load_state_dict(first.model.state_dict())
    return first, second


def trained(used: Any, train_step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> list[float]:
    """Returns the losses of a program's model in five steps, with the change after the second."""
    losses = []
    for step in range(STEPS):
        if step == 2:
            used.change()
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(4, used.width, generator=generator), torch.randint(3, (4,), generator=generator)
        losses.append(train_step(x, y).item())
    return losses


def in_a_loop(model: nn.Module) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Returns a step of PyTorch's loop."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return train_step
