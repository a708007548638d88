"""``utils.kernels="fastest"``: calls take turns with compiled loops, forward and backward pass, and the faster stay."""

from __future__ import annotations

import copy
import logging
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTModule, ORTTrainerOptions

from ..racing import fix_race, needs_compiler
from .pairs import close

FASTEST = ORTTrainerOptions({"utils": {"kernels": "fastest"}})


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 3))


def loops_run(module: ORTModule) -> list[bool]:
    """Returns of the graphs with a backward pass, the preferred first, whether they have loops."""
    graphs = [graphs for candidates in module._graphs._by_kind.values() for graphs in candidates]
    steps = [each.passes.step for each in graphs if each.passes.trained]
    return ["loops.cpp" in "".join(step.programs.programs.values()) for step in steps]  # type: ignore[union-attr]


@needs_compiler
@pytest.mark.parametrize("loops_win", [True, False])
def test_the_faster_kernels_stay(
    loops_win: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Results, gradients and buffers are PyTorch's before, during and after; the next module begins with the choice."""
    fix_race(monkeypatch, tmp_path, loops_win)
    caplog.set_level(logging.INFO, "ort_trainer")
    model = net()
    reference = copy.deepcopy(model)
    ours = ORTModule(model, FASTEST)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, reference)]

    def step() -> None:
        x, label = torch.randn(5, 6), torch.randint(0, 3, (5,))
        ours(x)  # without a backward pass, so not counted
        reference(x)
        losses = [F.cross_entropy(each(x), label) for each in (ours, reference)]
        close([losses[0]], [losses[1]])
        for loss, optimizer in zip(losses, optimizers, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    step()
    assert loops_run(ours) == [False] and "compiling loops while training goes on" in caplog.text
    end = time.monotonic() + 100
    while "training goes on with" not in caplog.text and time.monotonic() < end:
        step()
        if ours._graphs._compilations.running:
            time.sleep(0.2)  # leaves the processor to the compiler
    kernels = "compiled loops" if loops_win else "PyTorch's kernels"
    assert f"training goes on with {kernels}" in caplog.text
    for _ in range(5):
        step()
    close([*ours.state_dict().values()], [*reference.state_dict().values()])
    assert loops_run(ours)[0] is loops_win
    caplog.clear()
    again = ORTModule(net(), FASTEST)
    again(torch.randn(5, 6)).sum().backward()
    assert loops_run(again) == [loops_win]
    assert f"these kernels were chosen in an earlier run: {kernels}, as a call's passes took" in caplog.text
    assert "compiling" not in caplog.text


def test_it_does_not_go_with_equal_kernels() -> None:
    options = ORTTrainerOptions({"utils": {"kernels": "fastest"}, "debug": {"deterministic_compute": True}})
    with pytest.raises(ValueError, match="deterministic_compute is True, but utils.kernels is 'fastest'"):
        ORTModule(net(), options)(torch.randn(5, 6))
