"""Draws programs that read and leave values outside tensors, trains them here and in PyTorch, and compares both.

A case draws where a value is kept (a root, such as a global variable, and containers within), its kind, what reads it
(forward, a hook, the loss, ...), how it enters the arithmetic, what a run leaves there, and what the user changes
between steps. Losses, weights, and what is left at the place must be PyTorch's after each step.

``python -m tests.fuzz.living --minutes 20`` draws and shrinks cases, ``--case SEED`` repeats one.
"""

from __future__ import annotations

import dataclasses
import enum
import random
import re
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from ort_trainer import ORTModule, ORTTrainer, ORTTrainerOptions, optim

from .compare import Outcome
from .lot import judge, main, running, without_one

__all__ = ["Case", "compare", "draw"]

_STEPS = 5

_PROGRAM = """
import collections, contextvars, dataclasses, enum, functools, math, os, sys, threading, types, weakref
import numpy as np, torch, torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

class Box:
    def __init__(self, v): self.v = v
    def get(self): return self.v
class Slots:
    __slots__ = ("v",)
    def __init__(self, v): self.v = v
class Called(Box):
    def __call__(self): return self.v
class Indexed(Box):
    def __getitem__(self, key): return self.v
class Private:
    def __init__(self, v): self._v = v
    @property
    def v(self): return self._v
    @v.setter
    def v(self, v): self._v = v
class Cached(Private):
    v = functools.cached_property(lambda self: self._v)
class Described:
    class Field:
        def __get__(self, owner, kind): return owner.kept["v"]
        def __set__(self, owner, value): owner.kept["v"] = value
    v = Field()
    def __init__(self, v): self.kept = {{"v": v}}
class Forwarding:
    def __init__(self, v): self.inner = Box(v)
    def __getattr__(self, name): return getattr(self.__dict__["inner"], name)
@dataclasses.dataclass
class Data:
    v: object
@dataclasses.dataclass(frozen=True)
class Frozen:
    v: object
Named = collections.namedtuple("Named", "v w")
class Mode(enum.Enum):
    A = 0.5
    B = 2.0
class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2
def halved(h): return h * 0.5
def doubled(h): return h * 2
def constant(v): return v
{before}

{helper}
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        {part_init}
    {submodule}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.out, self.part = nn.Linear(4, 4), nn.Linear(4, 4), Part()
        {hooks}
        {net_init}
    {methods}
    def forward(self, x):
        {heads}
        h = torch.tanh(self.fc(x))
        {forward}
        {calls}
        return self.out(h)

{loss}
def change(net, step):
    {top}
    {changes}

def shown(net):
    {top}
    return [{shown}]
"""
_LOSS_CLASS = """
class Loss{base}:
    def __init__(self):
        {start}
        {init}
    def {call}(self, h, t):
        {heads}
        {lines}
        return F.mse_loss(h, t)
LOSS = Loss()
loss_fn = {form}
"""
_LOSS_FUNCTION = """
def loss_fn(h, t):
    {heads}
    {lines}
    return F.mse_loss(h, t)
"""
# Form of the loss -> base class, method, and the callable.
_FORMS = {
    "object": ("", "__call__", "LOSS"),
    "module": ("(nn.Module)", "forward", "LOSS"),
    "method": ("", "compute", "LOSS.compute"),
    "lambda": ("", "compute", "lambda h, t: LOSS.compute(h, t)"),
    "partial": ("", "compute", "functools.partial(Loss.compute, LOSS)"),
}
# Where lines may stand -> the object that is ``self`` there, for the user; none in functions.
_WHERE = {
    **dict.fromkeys(("forward", "method", "checkpoint", "hook", "pre hook"), "net"),
    "submodule": "net.part",
    "loss": "LOSS",
    "helper": "",
}
# Where lines stand in a function -> its first line, its last, what registers it, and what calls it.
_METHODS = {
    "method": ("def method(self, h)", "return h", "", "h = self.method(h)"),
    "checkpoint": ("def inner(self, h)", "return h", "", "h = checkpoint(self.inner, h, use_reentrant=False)"),
    "hook": ("def hook(self, module, args, h)", "return h", "self.fc.register_forward_hook(self.hook)", "pass"),
    "pre hook": (
        "def pre_hook(self, module, args)",
        "return (h,)",
        "self.out.register_forward_pre_hook(self.pre_hook)",
        "pass",
    ),
    "submodule": ("def forward(self, h)", "return h", "", "h = self.part(h)"),
    "helper": ("def helper(h)", "return h", "", "h = helper(h)"),
}


@dataclasses.dataclass(frozen=True)
class _Root:
    """Where a value is kept, as templates: ``n`` is a number, ``o`` the owner, ``w`` the first value, ``s`` a new one.

    Attributes:
        read: Reads it.
        put: Replaces it; nothing if that is impossible.
        before: Code before the model.
        init: Code in ``__init__`` of its owner.
        head: First line of each function.
    """

    read: str
    put: str = ""
    before: str = ""
    init: str = ""
    head: str = ""


def _fill(template: str, **names: str) -> str:
    """Returns a template with text in place of names of one letter in braces; other braces stay."""
    return re.sub(r"\{([a-z])\}", lambda match: names[match[1]], template)


