"""Models that read or leave values outside tensors train as in PyTorch, whatever is changed between steps."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ort_trainer import ORTModule, ORTTrainer, ORTTrainerOptions, optim

from .programs import KINDS, program

_STEPS = 5


def _programs(how: str, kind: str, seed: int) -> tuple[Any, Any]:
    """Returns two equal programs, with the same weights."""
    first, second = (program(how, kind, seed) for _ in range(2))
    second.model.load_state_dict(first.model.state_dict())
    return first, second


def _batch(width: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, width, generator=generator), torch.randint(3, (4,), generator=generator)


def _losses_of_pytorch(reference: Any) -> list[float]:
    optimizer = torch.optim.SGD(reference.model.parameters(), lr=0.1)
    losses = []
    for step in range(_STEPS):
        if step == 2:
            reference.change()
        x, y = _batch(reference.width, step)
        loss = F.cross_entropy(reference.model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _check(ours: Any, reference: Any, losses: list[float], graphs: int) -> None:
    assert losses == pytest.approx(_losses_of_pytorch(reference), rel=1e-4), ours.source
    assert torch.allclose(ours.state().float(), reference.state().float(), rtol=1e-4), ours.source
    assert graphs <= 3, ours.source
    for used in (ours, reference):
        del sys.modules[used.__name__]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("how", "kind"), KINDS, ids=[f"{how}, {kind}" for how, kind in KINDS])
def test_the_trainer_takes_and_leaves_what_pytorch_does(how: str, kind: str, seed: int) -> None:
    ours, reference = _programs(how, kind, seed)
    options = ORTTrainerOptions({"utils": {"grad_norm_clip": False}})
    config = optim.SGDConfig(lr=0.1)
    trainer = ORTTrainer(ours.model, "auto", config, loss_fn=F.cross_entropy, options=options)
    losses = []
    for step in range(_STEPS):
        if step == 2:
            ours.change()
        losses.append(float(trainer.train_step(*_batch(ours.width, step))[0]))
    _check(ours, reference, losses, len(trainer.session.graphs(True)))


@pytest.mark.parametrize("seed", range(3, 6))
@pytest.mark.parametrize(("how", "kind"), KINDS, ids=[f"{how}, {kind}" for how, kind in KINDS])
def test_a_wrapped_module_takes_and_leaves_what_pytorch_does(how: str, kind: str, seed: int) -> None:
    ours, reference = _programs(how, kind, seed)
    wrapped = ORTModule(ours.model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    losses = []
    for step in range(_STEPS):
        if step == 2:
            ours.change()
        x, y = _batch(ours.width, step)
        loss = F.cross_entropy(wrapped(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    _check(ours, reference, losses, sum(map(len, wrapped._graphs._found.values())))
