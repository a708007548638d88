"""Draws modules by what they return and change, calls them as an ``ORTModule`` and in PyTorch, and compares both.

A result may be another result, an argument, a parameter, a buffer, a view or a detached form of one, or a number.
Forward and the caller change tensors in place. The caller differentiates results once, one after the other, or never.
Values, gradients, what requires grad, which tensors are one, and which share memory must be PyTorch's.

``python -m tests.fuzz.calls --minutes 20`` draws and shrinks cases, ``--case SEED`` repeats one.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

from ort_trainer import ORTModule

from .compare import BAD, Outcome
from .lot import judge, main, running, without_one

__all__ = ["Case", "compare", "draw"]

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
    def forward(self, x, c, d):
        {forward}
        return {returned}

def total(results):
    return sum((r.float() * (i + 1)).sum() for i, r in enumerate(results) if r.requires_grad)

def differentiate(loss):
    if torch.is_tensor(loss) and loss.requires_grad:
        loss.backward()

def call(wrap):
    net = Net()
    module = wrap(net)
    for step in range(2):
        g = torch.Generator().manual_seed(step)
        x, c = torch.rand(4, 4, generator=g) + 0.5, torch.rand(4, 4, generator=g) + 0.5
        leaves = [x, c]
        {arguments}
        with {context}:
            results = module(x, c, torch.zeros(step + 3, 2))
        yield "numbers", [r for r in results if not torch.is_tensor(r)]
        results = [r for r in results if torch.is_tensor(r)]
        {caller}
        tensors = [x, c, net.a.weight, net.w, net.m, *results]
        for i, t in enumerate(tensors):
            yield f"tensor {{i}}", t.detach().clone()
            yield f"requires grad {{i}}", t.requires_grad
            yield f"the same as {{i}}", [u is t for u in tensors[:i]]
            yield f"memory of {{i}}", [u.untyped_storage()._cdata == t.untyped_storage()._cdata for u in tensors[:i]]
        for name, t in [*net.named_parameters(), *zip("xc", leaves)]:
            yield f"gradient of {{name}}", None if t.grad is None else t.grad.clone()
        with torch.no_grad():
            for p in net.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad
            {zero}
"""
_NEW = (
    *("self.a({v})", "self.inner({v})", "torch.tanh({v})", "{v} * {u}", "{v} + {u}", "{v}.square()", "{v} * 2"),
    *("{v}.exp()", "{v} @ {u}", "{v}.clone()", "checkpoint(self.inner, {v}, use_reentrant=False)", "{v}.relu()"),
    *("torch.where({v} > 1, {v}, {u})", "torch.cat([{v}[:2], {u}[2:]])"),
)
_VIEWS = (
    *("{v}.t()", "{v}.view(4, 4)", "{v}.view(2, 8).view(4, 4)", "{v}[:]", "{v}.contiguous()", "{v}.float()"),
    "{v}.expand(4, 4)",
)
# What has another shape or dtype is only returned.
_ENDS = (
    *("{v}.view(-1)", "{v}.view(2, 8)", "{v}[0]", "{v}[:, 1:3]", "{v}.sum()", "{v}.mean(0)", "{v}.unsqueeze(0)"),
    *("{v}.flatten()", "{v}.chunk(2)[1]", "{v} > 1", "{v}.round()", "{v}.argmax(1)", "{v}.double()"),
    "{v}.t().contiguous()",
)
_DETACHED = (
    *("{v}.detach()", "{v}.detach().t()", "{v}.detach().clone()", "{v}.detach() * {u}", "({u} - {v}).detach() + {v}"),
)
_IN_PLACE = (
    *("{v}.mul_(0.5)", "{v}.add_({u})", "{v}.copy_({u})", "{v}[0] = 1.0", "{v}.relu_()", "{v}[:, 0].add_({u}[:, 1])"),
    *("c.copy_({u})", "c.add_({u})", "self.m.mul_(0.9).add_({v} * 0.1)", "self.m.mul_(0.9).add_({v}.detach() * 0.1)"),
    *("self.m.copy_({v})", "self.m.add_(1)", "self.m = self.m * 0.9 + {v}.detach()"),
    *("if {v}.requires_grad: {v}.register_hook(lambda g: g * 2)", "{v}.requires_grad and {v}.retain_grad()"),
)
_GUARDED = (
    "with torch.no_grad(): {n} = {e}",
    "with torch.enable_grad(): {n} = {e}",
    "with torch.autocast('cpu', torch.bfloat16): {n} = ({e}).float()",
    "with torch.autocast('cpu', enabled=False): {n} = {e}",
)
# Of the sizes of an argument, which differ from call to call.
_NUMBERS = (
    *("d.shape[0]", "len(d) * 2 - 1", "d.numel() / 3", "d.size(0) > 3", "tuple(d.shape)", "[d.size(0), 'rows']"),
    *("{'rows': d.size(0), 'twice': (d.size(0) * 2,)}", "f'{d.size(0)}'", "d.size(0) + self.w.size(0)", "d.size(1)"),
)
_ARGUMENTS = (
    *(
        "pass",
        "x.requires_grad_()",
        "c.requires_grad_()",
        "x.requires_grad_(); x = x * 1",
        "c.requires_grad_(); c = c * 1",
    ),
    *("x.requires_grad_(); c = x", "c = x", "c = x.detach()", "x = x.t()", "c = c[:]"),
)
_CONTEXTS = (
    *("contextlib.nullcontext()",) * 5,
    *("torch.no_grad()", "torch.inference_mode()", "torch.autocast('cpu', torch.bfloat16)"),
)
_CHANGES = (
    *("results[{i}].div_(2)", "results[{i}].add_(1)", "results[{i}].detach().mul_(2)", "results[{i}].zero_()"),
    *("with torch.no_grad(): results[{i}].mul_(2)", "x = results[{i}]; x.mul_(2)"),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """The decisions of a case, as source text.

    Attributes:
        forward: Lines of forward.
        results: What it returns.
        caller: What the caller does with the results.
        context: The context of the call.
        arguments: What becomes of the arguments before.
        zero: What becomes of gradients after a step.
        kernels: The option of the module.
    """

    forward: tuple[str, ...]
    results: tuple[str, ...]
    caller: tuple[str, ...] = ()
    context: str = _CONTEXTS[0]
    arguments: str = "pass"
    zero: str = "net.zero_grad()"
    kernels: str = "auto"

    def source(self) -> str:
        """Returns the program."""
        return _PROGRAM.format(
            forward="\n        ".join(self.forward or ("pass",)),
            returned="".join(f"{result}, " for result in self.results),
            caller="\n        ".join(self.caller or ("pass",)),
            **{name: getattr(self, name) for name in ("context", "arguments", "zero")},
        )

    def smaller(self) -> Iterator[Case]:
        """Yields this case without one decision each."""
        yield from without_one(self, {"caller": 0, "results": 1, "forward": 0})
        for field in dataclasses.fields(self)[3:]:
            if getattr(self, field.name) != field.default:
                yield dataclasses.replace(self, **{field.name: field.default})


def draw(seed: int) -> Case:
    """Returns the case with a seed."""
    of = random.Random(f"call {seed}")
    values, ends, lines = ["x", "c", "self.w", "self.m", "x"], list[str](), list[str]()

    def filled(texts: tuple[str, ...], **names: Any) -> str:
        v, u = (of.choice(values[-4:] if of.random() < 0.6 else values) for _ in range(2))
        return of.choice(texts).format(v=v, u=u, **names)

    for number in range(of.randint(1, 6)):
        name, kind = f"h{number}", of.choices(("new", "view", "detached", "in place", "end"), (45, 15, 12, 18, 10))[0]
        if kind == "in place":
            lines.append(filled(_IN_PLACE))
            continue
        value = filled({"new": _NEW, "view": _VIEWS, "detached": _DETACHED, "end": _ENDS}[kind])
        guard = of.choice(_GUARDED) if kind != "end" and of.random() < 0.15 else "{n} = {e}"
        lines.append(guard.format(n=name, e=value))
        (ends if kind == "end" else values).append(name)
    results = []
    for _ in range(of.choice((1, 1, 2, 2, 3, 4))):
        value = of.choice([*values[-3:], *ends, of.choice(values)])
        form = of.choice((*_ENDS, *_DETACHED, *_VIEWS, *_NEW)) if of.random() < 0.4 and value not in ends else "{v}"
        results.append(form.format(v=value, u=of.choice(values)))
    places = range(len(results))
    caller = [of.choice(_CHANGES).format(i=of.choice(places)) for _ in range(of.choice((0, 0, 1, 2)))]
    kernels = of.choices(("auto", "onnxruntime"), (9, 1))[0]
    how = of.choice(("one", "one", "all", "all", "each", "each", "retained", "state", "none"))
    if how == "one":
        caller.append(f"differentiate(total([results[{of.choice(places)}]]))")
    elif how == "all":
        caller.append("differentiate(total(results))")
    elif how == "state":
        caller.append("differentiate(total(results) + sum(t.square().sum() for t in (c, net.m, net.w)))")
    elif how != "none" and kernels == "auto":
        keep = "retain_graph=True" if how == "retained" else ""
        losses = (f"results[{i}]" for i in of.sample(places, len(places)))
        caller += [f"if {r}.requires_grad: {r}.float().square().sum().backward({keep})" for r in losses]
    zero = of.choice(("net.zero_grad()", "net.zero_grad(set_to_none=False)", "pass"))
    context, arguments = of.choice(_CONTEXTS), of.choice(_ARGUMENTS)
    for _ in range(of.choice((0, 0, 0, 1, 2))):
        results.insert(of.randint(0, len(results)), of.choice(_NUMBERS))
    return Case(tuple(lines), tuple(results), tuple(caller), context, arguments, zero, kernels)


def compare(case: Case) -> Outcome:
    """Returns what becomes of a case as an ``ORTModule``: ``in PyTorch`` if that ran a call, with a warning."""
    text = case.source()

    def run(wrap: Callable[[Any], Any]) -> tuple[list[tuple[str, Any]], str]:
        with running(text) as (space, warned):
            found = [*space["call"](wrap)]
        return found, " ".join(message for message in warned if "PyTorch runs" in message)

    return judge(
        lambda: run(lambda module: module)[0],
        lambda: run(lambda module: ORTModule(module, {"utils": {"kernels": case.kernels}})),
        2e-2 if "bfloat16" in text else 1e-4,
    )


if __name__ == "__main__":
    sys.exit(main(__doc__, draw, compare, (*BAD, "refused")))
