"""``debug.verify_every`` of an ``ORTModule``: calls and backward passes that PyTorch computes otherwise are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce

from ort_trainer import ORTModule, VerificationError
from ort_trainer.capture import verification
from ort_trainer.guard.reads import Reads
from ort_trainer.module.verify import _EagerCall

from .pairs import Heads, assert_same_gradients, close, pair

VERIFIED = {"debug": {"verify_every": 1}}
X, Y = torch.randn(5, 6, generator=torch.Generator().manual_seed(3)), torch.tensor([0, 1, 2, 1, 0])


@pytest.fixture(autouse=True)
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the guard see no change of what is read outside tensors."""
    monkeypatch.setattr(Reads, "_look", lambda reads: None)


class Outside:
    """Holds values whose changes no guard sees in these tests."""

    factor, slope, word = 1.0, 1.0, 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.norm, self.dropout = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.5)
        self.outside, self.calls = Outside(), []

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        self.calls.append(1)
        hidden = self.dropout(self.norm(self.linear(x)))
        # With another slope, the same value with another gradient.
        return (
            hidden.detach() + (hidden - hidden.detach()) * self.outside.slope
        ) * self.outside.factor, self.outside.word


@pytest.fixture(scope="module")
def ours() -> ORTModule:
    return ORTModule(Model(), {**VERIFIED, "utils": {"random_numbers": "pytorch"}})


def state(ours: ORTModule) -> list[Any]:
    gradients = [None if p.grad is None else p.grad.clone() for p in ours.parameters()]
    return [*(value.clone() for value in ours.state_dict().values()), *gradients, torch.get_rng_state()]


def assert_same(now: list[Any], before: list[Any]) -> None:
    for one, other in zip(now, before, strict=True):
        assert one is other or torch.equal(one, other)


def test_calls_are_compared(ours: ORTModule, monkeypatch: pytest.MonkeyPatch) -> None:
    ours(X)
    before = state(ours)
    with monkeypatch.context() as patch:
        patch.setattr(ours.module.outside, "factor", 2.0)
        with pytest.raises(VerificationError, match=r"call \d+ of Model differs .*'output.0' is .* at \[\d, \d\], and"):
            ours(X)
    with monkeypatch.context() as patch:
        patch.setattr(ours.module.outside, "word", 2)
        with pytest.raises(VerificationError, match=r"forward\(\) returns the constants \['2'\], and the graph"):
            ours(X)
    assert_same(state(ours), before)
    assert ours.module.calls == [1], "a call that is refused leaves nothing"
    ours(X)


def test_gradients_are_compared(ours: ORTModule, monkeypatch: pytest.MonkeyPatch) -> None:
    ours.zero_grad()
    x = X.clone().requires_grad_()
    ours(x)
    with monkeypatch.context() as patch:
        patch.setattr(ours.module.outside, "slope", 2.0)
        result, _ = ours(x)
        before = state(ours)
        with pytest.raises(
            VerificationError, match="the gradient of 'linear.weight' is .*The gradients of this call were"
        ):
            (result * torch.rand(5, 6)).sum().backward()
        assert_same(state(ours)[:-1], before[:-1])
    assert x.grad is None and ours.linear.weight.grad is None
    result, _ = ours(x)
    result.pow(2).sum().backward()
    assert x.grad is not None and ours.linear.weight.grad is not None


def test_it_computes_what_it_computes_without_it() -> None:
    """With a batch norm, several outputs, hooks of parameters that autograd calls once, and two open calls."""
    eager, ours = pair(Heads(), VERIFIED)
    calls: list[int] = []
    ours.first.weight.register_hook(lambda gradient: calls.append(1))
    for part in ("loss", "class", "turned"):

        def run(module: nn.Module, part: str = part) -> None:
            result = module(X, label=Y)
            other = module(X * 2)
            value = result[part].float().sum() + other["heads"][1].sum() + result["heads"][0].sum()
            value.backward()

        assert_same_gradients(eager, ours, run)
        close(list(ours.buffers()), list(eager.buffers()))
    assert len(calls) == 3
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            close(ours(X), eager(X))


