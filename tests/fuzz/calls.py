"""Draws modules by what they return and change, calls them as an ``ORTModule`` and in PyTorch, and compares both.

A result may be another result, an argument, a parameter, a buffer, a view or a detached form of one; forward and the
caller change tensors in place; the caller differentiates results once, several times or never. Equal must be values,
gradients, what requires grad, which tensors are one, and which share memory.
"""

from __future__ import annotations

import random
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ort_trainer
from ort_trainer import ORTModule

from .compare import Outcome

__all__ = ["compare", "draw", "source"]

_PROGRAM = """
import contextlib, torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.w = nn.Linear(4, 4), nn.Linear(4, 4), nn.Parameter(torch.rand(4, 4) + 0.5)
        self.register_buffer("m", torch.rand(4, 4) + 0.5)
    def inner(self, t):
        return torch.tanh(self.b(t))
    def forward(self, x, c):
        {forward}
        return {returned}

def call(wrap):
    net, noted = Net(), []
    f = wrap(net)
    def note(name, value):
        noted.append((name, value))
    for step in range(2):
        g = torch.Generator().manual_seed(step)
        x, c = torch.rand(4, 4, generator=g) + 0.5, torch.rand(4, 4, generator=g) + 0.5
        leaves = [x, c]
        {arguments}
        with {context}:
            results = f(x, c)
        {caller}
        tensors = [x, c, net.a.weight, net.w, net.m, *results]
        for i, t in enumerate(tensors):
            note(f"tensor {{i}}", t.detach().clone())
            note(f"requires grad {{i}}", t.requires_grad)
            note(f"ids {{i}}", [u is t for u in tensors[:i]])
            note(f"memory {{i}}", [u.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() for u in tensors[:i]])
        for name, t in [*net.named_parameters(), *zip("xc", leaves)]:
            note(f"gradient {{name}}", None if t.grad is None else t.grad.clone())
        with torch.no_grad():
            for p in net.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
            {zero}
    return noted
"""
_NEW = ("self.a({v})", "self.inner({v})", "torch.tanh({v})", "{v} * {u}", "{v} + {u}", "{v}.square()", "{v} * 2", "{v}.exp()", "{v} @ {u}", "{v}.clone()")
_NEW += ("checkpoint(self.inner, {v}, use_reentrant=False)", "torch.where({v} > 1, {v}, {u})", "{v}.relu()", "torch.cat([{v}[:2], {u}[2:]])")
_VIEWS = ("{v}.t()", "{v}.view(4, 4)", "{v}.view(2, 8).view(4, 4)", "{v}[:]", "{v}.contiguous()", "{v}.float()", "{v}.expand(4, 4)")
_ENDS = ("{v}.view(-1)", "{v}.view(2, 8)", "{v}[0]", "{v}[:, 1:3]", "{v}.sum()", "{v}.mean(0)", "{v}.unsqueeze(0)", "{v}.flatten()", "{v}.chunk(2)[1]", "{v} > 1", "{v}.round()", "{v}.argmax(1)", "{v}.double()", "{v}.t().contiguous()")
_DETACHED = ("{v}.detach()", "{v}.detach().t()", "{v}.detach().clone()", "{v}.detach() * {u}", "({u} - {v}).detach() + {v}")
_IN_PLACE = ("{v}.mul_(0.5)", "{v}.add_({u})", "{v}.copy_({u})", "{v}[0] = 1.0", "{v}.relu_()", "{v}[:, 0].add_({u}[:, 1])")
_OF_BUFFER = ("self.m.mul_(0.9).add_({v} * 0.1)", "self.m.mul_(0.9).add_({v}.detach() * 0.1)", "self.m.copy_({v})", "self.m.add_(1)", "self.m = self.m * 0.9 + {v}.detach()")
_GUARDED = ("with torch.no_grad(): {n} = {e}", "with torch.enable_grad(): {n} = {e}", "with torch.autocast('cpu', torch.bfloat16): {n} = ({e}).float()", "with torch.autocast('cpu', enabled=False): {n} = {e}")
_HOOKS = ("if {v}.requires_grad: {v}.register_hook(lambda g: g * 2)",)
_ARGUMENTS = ("pass", "x.requires_grad_()", "c.requires_grad_()", "x.requires_grad_(); x = x * 1", "c.requires_grad_(); c = c * 1", "x.requires_grad_(); c = x", "c = x", "c = x.detach()", "x = x.t()", "c = c[:]")
_CONTEXTS = ("contextlib.nullcontext()",) * 5 + ("torch.no_grad()", "torch.inference_mode()", "torch.autocast('cpu', torch.bfloat16)")
_CHANGES = ("results[{i}].div_(2)", "results[{i}].add_(1)", "results[{i}].detach().mul_(2)", "with torch.no_grad(): results[{i}].mul_(2)", "results[{i}].zero_()", "x = results[{i}]; x.mul_(2)")
_BACKWARD = "[r for r in ({r},) if r.requires_grad]"