def _held(kind: str, read: str = "{o}.c{n}.v") -> _Root:
    return _Root(read, "{o}.c{n}.v = {s}", init=f"{{o}}.c{{n}} = {kind}({{w}})")


_ROOTS = {
    "attribute": _Root("{o}.r{n}", "{o}.r{n} = {s}", init="{o}.r{n} = {w}"),
    "attribute by its name": _Root("getattr({o}, 'r{n}')", "setattr({o}, 'r{n}', {s})", init="{o}.r{n} = {w}"),
    "own dict": _Root("vars({o})['r{n}']", "vars({o})['r{n}'] = {s}", init="{o}.r{n} = {w}"),
    "added later": _Root("getattr({o}, 'r{n}', {w})", "{o}.r{n} = {s}"),
    "global": _Root("R{n}", "R{n} = {s}", "R{n} = {w}", head="global R{n}"),
    "global by its name": _Root("globals()['R{n}']", "globals()['R{n}'] = {s}", "R{n} = {w}"),
    "Python module": _Root(
        "settings{n}.r",
        "settings{n}.r = {s}",
        "settings{n} = sys.modules['drawn_settings{n}'] = types.ModuleType('drawn_settings{n}')\nsettings{n}.r = {w}",
    ),
    "imported in a function": _Root(
        "drawn_settings{n}.r",
        "drawn_settings{n}.r = {s}",
        "settings{n} = sys.modules['drawn_settings{n}'] = types.ModuleType('drawn_settings{n}')\nsettings{n}.r = {w}",
        head="import drawn_settings{n}",
    ),
    "name imported in a function": _Root(
        "r{n}",
        "sys.modules['drawn_settings{n}'].r{n} = {s}",
        "settings{n} = sys.modules['drawn_settings{n}'] = types.ModuleType('drawn_settings{n}')\n"
        "settings{n}.r{n} = {w}",
        head="from drawn_settings{n} import r{n}",
    ),
    "closure": _Root(
        "get{n}()",
        "put{n}({s})",
        "def make{n}():\n    r = {w}\n    def get(): return r\n    def put(v):\n        nonlocal r\n        r = v\n"
        "    return get, put\nget{n}, put{n} = make{n}()",
    ),
    "default": _Root("get{n}()", "get{n}.__defaults__ = ({s},)", "def get{n}(r={w}): return r"),
    "keyword default": _Root("get{n}()", "get{n}.__kwdefaults__['r'] = {s}", "def get{n}(*, r={w}): return r"),
    "partial": _Root(
        "get{n}()",
        "get{n} = functools.partial(constant, {s})",
        "get{n} = functools.partial(constant, {w})",
        head="global get{n}",
    ),
    "keyword of a partial": _Root(
        "get{n}()", "get{n}.keywords['v'] = {s}", "get{n} = functools.partial(constant, v={w})"
    ),
    "context variable": _Root(
        "VAR{n}.get()", "VAR{n}.set({s})", "VAR{n} = contextvars.ContextVar('v'); VAR{n}.set({w})"
    ),
    "default of a context variable": _Root(
        "VAR{n}.get()", "VAR{n}.set({s})", "VAR{n} = contextvars.ContextVar('v', default={w})"
    ),
    "class": _Root("C{n}.r", "C{n}.r = {s}", "class C{n}:\n    r = {w}"),
    "class of an object": _Root("{o}.c{n}.r", "C{n}.r = {s}", "class C{n}:\n    r = {w}", "{o}.c{n} = C{n}()"),
    "shadowed class": _Root("{o}.c{n}.r", "{o}.c{n}.r = {s}", "class C{n}:\n    r = {w}", "{o}.c{n} = C{n}()"),
    "base class": _Root("C{n}.r", "B{n}.r = {s}", "class B{n}:\n    r = {w}\nclass C{n}(B{n}): pass"),
    "class method": _Root(
        "C{n}.get()", "C{n}.r = {s}", "class C{n}:\n    r = {w}\n    @classmethod\n    def get(cls): return cls.r"
    ),
    "class by type()": _Root("type({o}.c{n}).r", "C{n}.r = {s}", "class C{n}:\n    r = {w}", "{o}.c{n} = C{n}()"),
    "property of a metaclass": _Root(
        "C{n}.r",
        "C{n}.kept = {s}",
        "class M{n}(type):\n    r = property(lambda cls: cls.kept)\nclass C{n}(metaclass=M{n}):\n    kept = {w}",
    ),
    "function": _Root("f{n}.r", "f{n}.r = {s}", "def f{n}(): pass\nf{n}.r = {w}"),
    "object": _held("Box"),
    "slots": _held("Slots"),
    "dataclass": _held("Data"),
    "namespace": _Root("{o}.c{n}.v", "{o}.c{n}.v = {s}", init="{o}.c{n} = types.SimpleNamespace(v={w})"),
    "property": _held("Private"),
    "behind a property": _Root("{o}.c{n}.v", "{o}.c{n}._v = {s}", init="{o}.c{n} = Private({w})"),
    "cached property": _held("Cached"),
    "behind a cached property": _Root("{o}.c{n}.v", "{o}.c{n}._v = {s}", init="{o}.c{n} = Cached({w})"),
    "descriptor": _held("Described"),
    "__getattr__": _Root("{o}.c{n}.v", "{o}.c{n}.inner.v = {s}", init="{o}.c{n} = Forwarding({w})"),
    "method": _held("Box", "{o}.c{n}.get()"),
    "kept method": _Root("{o}.get{n}()", "{o}.get{n}.__self__.v = {s}", init="{o}.get{n} = Box({w}).get"),
    "cached function": _Root(
        "get{n}()", "R{n} = {s}", "R{n} = {w}\n@functools.lru_cache\ndef get{n}(): return R{n}", head="global R{n}"
    ),
    "cleared cached function": _Root(
        "get{n}()",
        "R{n} = {s}; get{n}.cache_clear()",
        "R{n} = {w}\n@functools.lru_cache\ndef get{n}(): return R{n}",
        head="global R{n}",
    ),
    "weak reference": _Root("{o}.w{n}().v", "KEPT{n}.v = {s}", "KEPT{n} = Box({w})", "{o}.w{n} = weakref.ref(KEPT{n})"),
    "weak proxy": _Root("{o}.w{n}.v", "KEPT{n}.v = {s}", "KEPT{n} = Box({w})", "{o}.w{n} = weakref.proxy(KEPT{n})"),
    "weak registry": _Root(
        "KNOWN{n}[{o}.k{n}]",
        "KNOWN{n}[{o}.k{n}] = {s}",
        "KNOWN{n} = weakref.WeakKeyDictionary()",
        "{o}.k{n} = Box(0); KNOWN{n}[{o}.k{n}] = {w}",
    ),
    "thread local": _Root("L{n}.r", "L{n}.r = {s}", "L{n} = threading.local(); L{n}.r = {w}"),
    "alias": _Root("{o}.r{n}", "ALIAS{n} = {o}.r{n} = {s}", "ALIAS{n} = {w}", "{o}.r{n} = ALIAS{n}", "global ALIAS{n}"),
    "generator": _Root(
        "next(G{n})", "R{n} = {s}", "R{n} = {w}\nG{n} = (R{n} for _ in iter(int, 1))", head="global R{n}"
    ),
    "code": _Root("f{n}()", "f{n}.__code__ = (lambda: {s}).__code__", "def f{n}(): return {w}"),
    "lambda": _Root("{o}.f{n}()", "{o}.f{n} = lambda: {s}", init="{o}.f{n} = lambda: {w}"),
    "attribute of a layer": _Root("{o}.fc.r{n}", "{o}.fc.r{n} = {s}", init="{o}.fc.r{n} = {w}"),
    "attribute of a parameter": _Root(
        "{o}.fc.weight.r{n}", "{o}.fc.weight.r{n} = {s}", init="{o}.fc.weight.r{n} = {w}"
    ),
    "buffer": _Root("{o}.r{n}", "{o}.r{n} = {s}", init="{o}.register_buffer('r{n}', {w})"),
    "environment": _Root("os.environ['DRAWN{n}']", "os.environ['DRAWN{n}'] = {s}", "os.environ['DRAWN{n}'] = {w}"),
}
_SPECIAL = {"buffer": "tensor", "environment": "text"}

