"""Results and arguments of calls that once differed from PyTorch, and some that the commit determines."""

from __future__ import annotations

import pytest

from .calls import Case, compare, draw
from .compare import BAD, Outcome
from .lot import drawn, shrink

ALL = ("differentiate(total(results))",)
_HOOK = "if c.requires_grad: c.register_hook(lambda g: g * 2)"
EACH = ("results[1].square().sum().backward()", "results[0].square().sum().backward()")


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        # A detached form of a result, an argument or a parameter, before or after it.
        (Case(("h = self.a(x)",), ("h", "h.detach()"), ("results[1].div_(4)", *ALL)), "equal"),
        (Case(("h = self.a(x)",), ("h.detach()", "h"), ALL), "equal"),
        (Case(("h = self.w.detach()",), ("h[:]", "self.w.detach().t()", "self.a(x)"), ALL), "equal"),
        (Case(("h = x.clone()",), ("h.detach()", "h.view(4, 4)"), ALL, arguments="x.requires_grad_()"), "equal"),
        (Case(("h = self.w.expand(4, 4)",), ("h",), context="torch.no_grad()"), "equal"),
        (Case(("h = self.w.view(2, 8)",), ("h",), context="torch.inference_mode()"), "equal"),
        # What the caller changes in place, and differentiates in parts.
        (Case((), ("self.a(x).view(2, 8)",), ("results[0].div_(2)", *ALL)), "equal"),
        (Case((), ("self.a(x)", "torch.tanh(self.b(x))"), EACH), "equal"),
        (Case((), ("torch.cat([self.w[:2], x[2:]])", "self.w.round()"), EACH), "equal"),
        (Case((), ("x * self.w", "c * self.w"), EACH, kernels="onnxruntime"), "refused"),
        # New values with a history, and hooks that would stay, are left to PyTorch.
        (Case(("self.m.mul_(0.9).add_(self.w * 0.1)",), ("self.a(x)",), ALL), "in PyTorch"),
        (Case(("self.m = self.m * 0.9", "self.m[:, 0].add_(self.w[0])"), ("self.a(x)",), ALL), "in PyTorch"),
        (Case(("c.add_(self.w)",), ("self.w.relu()",), ALL), "in PyTorch"),
        (Case(("self.m = self.m * 0.9 + x.detach()",), ("self.m",)), "in PyTorch"),
        (Case(("h = self.m.view(2, 8)", "self.m = self.m * 0.9"), ("h",)), "in PyTorch"),
        (Case(("with torch.no_grad(): h = self.w[:]",), ("h",)), "in PyTorch"),
        (Case(("with torch.no_grad(): h = x[:]",), ("x", "h.view(-1)"), arguments="x.requires_grad_()"), "in PyTorch"),
        (Case(("with torch.no_grad(): h = self.w.t()",), ("h.exp()",)), "in PyTorch"),
        (Case(("with torch.enable_grad(): h = self.w[:]",), ("h",), ALL, context="torch.no_grad()"), "in PyTorch"),
        (Case((_HOOK,), ("c",), ALL, context="torch.inference_mode()", arguments="c.requires_grad_()"), "in PyTorch"),
        # Parts have histories of their own.
        (Case((), ("x", "self.w.float()"), EACH, arguments="x.requires_grad_(); x = x * 1"), "equal"),
        (Case(("self.w.register_hook(lambda g: g * 2)",), ("x * self.w",), ALL), "in PyTorch"),
        (Case(("h = self.a(x)", "h.retain_grad()"), ("h.tanh()",), ALL), "in PyTorch"),
        (Case(("h = self.a(x)", "h.register_hook(lambda g: g * 2)"), ("h.tanh()",), ALL), "equal"),
        (
            Case(("h = c[:]", _HOOK.replace("c.reg", "h.reg")), ("h",), ALL, arguments="c.requires_grad_()"),
            "in PyTorch",
        ),
        # Numbers that are computed from sizes, between the other results.
        (Case((), ("len(d) * 2", "self.a(x)", "(d.numel() / 3, {'rows': d.size(0)})"), ALL), "equal"),
        (Case(("h = self.a(x)",), ("h", "d.size(0) > 3", "h.detach()", "f'{d.size(0)}'"), ALL), "equal"),
        # A graph of no operator at all.
        (Case((), ("self.w", "len(d)", "x", "d.size(0)"), ALL, kernels="onnxruntime"), "equal"),
    ],
    ids=lambda value: f"{value.forward} {value.results}" if isinstance(value, Case) else value,
)
def test_a_call(case: Case, kind: str) -> None:
    outcome = compare(case)
    assert outcome.kind == kind, outcome.text


def test_cases_of_this_commit(seed: int) -> None:
    for case, outcome in drawn(draw, compare, seed):
        assert outcome.kind not in BAD, f"python -m tests.fuzz.calls --case {case}: {outcome}"


def test_shrinking_leaves_what_fails() -> None:
    def fails(case: Case) -> Outcome:
        return Outcome("wrong" if "h1 = x.t()" in case.forward and "x" in case.results else "equal")

    case = Case(("h0 = x * 2", "h1 = x.t()"), ("h0", "x"), ALL, arguments="c = x", zero="pass")
    assert shrink(case, fails(case), fails) == Case(("h1 = x.t()",), ("x",))