def draw(seed: int) -> tuple[list[str], list[str], list[str], str, str, str]:
    """Returns the decisions of a case: lines of forward, results, the caller's lines, context, arguments, zeroing."""
    r = random.Random(f"call {seed}")
    pool, lines = ["x", "c", "self.w", "self.m", "x"], []
    ends: list[str] = []

    def one(of: list[str]) -> str:
        return r.choice(of[-4:] if r.random() < 0.6 else of)

    for number in range(r.randint(1, 6)):
        name, kind = f"h{number}", r.random()
        v, u = one(pool), one(pool)
        if kind < 0.45:
            expression = r.choice(_NEW)
        elif kind < 0.6:
            expression = r.choice(_VIEWS)
        elif kind < 0.72:
            expression = r.choice(_DETACHED)
        elif kind < 0.82:
            lines.append(r.choice(_IN_PLACE).format(v=r.choice([v, "c", v]), u=u))
            continue
        elif kind < 0.87:
            lines.append(r.choice(_OF_BUFFER).format(v=v))
            continue
        elif kind < 0.9:
            lines.append(r.choice(_HOOKS).format(v=v))
            continue
        else:
            expression = r.choice(_ENDS)
            ends.append(name)
            lines.append(f"{name} = {expression.format(v=v, u=u)}")
            continue
        text = f"{name} = {expression.format(v=v, u=u)}"
        if r.random() < 0.15:
            text = r.choice(_GUARDED).format(n=name, e=expression.format(v=v, u=u))
        lines.append(text)
        pool.append(name)
    results = []
    for _ in range(r.choice((1, 1, 2, 2, 3, 4))):
        value = r.choice([*pool[-3:], *ends, r.choice(pool)])
        form = "{v}"
        if r.random() < 0.4 and value not in ends:
            form = r.choice((*_ENDS, *_DETACHED, *_VIEWS, *_NEW))
        results.append(form.format(v=value, u=r.choice(pool)))
    caller, count = [], len(results)
    for _ in range(r.choice((0, 0, 1, 2))):
        caller.append(r.choice(_CHANGES).format(i=r.randrange(count)))
    places = [str(i) for i in range(count)]
    how = r.choice(("one", "one", "all", "all", "each", "each", "retained", "state", "none"))
    chosen = places if how != "one" else [r.choice(places)]
    total = "sum((results[i].float() * (i + 1)).sum() for i in (%s,) if results[i].requires_grad)"
    if how in ("one", "all"):
        caller.append(f"l = {total % ','.join(chosen)}; l.backward() if torch.is_tensor(l) else None")
    elif how == "state":
        caller.append(f"l = {total % ','.join(chosen)} + sum(t.square().sum() for t in (c, net.m, net.w)); l.backward() if torch.is_tensor(l) and l.requires_grad else None")
    elif how != "none":
        keep = "retain_graph=True" if how == "retained" else ""
        for i in r.sample(chosen, len(chosen)):
            caller.append(f"results[{i}].float().square().sum().backward({keep}) if results[{i}].requires_grad else None")
    zero = r.choice(("net.zero_grad()", "net.zero_grad(set_to_none=False)", "pass"))
    return lines, results, caller, r.choice(_CONTEXTS), r.choice(_ARGUMENTS), zero


def source(case: Any) -> str:
    """Returns a case as source text."""
    lines, results, caller, context, arguments, zero = case
    return _PROGRAM.format(
        forward="\n        ".join(lines or ["pass"]),
        returned="".join(f"{result}, " for result in results),
        caller="\n        ".join(caller or ["pass"]),
        context=context,
        arguments=arguments,
        zero=zero,
    )


def _run(text: str, wrap: Callable[[Any], Any]) -> tuple[list[tuple[str, Any]], str]:
    space: dict[str, Any] = {"__name__": "drawn"}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import linecache
        linecache.cache["<drawn>"] = (len(text), None, text.splitlines(True), "<drawn>")
        exec(compile(text, "<drawn>", "exec"), space)
        noted = space["call"](wrap)
    ran = [str(w.message) for w in caught if "PyTorch runs" in str(w.message)]
    return noted, " ".join(ran)


def compare(case: Any) -> Outcome:
    """Returns what becomes of a case as an ``ORTModule``."""
    text = source(case)
    try:
        theirs, _ = _run(text, lambda module: module)
    except Exception as error:
        return Outcome("dropped", f"{type(error).__name__}: {error}")
    try:
        ours, fallback = _run(text, ORTModule)
    except Exception as error:
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        own = files[-1].startswith(str(Path(ort_trainer.__file__).parent))
        return Outcome("refused" if own else "raw error", f"{type(error).__name__}: {error}", files[-1])
    for (name, mine), (_, other) in zip(ours, theirs, strict=True):
        if isinstance(mine, torch.Tensor) and isinstance(other, torch.Tensor):
            same = mine.shape == other.shape and mine.dtype == other.dtype
            loose = 2e-2 if "bfloat16" in text else 1e-4
            same = same and torch.allclose(mine.double(), other.double(), rtol=loose, atol=loose * max(1e-1, other.double().abs().nan_to_num().max().item() if other.numel() else 0), equal_nan=True)
        else:
            same = mine == other if not isinstance(mine, torch.Tensor) and not isinstance(other, torch.Tensor) else False
        if not same:
            return Outcome("wrong", f"{name}: {mine} for {other}" + (f" ({fallback})" if fallback else ""))
    return Outcome("in PyTorch" if fallback else "equal", fallback)