# Containers within: what makes one of a value, what reads the value, and what replaces it, if anything can.
_CONTAINERS = {
    "dict": ("{'k': {v}, 'l': 1}", "{x}['k']", "{x}['k'] = {s}"),
    "dict by get": ("dict(k={v})", "{x}.get('k', 0.5)", "{x}['k'] = {s}"),
    "dict with integers": ("{0: 1, 1: {v}}", "{x}[1]", "{x}[1] = {s}"),
    "ordered dict": ("collections.OrderedDict(k={v})", "{x}['k']", "{x}['k'] = {s}"),
    "default dict": ("collections.defaultdict(float, k={v})", "{x}['k']", "{x}['k'] = {s}"),
    "user dict": ("collections.UserDict(k={v})", "{x}['k']", "{x}['k'] = {s}"),
    "chain map": ("collections.ChainMap({}, {'k': {v}})", "{x}['k']", "{x}['k'] = {s}"),
    "list": ("[{v}, 1]", "{x}[0]", "{x}[0] = {s}"),
    "end of a list": ("[1, {v}]", "{x}[-1]", "{x}[-1] = {s}"),
    "deque": ("collections.deque([{v}], maxlen=2)", "{x}[0]", "{x}.appendleft({s})"),
    "tuple": ("({v}, 1)", "{x}[0]", ""),
    "named tuple": ("Named({v}, 1)", "{x}.v", ""),
    "frozen dataclass": ("Frozen({v})", "{x}.v", ""),
    "read-only dict": ("types.MappingProxyType({'k': {v}})", "{x}['k']", ""),
    "values of a dict": ("dict(k={v}).values()", "next(iter({x}))", ""),
    "object": ("Box({v})", "{x}.v", "{x}.v = {s}"),
    "slots": ("Slots({v})", "{x}.v", "{x}.v = {s}"),
    "dataclass": ("Data({v})", "{x}.v", "{x}.v = {s}"),
    "namespace": ("types.SimpleNamespace(v={v})", "{x}.v", "{x}.v = {s}"),
    "called object": ("Called({v})", "{x}()", "{x}.v = {s}"),
    "indexed object": ("Indexed({v})", "{x}[0]", "{x}.v = {s}"),
    "property": ("Private({v})", "{x}.v", "{x}._v = {s}"),
    "partial": ("functools.partial(constant, {v})", "{x}()", ""),
    "class made at run time": ("type('T', (), dict(v={v}))", "{x}.v", "{x}.v = {s}"),
    "array of objects": ("np.array([{v}, None], dtype=object)", "{x}[0]", "{x}[0] = {s}"),
}


