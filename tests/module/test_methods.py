"""Methods beside ``forward``: as graphs where they are named, with a warning where they train in PyTorch."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from ort_trainer import ORTModule
from ort_trainer.core.report import Report

from .pairs import close

METHODS = ["act", "value"]


class Agent(nn.Module):
    """An actor and a critic, as scripts of reinforcement learning write them: without ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.actor, self.critic = nn.Linear(4, 2), nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.0), nn.Linear(3, 1))
        self.scale = 1.0
        self.register_buffer("calls", torch.zeros(()))

    def act(self, x: torch.Tensor, factor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        return self.actor(x) * self.scale * factor, self.value(x)

    def value(self, x: torch.Tensor) -> torch.Tensor:
        return self.critic(x) / self.calls

    def by_value(self, x: torch.Tensor) -> torch.Tensor:
        return self.value(x) if float(x.sum()) > 0 else -self.value(x)


def trained(agent: Any, steps: int = 6) -> list[torch.Tensor]:
    """Trains an agent, changes what its methods read, and returns losses and weights."""
    optimizer, losses, draw = torch.optim.Adam(agent.parameters(), 1e-2), [], torch.Generator().manual_seed(1)
    for step in range(steps):
        x = torch.randn(5, 4, generator=draw)
        logits, value = agent.act(x, factor=0.5)
        loss = logits.square().mean() + value.mean() + agent.value(x[:3]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if step == 2:
            agent.scale = 3.0
        if step == 3:
            agent.eval()
    return [*losses, *(value.detach() for value in agent.state_dict().values())]


def counts(report: Report) -> dict[str, int]:
    """Returns how often each method has run as a graph."""
    return {name: sum(graph.runs for graph in report.graphs if graph.name == name) for name in (*METHODS, "forward")}


def test_named_methods_are_graphs() -> None:
    model = ORTModule(Agent(), fallback="error", methods=METHODS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(trained(model), trained(Agent()))
    report = model.report()
    assert counts(report) == {"act": 6, "value": 6, "forward": 0} and not report.in_pytorch
    assert all(graph.seconds > 0 and graph.kernels == "PyTorch's" for graph in report.graphs)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_have_methods_of_their_own(copied: Callable[[Any], Any]) -> None:
    model = ORTModule(Agent(), methods=METHODS)
    model.act(torch.ones(2, 4))
    other = copied(model)
    with torch.no_grad():
        other.critic[2].bias.fill_(9.0)
    close(other.value(torch.ones(2, 4)), other.module.value(torch.ones(2, 4)))
    assert counts(other.report()) == {"act": 0, "value": 1, "forward": 0} and not model.calls.ne(1)


def test_a_method_that_is_no_graph_runs_in_pytorch() -> None:
    model, x = ORTModule(Agent(), methods=["by_value"]), torch.ones(2, 4)
    model.calls += 1
    with pytest.warns(UserWarning, match=r"(?s)call of Agent.by_value.*float\(x.sum"):
        close(model.by_value(-x), model.module.by_value(-x))
    (reason,) = model.report().in_pytorch
    assert "Agent.by_value" in reason and "in PyTorch, 1 calls: " in str(model.report())


@pytest.mark.parametrize("policy", ["warn", "error"])
def test_a_module_whose_forward_never_runs(policy: str) -> None:
    model = ORTModule(Agent(), fallback=policy)
    message = r"parameters of Agent, but its forward\(\) was never called.*methods=\['act', 'by_value', 'value'\]"
    if policy == "error":
        with pytest.raises(RuntimeError, match=message):
            trained(model)
        return
    with pytest.warns(UserWarning, match=message) as record:
        trained(model)
    assert len(record) == 1 and record[0].filename == __file__


def test_an_optimizer_whose_state_is_made_before_a_run() -> None:
    model = ORTModule(nn.Linear(4, 2), fallback="error")
    optimizer = torch.optim.Adam(model.parameters())
    get_optimizer_state_dict(nn.Sequential(model), optimizer)
    assert optimizer.state and not optimizer.state[model.weight]["exp_avg"].any()


def test_a_module_that_is_not_trained_or_is_called() -> None:
    idle, called = ORTModule(Agent(), fallback="error"), ORTModule(nn.Linear(4, 2), fallback="error")
    idle.act(torch.ones(2, 4))
    called(torch.ones(2, 4)).sum().backward()
    torch.optim.SGD([*called.parameters(), *idle.parameters()], 0.1).step()
    assert counts(called.report())["forward"] == 1


@pytest.mark.parametrize(
    ("methods", "error", "message"),
    [
        (["forward"], ValueError, "'forward', which is a graph in any case"),
        ("value", TypeError, r"write \['value'\]"),
        (["nothing"], ValueError, r"'nothing', but Agent has \['act', 'by_value', 'value'\]"),
        (["half"], ValueError, "'half', but Agent has"),
    ],
)
def test_names_of_methods_are_checked(methods: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ORTModule(Agent(), methods=methods)


def test_a_report_of_the_users_own() -> None:
    class Reporting(nn.Linear):
        def report(self, what: str) -> str:
            return f"mine: {what}"

    assert ORTModule(Reporting(2, 2)).report("x") == "mine: x"
