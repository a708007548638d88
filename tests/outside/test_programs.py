"""Models that read or leave values outside tensors train as in PyTorch, whatever is changed between steps."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ort_trainer import ORTModule, ORTTrainer, ORTTrainerOptions, optim

from .programs import KINDS, graphs_of, in_a_loop, programs, trained


def _verify_every(seed: int) -> int:
    """Returns the option: one program of each kind in three is compared with PyTorch in every step."""
    return int(seed % 3 == 0)


def _check(ours: Any, reference: Any, losses: list[float], graphs: int, expected: int) -> None:
    assert losses == pytest.approx(trained(reference, in_a_loop(reference.model)), rel=1e-4), ours.source
    assert torch.allclose(ours.state().float(), reference.state().float(), rtol=1e-4), ours.source
    assert graphs == expected, ours.source
    for used in (ours, reference):
        del sys.modules[used.__name__]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("how", "kind"), KINDS, ids=[f"{how}, {kind}" for how, kind in KINDS])
def test_the_trainer_takes_and_leaves_what_pytorch_does(how: str, kind: str, seed: int) -> None:
    ours, reference = programs(how, kind, seed)
    options = ORTTrainerOptions({"utils": {"grad_norm_clip": False}, "debug": {"verify_every": _verify_every(seed)}})
    trainer = ORTTrainer(ours.model, "auto", optim.SGDConfig(lr=0.1), loss_fn=F.cross_entropy, options=options)
    losses = trained(ours, lambda x, y: trainer.train_step(x, y)[0])
    _check(ours, reference, losses, len(trainer.session.graphs(True)), graphs_of(how, kind))


@pytest.mark.parametrize("seed", range(3, 6))
@pytest.mark.parametrize(("how", "kind"), KINDS, ids=[f"{how}, {kind}" for how, kind in KINDS])
def test_a_wrapped_module_takes_and_leaves_what_pytorch_does(how: str, kind: str, seed: int) -> None:
    ours, reference = programs(how, kind, seed)
    wrapped = ORTModule(ours.model, {"debug": {"verify_every": _verify_every(seed)}})
    losses = trained(ours, in_a_loop(wrapped))
    graphs = sum(map(len, wrapped._graphs._by_kind.values()))
    _check(ours, reference, losses, graphs, graphs_of(how, kind))
