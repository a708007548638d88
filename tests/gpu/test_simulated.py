"""A trainer on a device that is not the CPU, simulated in Python: the numbers, and what touches the CPU meanwhile.

An ``ORTModule`` refuses its tensors, which are of a class of their own; PyTorch has no autocast for it; and a model on
the CPU can't move there in place.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ort_trainer import ORTTrainer, optim

from ..helpers import assert_close, mlp_batches
from . import simulated
from .models import MODELS

DEVICE = simulated.NAME
UNVERIFIED = {"debug": {"verify_every": "off"}}  # a comparison with PyTorch reads what both computed


@pytest.fixture(autouse=True)
def _device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    simulated.register()
    monkeypatch.setattr(torch, "Generator", simulated.Generator)
    torch.manual_seed(0)
    yield


def there(batch: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(value.to(DEVICE) for value in batch)


def model(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, 3))


def trainer_of(module: nn.Module, options: dict[str, Any] | None = None, config: Any = None) -> ORTTrainer:
    config = optim.AdamWConfig(lr=1e-2) if config is None else config
    return ORTTrainer(module, "auto", config, loss_fn=F.cross_entropy, options=options)


def test_what_touches_the_cpu_is_counted() -> None:
    x = torch.randn(3).to(DEVICE)
    with simulated.Watch() as watch:
        x.exp().add_(1).sum()
    assert not watch.reads and not watch.on_cpu
    with simulated.Watch() as watch:
        x.sum().item()
        x.cpu() + 1
        torch.ones(2)
    assert watch.reads.keys() == {"aten._local_scalar_dense.default", "aten._to_copy.default"}
    assert watch.on_cpu.keys() == {"aten.add.Tensor", "aten.ones.default"}


@pytest.mark.parametrize(
    "name", ["convolutions", "encoder with padding", "dlrm", "operators", "mixture of experts", "bert"]
)
def test_models_train_as_on_the_cpu(name: str) -> None:
    module, batches = MODELS[name]()
    reference = copy.deepcopy(module)
    trainer = ORTTrainer(module.to(DEVICE), "auto", optim.SGDConfig(lr=0.02), options=UNVERIFIED)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.02)
    for number, batch in enumerate(batches * 2):
        with simulated.Watch() as watch:
            loss = trainer.train_step(*there(batch))
        if number >= 2:
            assert not watch.reads and not watch.on_cpu
        expected = reference(*batch)
        assert_close(loss.cpu(), expected.detach(), 1e-5, "loss")
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert trainer.loop.device.type == DEVICE and trainer.loop.kernels == "PyTorch's"


def test_accumulation_with_clipping() -> None:
    module = model()
    reference = copy.deepcopy(module)
    options = {"batch": {"gradient_accumulation_steps": 2}, "utils": {"grad_norm_clip": True, "max_grad_norm": 0.1}}
    trainer = trainer_of(module.to(DEVICE), {**options, **UNVERIFIED}, optim.AdamWConfig(lr=1e-2))
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for number, (x, label) in enumerate(mlp_batches(8)):
        with simulated.Watch() as watch:
            loss = trainer.train_step(*there((x, label)))[0]
        if number >= 4:
            assert not watch.reads and not watch.on_cpu
        expected = F.cross_entropy(reference(x), label)
        assert_close(loss.cpu(), expected.detach(), 1e-5, "loss")
        (expected / 2).backward()
        if number % 2:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        assert ours.device.type == DEVICE
        assert_close(ours.detach().cpu(), theirs.detach(), 1e-5, "weight")


def test_dropout_draws_pytorchs_masks() -> None:
    """The device draws from the CPU's generator. PyTorch can't differentiate there, if it has begun to before."""
    module, batches = model(0.3), mlp_batches(6)
    reference = copy.deepcopy(module)
    trainer = trainer_of(module.to(DEVICE), {"utils": {"random_numbers": "pytorch_global"}}, optim.SGDConfig(lr=0.1))
    trainer.prepare(there(batches[0]))
    state = torch.get_rng_state()
    ours = [trainer.train_step(*there(batch))[0].item() for batch in batches]
    torch.set_rng_state(state)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for (x, label), loss in zip(batches, ours, strict=True):
        expected = F.cross_entropy(reference(x), label)
        assert loss == pytest.approx(expected.item(), rel=1e-5)
        expected.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_checkpoint_goes_to_the_cpu_and_back(tmp_path: Path) -> None:
    batches = mlp_batches(6)
    first = trainer_of(model().to(DEVICE))
    for batch in batches[:3]:
        first.train_step(*there(batch))
    first.save_checkpoint(tmp_path / "there")
    on_cpu = trainer_of(model(), {"device": {"id": "cpu"}})
    on_cpu.load_checkpoint(tmp_path / "there")
    on_cpu.save_checkpoint(tmp_path / "here")
    second = trainer_of(model().to(DEVICE))
    second.load_checkpoint(tmp_path / "here")
    for batch in batches[3:]:
        ours, theirs, others = (each.train_step(*values)[0] for each, values in (
            (first, there(batch)), (second, there(batch)), (on_cpu, batch)
        ))  # fmt: skip
        assert torch.equal(ours.cpu(), theirs.cpu())
        assert_close(others, ours.cpu(), 1e-5, "loss")


def test_evaluation(tmp_path: Path) -> None:
    module, (x, label) = model(0.5).to(DEVICE), there(mlp_batches(1)[0])
    trainer = trainer_of(module)
    trainer.train_step(x, label)
    loss, prediction = trainer.eval_step(x, label)
    module.eval()
    assert_close(prediction.cpu(), module(x).detach().cpu(), 1e-5, "prediction")
    assert_close(loss.cpu(), F.cross_entropy(prediction, label).cpu(), 1e-5, "loss")
    trainer.save_as_onnx(tmp_path / "model.onnx")
    trainer.export_artifacts(tmp_path / "artifacts")


def test_a_run_of_fit() -> None:
    trainer = trainer_of(model().to(DEVICE))
    assert trainer.fit(mlp_batches(4), epochs=2).steps == 8