@dataclasses.dataclass(frozen=True)
class _Kind:
    """A kind of value: values, lines of a run that use one, and what a user and a run make of it: by a statement, with
    ``r`` for the value, or as a new value.
    """

    values: tuple[str, ...]
    uses: tuple[str, ...]
    changed: tuple[str, ...] = ()
    new: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    left_new: tuple[str, ...] = ()


_ON_NUMBERS = (
    *("h = h * {r}", "h = h + {r}", "h = h / (3 + {r})", "h = h * 2 if {r} > 1 else h", "h = h * (1 - {r})"),
    *("if {r}: h = h * 2", "for _ in range(int({r})): h = h * 0.5 + 1", "h = F.dropout(h, abs({r}) / 8)"),
    *("h = h + h[:, :max(1, int({r}))].sum(1, keepdim=True)", "h = h.clamp(max=abs({r}))", "h = F.leaky_relu(h, {r})"),
    *("h = h * torch.tensor(float({r}))", "h = h + torch.full_like(h, {r})", "h = h * math.exp(-{r})"),
    *("h = h * max({r}, 1)", "h = h * min({r}, len(h))", "h = h * {'1': 2.0, '2': 3.0}.get(str({r}), 0.5)"),
    *("h = h * (2.0 if isinstance({r}, int) else 1.0)", "h = torch.where(h > {r}, h, h * 0.5)"),
    *("h = h.roll(int({r}), 1)", "h = h * {r} ** 2", "h = h * sum([{r}, {r}])", "h = h + round({r})"),
    *("h = h * float('%.1f' % {r})", "h = h * float(np.sqrt(abs({r})))", "h = h.add(h, alpha={r})"),
    *("h = h.lerp(h * 2, {r})", "h = h * [0.5, 1.5, 2.0, 3.0][int({r}) % 4]", "h = h.masked_fill(h > 1, {r})"),
    *("h = F.layer_norm(h, (4,), eps=0.1 + abs({r}))", "h = h.sum(int({r}) % 2, keepdim=True) + h"),
    *("h = torch.cat([h, h.new_full((4, 1), {r})], 1)[:, 1:]", "h = h * {r} if {r} in (0.5, 1, 2) else h"),
    *(
        "h = h * (3 if {r} is None else 1)",
        "h = h * np.float64({r})",
        "h = h * int({r} == 1)",
        "h = h * (0.5, 2)[{r} > 1]",
    ),
    *(
        "h = h * divmod({r}, 2)[1] + h",
        "h = h + 2 ** {r}",
        "h = h + {r} // 1",
        "h = h * -{r}",
        "h = h @ torch.eye(4) * {r}",
    ),
)
_LEFT_NUMBERS = (
    "{r} + 1",
    "{r} * 0.9",
    "max({r} * 0.5, 0.1)",
    "0.5",
    "1 - {r}",
    "{r} + 1 if {r} < 3 else 0",
    "len(h)",
    "None",
)
_LEFT_TENSORS = (
    *("h.detach().mean()", "h.detach().mean(0)", "h.detach()", "{r} * 0.9 + 0.1 * h.detach().mean()", "h.sum().item()"),
    *("torch.maximum(torch.as_tensor({r}), h.detach().max())", "h", "h.mean()", "torch.zeros(4)", "h.detach().clone()"),
)
_KINDS = {
    "float": _Kind(
        ("0.5", "1.5", "2.0", "0.25", "1.0", "0.0"), _ON_NUMBERS, new=("{r} + 1", "{r} * 2"), left_new=_LEFT_NUMBERS
    ),
    "int": _Kind(("1", "2", "3", "0"), _ON_NUMBERS, new=("{r} + 1", "{r} - 1"), left_new=_LEFT_NUMBERS),
    "bool": _Kind(("True", "False"), _ON_NUMBERS, new=("not {r}",), left_new=("not {r}", "True", "{r} + 1")),
    "numpy number": _Kind(
        ("np.float32(0.5)", "np.float64(1.5)", "np.int64(2)", "np.float32(2)"),
        _ON_NUMBERS,
        new=("{r} + 1",),
        left_new=("{r} + 1", "np.float32(0.5)"),
    ),
    "text": _Kind(
        ("'tanh'", "'relu'", "'sigmoid'", "'1.5'"),
        (
            *("h = getattr(torch, {r})(h)", "h = h * dict(tanh=0.5, relu=2.0).get({r}, 1.0)", "h = h * len({r})"),
            *("h = h * 2 if {r} == 'tanh' else h", "h = h * 2 if {r}.startswith('t') else h", "h = h * float({r})"),
            "h = {'tanh': torch.tanh, 'relu': F.relu}.get({r}, halved)(h)",
        ),
        new=("{r}.upper()", "{r} + 'x'"),
        left_new=("{r} + 'x'", "'relu' if {r} == 'tanh' else 'tanh'"),
    ),
    "none": _Kind(
        ("None", "0.5", "torch.tensor(1.5)", "None"),
        (
            *("h = h if {r} is None else h * {r}", "h = h * ({r} or 2)", "h = h + 1 if {r} is not None else h"),
            "h = h * 2 if not isinstance({r}, float) else h",
        ),
        left_new=(*_LEFT_TENSORS, "0.5", "h.detach().mean() if {r} is None else {r}", "1 if {r} is None else {r} + 1"),
    ),
    "tensor": _Kind(
        (
            *(
                "torch.tensor(1.5)",
                "torch.full((4,), 0.5)",
                "torch.arange(4.0)",
                "torch.ones(4, 1) * 2",
                "torch.tensor(2)",
            ),
            *("torch.tensor([True, False, True, False])", "torch.tensor(0.5, dtype=torch.float64)"),
        ),
        (
            *(
                "h = h * {r}",
                "h = h + {r}",
                "h = h * {r}.float().mean()",
                "h = h * float({r}.sum())",
                "h = h * {r}.item()",
            ),
            *("h = h * 2 if {r}.sum() > 1 else h", "h = torch.where({r} > 1, h, h * 0.5)", "h = h * ({r}.dim() + 1)"),
            *(
                "h = h * {r}.detach().clone()",
                "h = h + torch.as_tensor({r})",
                "h = h * {r}.numel()",
                "h = h * len({r})",
            ),
            *("h = h * (2 if {r}.dtype is torch.float32 else 1)", "h = h + {r}.tolist()[0]", "h = h - {r}.max()"),
        ),
        (
            "{r}.fill_(1)",
            "{r}.mul_(2)",
            "{r}.data = {r}.data * 2",
            "{r}[...] = 1",
            "{r}.data.mul_(3)",
            "{r}.numpy()[...] = 1",
        ),
        ("{r} * 2", "{r}.clone()", "{r}.double()"),
        ("{r}.mul_(0.9).add_(h.detach().mean() * 0.1)", "{r}.copy_(h.detach().mean())", "{r}.add_(1)"),
        _LEFT_TENSORS,
    ),
    "numbers": _Kind(
        ("(0.5, 1.5)", "(2.0,)", "[0.5, 2.0]", "[1, 2, 3]", "(1, 2)", "collections.deque([0.5, 2.0], maxlen=3)"),
        (
            *("h = h * sum({r})", "h = h * {r}[0]", "h = h * {r}[-1]", "h = h * len({r})", "h = h * max({r})"),
            *("for v in {r}: h = h * v", "h = h * torch.tensor(list({r})).sum()", "h = h * 2 if 0.5 in {r} else h"),
            *(
                "h = h * (sum({r}) / len({r}))",
                "h = h * [*{r}][0]",
                "h = h * sum(v > 1 for v in {r})",
                "h = h * sorted({r})[0]",
            ),
        ),
        (
            "{r}.append(0.25)",
            "{r}.pop()",
            "{r}[0] = 3.0",
            "{r}[0] += 1",
            "{r}.insert(0, 1.5)",
            "{r}.reverse()",
            "{r}.extend([1])",
        ),
        ("{r}[1:] + {r}[:1]", "type({r})([*{r}, 1.5])"),
        (
            *(
                "{r}.append(h.detach().mean())",
                "{r}.append(1.0)",
                "{r}.append({r}[-1] * 0.5)",
                "{r}.pop(0)",
                "{r}[0] += 1",
            ),
            *(
                "{r}.append({r}.pop(0))",
                "{r}.insert(0, 2.0)",
                "{r}[0] = h.detach().mean()",
                "{r}.extend([1, 2])",
                "{r}.reverse()",
            ),
            "{r}.append(len({r}))",
        ),
        ("{r}[1:] + {r}[:1]", "[*{r}, 1.0][-3:]", "(h.detach().mean(), {r}[0])", "[*{r}, h.detach().mean()][-2:]"),
    ),
    "table": _Kind(
        ("{'a': 0.5}", "{'a': 2.0, 'b': 1}", "collections.defaultdict(float, a=1.5)"),
        (
            *(
                "h = h * {r}['a']",
                "h = h * sum({r}.values())",
                "h = h * len({r})",
                "for k, v in {r}.items(): h = h * v",
            ),
            *("h = h * {r}.get('b', 0.5)", "h = h * 2 if 'b' in {r} else h", "h = h + len(''.join({r}))"),
        ),
        (
            "{r}['b'] = 3.0",
            "{r}['a'] += 1",
            "{r}.pop('a')",
            "{r}.update(c=0.5)",
            "del {r}['a']",
            "{r}.clear()",
            "{r}.setdefault('b', 2)",
        ),
        ("dict({r}, b=2.0)",),
        (
            *(
                "{r}['n'] = {r}.get('n', 0) + 1",
                "{r}['a'] = h.detach().mean()",
                "{r}['a'] += 1",
                "{r}.update(last=h.detach())",
            ),
            *(
                "{r}.setdefault('first', h.detach().mean())",
                "{r}.setdefault('all', []).append(1)",
                "{r}.pop('b', None)",
            ),
            "{r}['a'], {r}['b'] = 1.0, {r}['a']",
        ),
        ("dict({r}, a=h.detach().mean())", "{'a': {r}['a'] + 1}"),
    ),
    "set": _Kind(
        ("{'a'}", "{'a', 'b'}", "frozenset({'b'})"),
        ("h = h * 2 if 'b' in {r} else h", "h = h * len({r})", "h = h * (1 + len({r} & {'a'}))"),
        ("{r}.add('b')", "{r}.discard('a')", "{r}.clear()"),
        ("{r} | {'b'}",),
        ("{r}.add('b')", "{r}.discard('b')", "{r}.add(len({r}))"),
        ("{r} ^ {'b'}",),
    ),
    "function": _Kind(
        ("halved", "doubled", "torch.tanh", "(lambda h: h * 3)", "functools.partial(torch.mul, other=2.0)"),
        ("h = {r}(h)", "h = h * 2 if {r} is halved else h", "h = {r}({r}(h))"),
        new=("(lambda h, f={r}: f(h) * 2)",),
        left_new=("doubled", "halved if {r} is doubled else doubled", "(lambda h: h * 4)"),
    ),
    "enum": _Kind(
        ("Mode.A", "Mode.B", "Level.LOW", "Level.HIGH"),
        (
            *("h = h * {r}.value", "h = h * 2 if {r} is Mode.A else h", "h = h * len({r}.name)", "h = h * {r}"),
            "h = h * {Mode.A: 0.5, Mode.B: 3.0}.get({r}, 1.0)",
        ),
        left_new=("Mode.A if {r} is Mode.B else Mode.B", "Level.HIGH"),
    ),
    "array": _Kind(
        ("np.array([0.5, 2.0])", "np.full(4, 1.5, dtype=np.float32)", "np.array(2.0)"),
        (
            *("h = h * float({r}.sum())", "h = h * torch.from_numpy({r}).float().mean()", "h = h * {r}.size"),
            *("h = h + torch.tensor({r}).float().max()", "h = h * float({r}.flat[0])", "h = h * 2 if {r}.any() else h"),
        ),
        ("{r}[...] = 1", "{r}.fill(3)", "{r}.flat[0] += 1", "np.multiply({r}, 2, out={r})"),
        ("{r} * 2",),
        ("{r}.fill(2)", "{r}.flat[0] += 1"),
        ("{r} + 1",),
    ),
    "slice": _Kind(
        ("slice(0, 2)", "slice(1, None)", "range(3)"),
        ("h = h + h[:, {r}].sum(1, keepdim=True)", "h = h * ({r}.stop or 4)"),
        left_new=("slice(0, 3)",),
    ),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """The decisions of a case, as source text.

    Attributes:
        lines: Lines of a run, and where each stands.
        changes: What the user does before a step.
        init: Lines of ``__init__`` of an owner.
        before: Code before the model.
        heads: First lines of all functions.
        shown: What is compared after each step.
        form: Of the loss: a row of a table, or "function".
        way: "trainer" or "module".
    """

    lines: tuple[tuple[str, str], ...]
    changes: tuple[tuple[int, str], ...] = ()
    init: tuple[tuple[str, str], ...] = ()
    before: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    form: str = "function"
    way: str = "trainer"

    def source(self) -> str:
        """Returns the program."""

        def lines_at(where: str) -> list[str]:
            return [line for place, line in self.lines if place == where]

        def block(lines: list[str], indent: int) -> str:
            return ("\n" + " " * indent).join(line.replace("\n", "\n" + " " * indent) for line in lines or ["pass"])

        heads = [*self.heads]
        used = [where for where in dict.fromkeys(where for where, _ in self.lines) if where in _METHODS]
        functions = {}
        for where in used:
            signature, end, _, _ = _METHODS[where]
            unpack = ["(h,) = args"] if where == "pre hook" else []
            functions[where] = f"{signature}:\n    " + block([*heads, *unpack, *lines_at(where), end], 4)
        loss = {"heads": block(heads, 8), "lines": block(lines_at("loss"), 8)}
        if self.form == "function":
            text = _LOSS_FUNCTION.format(heads=block(heads, 4), lines=block(lines_at("loss"), 4))
        else:
            base, call, form = _FORMS[self.form]
            start = "super().__init__()" if base else "pass"
            init = block([line for owner, line in self.init if owner == "LOSS"], 8)
            text = _LOSS_CLASS.format(base=base, call=call, form=form, start=start, init=init, **loss)
        owned = {owner: block([line for at, line in self.init if at == owner], 8) for owner in ("net", "net.part")}
        methods = [functions[where] for where in used if where not in ("submodule", "helper")]
        return _PROGRAM.format(
            before=block([*self.before], 0),
            helper=functions.get("helper", ""),
            submodule=functions.get("submodule", "pass").replace("\n", "\n    "),
            part_init=owned["net.part"],
            net_init=owned["net"],
            hooks=block([_METHODS[where][2] for where in used if _METHODS[where][2]], 8),
            methods=block(methods, 4),
            heads=block(heads, 8),
            top=block(heads, 4),
            forward=block(lines_at("forward"), 8),
            calls=block([_METHODS[where][3] for where in used], 8),
            loss=text,
            changes=block([f"if step == {step}: {text}" for step, text in self.changes], 4),
            shown=", ".join(self.shown),
        )

    def smaller(self) -> Iterator[Case]:
        """Yields this case without one decision each."""
        yield from without_one(self, {"changes": 0, "lines": 1, "shown": 0, "init": 0, "before": 0, "heads": 0})
        for at, (where, line) in enumerate(self.lines):
            if where not in ("forward", "loss") and _WHERE[where] in ("net", ""):
                moved = (*self.lines[:at], ("forward", line), *self.lines[at + 1 :])
                yield dataclasses.replace(self, lines=moved)


class _Drawn:
    """A value at a place, for whose owner source text is written.

    Args:
        of: Draws.
        number: Of the place.
        owner: Who is ``self`` where it is read, for the user; empty in functions.
    """

    def __init__(self, of: random.Random, number: int, owner: str) -> None:
        roots = [name for name, root in _ROOTS.items() if owner or "{o}" not in repr(root)]
        if owner != "net":
            roots = [name for name in roots if ".fc" not in _ROOTS[name].read]
        if owner == "LOSS":
            roots.remove("buffer")
        name = of.choice(roots)
        self.root, self.owner, self._of, self._number = _ROOTS[name], owner, of, number
        count = 0 if name in _SPECIAL else of.choice((0, 0, 1, 1, 2))
        self._within = [_CONTAINERS[of.choice([*_CONTAINERS])] for _ in range(count)]
        self.kind = _KINDS[_SPECIAL.get(name) or of.choice([*_KINDS])]
        self._first = of.choice(self.kind.values)

    def written(self, template: str, own: str, **names: str) -> str:
        """Fills a template of the root."""
        return _fill(template, n=str(self._number), o=own, w=self._wrapped(self._first, len(self._within)), **names)

    def _wrapped(self, value: str, depth: int) -> str:
        """Returns an expression of the outermost of some containers that hold a value."""
        for make, _, _ in reversed(self._within[len(self._within) - depth :]):
            value = _fill(make, v=value)
        return value

    def read(self, own: str, depth: int | None = None) -> str:
        """Returns the expression that reads the value, or one of the containers around it."""
        text = self.written(self.root.read, own)
        for _, get, _ in self._within[: len(self._within) if depth is None else depth]:
            text = _fill(get, x=text)
        return text

    def put(self, own: str, value: str, depth: int | None = None) -> str:
        """Returns the statement that replaces the value, or one of the containers around it."""
        depth = len(self._within) if depth is None else depth
        if not depth:
            return self.written(self.root.put, own, s=value)
        make, _, put = self._within[depth - 1]
        if put:
            return _fill(put, x=self.read(own, depth - 1), s=value)
        return self.put(own, _fill(make, v=value), depth - 1)

    def use(self) -> str:
        """Returns a line that uses the value."""
        return _fill(self._of.choice(self.kind.uses), r=self.read("self"))

    def left(self) -> str:
        """Returns a line that leaves something at the place."""
        kind, of = self.kind, self._of
        if kind.left and (of.random() < 0.5 or not kind.left_new):
            line = _fill(of.choice(kind.left), r=self.read("self"))
        else:
            line = self.put("self", _fill(of.choice(kind.left_new), r=self.read("self")))
        conditions = (
            "if self.training: ",
            "if torch.is_grad_enabled(): ",
            f"if {self.read('self')} is None: ",
            "if len(h) > 3: ",
        )
        return (of.choice(conditions[not self.owner.startswith("net") :]) if of.random() < 0.2 else "") + line

    def change(self) -> str:
        """Returns a statement by which the user changes the value, or what holds it."""
        kind, of, own = self.kind, self._of, self.owner
        new = of.choice(kind.values if of.random() < 0.85 else _KINDS[of.choice([*_KINDS])].values)
        how = of.choice(("put", "put", "changed", "new", "outer", "alias", "delete"))
        if how == "changed" and kind.changed:
            return _fill(of.choice(kind.changed), r=self.read(own))
        if how == "alias" and kind.changed:
            return f"alias = {self.read(own)}; " + _fill(of.choice(kind.changed), r="alias")
        if how == "new" and kind.new:
            return self.put(own, _fill(of.choice(kind.new), r=self.read(own)))
        if how == "outer" and self._within:
            depth = of.randrange(len(self._within))
            return self.put(own, self._wrapped(new, len(self._within) - depth), depth)
        put = self.put(own, new)
        target, _, assigned = put.partition(" = ")
        return f"del {target}; {put}" if how == "delete" and assigned and "(" not in target else put


def draw(seed: int) -> Case:
    """Returns the case with a seed."""
    of = random.Random(f"living {seed}")
    lines, changes, init, before, heads, shown = [], [], [], list[str](), list[str](), []
    way = of.choice(("trainer", "module"))
    form = of.choice(("function", *_FORMS))
    for number in range(of.choice((1, 1, 2))):
        places = [where for where in _WHERE if where != "loss" or way == "trainer"]
        where = of.choice([*places, "forward", *(("loss", "loss") if way == "trainer" else ())])
        owner = "" if where == "loss" and form == "function" else _WHERE[where]
        drawn = _Drawn(of, number, owner)
        own = [other for other in places if _WHERE[other] == _WHERE[where]]
        run = [(where, drawn.use()) for _ in range(of.choice((1, 1, 2)))]
        run += [
            (of.choice(own) if of.random() < 0.3 else where, drawn.left()) for _ in range(of.choice((0, 0, 1, 1, 2)))
        ]
        of.shuffle(run)
        lines += run
        for step in of.sample(range(1, _STEPS), of.choice((0, 1, 2, 3) if len(run) > 1 else (1, 2, 3))):
            changes.append((step, drawn.change()))
        root = drawn.root
        init += [(owner, drawn.written(root.init, "self"))] if root.init else []
        before += [drawn.written(root.before, "self")] if root.before else []
        heads += [drawn.written(root.head, "self")] if root.head else []
        shown.append(drawn.read(owner))
        if root.read != "next(G{n})":
            shown.append(drawn.read(owner, 0))
    changes.sort(key=lambda change: change[0])
    return Case(
        lines=tuple(lines),
        changes=tuple(changes),
        init=tuple(init),
        before=tuple(before),
        heads=tuple(heads),
        shown=tuple(shown),
        form=form,
        way=way,
    )


def _shown(value: Any, depth: int = 0) -> Any:
    """Returns the present state of a value, as tensors, numbers, texts and lists of these."""
    if isinstance(value, torch.Tensor):
        return ["tensor", value.detach().clone()]  # a trainer leaves tensors without their gradient
    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, (type, types.FunctionType, types.MethodType, nn.Module)) or depth > 5:
        return getattr(value, "__qualname__", type(value).__name__)
    if isinstance(value, (set, frozenset)):
        return [type(value).__name__, *map(str, sorted(value, key=str))]
    if hasattr(value, "items"):
        return [type(value).__name__, *(part for key, v in value.items() for part in (str(key), _shown(v, depth + 1)))]
    if isinstance(value, (list, tuple)) or hasattr(value, "popleft") or hasattr(value, "tolist"):
        parts = value.tolist() if hasattr(value, "tolist") else value
        parts = parts if isinstance(parts, (list, tuple)) or hasattr(parts, "popleft") else [parts]
        return [type(value).__name__, *(_shown(part, depth + 1) for part in parts)]
    if isinstance(value, float):
        return ["float", torch.tensor(value, dtype=torch.float64)]
    if isinstance(value, (int, str, type(None))):
        return value
    return [type(value).__name__, _shown(getattr(value, "__dict__", {}), depth + 1)]