class Recurrent(nn.Module):
    """Reads what the call before has left, also in a table that depends on sizes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.state, self.table = nn.Linear(6, 6), torch.zeros(6), None
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(x.shape[1]) * 2.0
        y = torch.tanh(self.linear(x + self.table) * (self.state + 1) + self.mean)
        self.state, self.mean = y.detach().mean(0), self.mean * 0.5 + y.detach().amax(0)
        return y


def test_a_backward_pass_begins_with_what_its_call_has_found() -> None:
    eager, ours = pair(Recurrent(), VERIFIED)

    def run(module: nn.Module) -> None:
        results = [module(X * factor) for factor in (1.0, 2.0, 3.0)]
        sum(result.square().sum() for result in results).backward()

    assert_same_gradients(eager, ours, run)
    close([ours.state, ours.mean], [eager.state, eager.mean])


class Positions(nn.Module):
    """Its graph keeps a buffer for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.register_buffer("places", torch.arange(6))
        self.register_buffer("scale", torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.embedding(self.places) * self.scale) @ torch.ones(4, 1) * x


def test_buffers_that_autograd_has_saved_do_not_count_as_changed() -> None:
    eager, ours = pair(Positions(), {"debug": {"verify_every": 2}})

    def run(module: nn.Module) -> None:
        saved = module.scale * module.embedding.weight
        (module(X.t()).sum() + module(X.t()).sum() + saved.sum()).backward()

    ours(X.t())  # exports
    for _ in range(2):
        assert_same_gradients(eager, ours, run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype) -> None:
    ours = ORTModule(Heads(), VERIFIED)
    with torch.autocast("cpu", dtype):
        loss = ours(X, label=Y)["loss"]
    loss.backward()


def test_each_so_many_th_call() -> None:
    ours = ORTModule(Model().eval(), {"debug": {"verify_every": 3}})
    for _ in range(2):
        ours(X)
    ours.module.outside.factor = 2.0
    with pytest.raises(VerificationError, match="call 3 of Model"):
        ours(X)
    assert ORTModule(Model(), {"debug": {"verify_every": 0}})._verifier is None


@pytest.mark.parametrize("what", ["factor", "slope"])
def test_graphs_are_made_anew_once_and_then_pytorch_runs(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "_COSTS", (math.inf, math.inf))  # whatever the machine's other work
    ours = ORTModule(Model().eval(), {"debug": {"verify_every": "auto"}})
    eager = Model().eval()

    def gradient(module: Any) -> torch.Tensor:
        module.zero_grad()
        module(X)[0].sum().backward()
        return torch.cat([parameter.grad.flatten() for parameter in module.parameters()])

    def both(value: float) -> None:
        for module in (ours.module, eager):
            setattr(module.outside, what, value)
        torch.testing.assert_close(gradient(ours), gradient(eager))

    both(1.0)
    with pytest.warns(UserWarning, match="made anew, once"):
        both(2.0)
        both(2.0)
    both(2.0)
    with pytest.warns(
        UserWarning, match="PyTorch runs this call of Model, and others like it, instead of a graph: call"
    ):
        ours._verifier._turns.expect()
        both(3.0)
        both(3.0)
    both(4.0)


class Summed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return all_reduce(x, "sum", dist.group.WORLD) * 2


def test_calls_of_several_processes_together_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process decides by its own clock and memory, and one that repeats a call alone would wait forever."""
    compared: list[nn.Module] = []
    monkeypatch.setattr(_EagerCall, "check", lambda call, *_: compared.append(call._module))
    alone, together = ORTModule(nn.Tanh()), ORTModule(Summed())
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with torch.no_grad():
            for module in (alone, together):
                module(X)
            assert torch.equal(together(X), X * 2)
    finally:
        dist.destroy_process_group()
    assert compared == [alone.module]