def _train(case: Case, text: str, way: str) -> tuple[list[tuple[str, Any]], str]:
    """Returns what a training gives after each step, and why PyTorch ran a part of it."""
    values: list[tuple[str, Any]] = []
    with running(text) as (space, warned):
        net, step_of = space["Net"](), None
        if way == "trainer":
            options = {"utils": {"grad_norm_clip": False, "random_numbers": "pytorch_global"}}
            trainer = ORTTrainer(
                net, "auto", optim.SGDConfig(lr=0.1), loss_fn=space["loss_fn"], options=ORTTrainerOptions(options)
            )
            step_of = lambda x, t: trainer.train_step(x, t)[0]  # noqa: E731
        else:
            step_of = _loop(
                net,
                ORTModule(net, {"utils": {"random_numbers": "pytorch_global"}}) if way == "module" else net,
                space["loss_fn"],
            )
        for step in range(_STEPS):
            space["change"](net, step)
            torch.manual_seed(step)
            x, t = torch.rand(4, 4) + 0.5, torch.rand(4, 4)
            values.append((f"loss {step}", step_of(x, t).detach().clone()))
            values += [(f"{name} after step {step}", p.detach().clone()) for name, p in net.state_dict().items()]
            for number, value in enumerate(space["shown"](net)):
                values += _flat(f"{case.shown[number]} after step {step}", _shown(value))
    return values, " ".join(message for message in warned if "PyTorch runs" in message)


def _flat(name: str, value: Any) -> list[tuple[str, Any]]:
    """Returns the parts of nested lists, after their number."""
    if not isinstance(value, list):
        return [(name, value)]
    return [(name, len(value)), *(pair for part in value for pair in _flat(name, part))]


def _loop(net: nn.Module, module: nn.Module, loss_fn: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_fn(module(x), t)
        loss.backward()
        optimizer.step()
        return loss

    return step


def compare(case: Case) -> Outcome:
    """Returns what becomes of a case: ``in PyTorch`` if that ran a call of an ``ORTModule``, with a warning."""
    text = case.source()
    return judge(lambda: _train(case, text, "PyTorch")[0], lambda: _train(case, text, case.way), 1e-4)


if __name__ == "__main__":
    sys.exit(main(__doc__, draw, compare))
